"""Add the residual stream and normalise the sum: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_WIDTH = 32768  # the kernel's limit: a program holds a whole row in registers


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool, rounds_once: bool = False) -> Tensor:
    """``x`` ``[..., n]`` divided by its root mean square, times ``weight`` ``[n]``, in the dtype of ``x``.

    The statistic is computed in float32. With ``unit_offset`` (Gemma) the factor is ``1 + weight`` and the result is
    rounded once, as it is with ``rounds_once`` (gpt-oss). Otherwise (Llama) the normalised ``x`` is rounded before the
    multiplication.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    if rounds_once:
        return (wide * weight.float()).to(x.dtype)
    return weight * wide.to(x.dtype)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    unit_offset: bool = False,
    post_weight: Tensor | None = None,
    post_eps: float = 0.0,
    rounds_once: bool = False,
) -> tuple[Tensor, Tensor]:
    """``residual + x`` and its RMS norm.

    Args:
        x: ``[..., n]``, the output of a layer's attention or MLP.
        residual: ``[..., n]``, or ``None`` to add nothing.
        weight: ``[n]`` of the norm that follows. All tensors have the dtype of ``x``.
        unit_offset: norms multiply by ``1 + weight``; see ``rms_norm``, also for ``rounds_once``.
        post_weight: ``[n]`` of a norm of ``x`` before it is added (Gemma), with ``post_eps``.

    Returns:
        The sum (``x`` itself without a residual) and the normalised sum, both ``[..., n]``.
    """
    if post_weight is not None:
        x = rms_norm(x, post_weight, post_eps, unit_offset, rounds_once)
    total = x if residual is None else residual + x
    return total, rms_norm(total, weight, eps, unit_offset, rounds_once)
