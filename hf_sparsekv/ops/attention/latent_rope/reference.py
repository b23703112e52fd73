"""Queries, latents and rotary parts of MLA, ready for the cache: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.add_norm.reference import rms_norm


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of ``x [batch, q, H, R]``; ``cos`` and ``sin`` are ``[batch or 1, q, R]``.

    Dimension ``i`` is rotated with ``i + R / 2``. If ``interleaved``, ``2 i`` is rotated with ``2 i + 1``, and the
    result has the first layout.
    """
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    cos, sin = cos[..., :half].unsqueeze(2), sin[..., :half].unsqueeze(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def latent_rope(
    q: Tensor, compressed: Tensor, cos: Tensor, sin: Tensor, weight: Tensor, eps: float, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Prepare an MLA layer's projections for the cache: rotary embedding and the RMS norm of the latents.

    Args:
        q: ``[batch, q, H, dn + dr]`` as projected.
        compressed: ``[batch, q, r + dr]`` as projected: latents and rotary parts.
        cos, sin: ``[batch or 1, q, dr]``, both halves alike.
        weight: ``[r]`` of the latents' RMS norm.
        eps: epsilon of that norm.
        interleaved: see :func:`turn`.

    Returns:
        Queries ``[batch, H, q, dn + dr]``, latents ``[batch, 1, q, r]``, rotary parts ``[batch, 1, q, dr]``.
    """
    rope, rank = cos.shape[-1], weight.shape[0]
    nope, turned = q[..., :-rope], turn(q[..., -rope:], cos, sin, interleaved)
    latent = rms_norm(compressed[..., :rank], weight, eps, False)
    rotary = turn(compressed[..., None, rank:], cos, sin, interleaved)
    return torch.cat((nope, turned), dim=-1).transpose(1, 2), latent[:, None], rotary.transpose(1, 2)
