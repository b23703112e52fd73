"""A linear layer for a few rows: the definition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..gated.reference import ACTIVATIONS, gated

MAX_ROWS = 16  # the kernel's limit: rows are padded to one tensor core tile


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """``x @ weight.T + bias``, ``[..., out]``, for ``x`` ``[..., in]`` of at most ``MAX_ROWS`` rows.

    ``weight`` is ``[out, in]``, ``bias`` ``[out]``, all of one dtype; sums are computed in float32.

    With an ``activation`` (one of :data:`.gated.ACTIVATIONS`), the first half of ``weight`` and ``bias`` is a gated
    MLP's gate, the second half its up projection. The result is :func:`.gated.gated` of both, ``[..., out / 2]``.

    Raises:
        ValueError: the activation is unknown, or ``out`` is odd with an activation.
    """
    check(weight, activation)
    out = F.linear(x, weight, bias)
    return out if activation is None else gated(*out.chunk(2, dim=-1), activation)


def check(weight: Tensor, activation: str | None) -> None:
    """Raise ``ValueError`` for an unknown activation, or a weight that is not a gate and an up projection."""
    if activation is None:
        return
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    if weight.shape[0] % 2:
        raise ValueError(f"gate and up projection are equally many rows of the weight, got {weight.shape[0]} in all")
