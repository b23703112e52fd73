"""RMS norm and rotary embedding of queries and keys: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layers.add_norm.reference import rms_norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first ``R`` of ``D`` dimensions of ``x [batch, q, H, D]``.

    Dimension ``i`` is rotated with ``i + R / 2``. ``cos`` and ``sin`` are ``[batch or 1, q, R]``.
    """
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    half = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    turned = turned * cos.unsqueeze(2) + half * sin.unsqueeze(2)
    return torch.cat((turned, rest), dim=-1)


def qk_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_eps: float = 0.0,
    k_eps: float = 0.0,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate queries and keys for the cache.

    Args:
        q: ``[batch, q, H, D]``, as projected.
        k: ``[batch, q, Hkv, D]``.
        cos, sin: ``[batch or 1, q, R]`` with ``R <= D`` even, in the dtype of ``q``; see ``rotate``.
        q_weight, k_weight: ``[D]``, RMS norm weights of each head, applied before the rotation; both or neither.
        unit_offset: these norms multiply by ``1 + weight``.

    Returns:
        ``[batch, H, q, D]`` and ``[batch, Hkv, q, D]``, views of tensors laid out like ``q`` and ``k``.
    """
    if q_weight is not None:
        q = rms_norm(q, q_weight, q_eps, unit_offset)
        k = rms_norm(k, k_weight, k_eps, unit_offset)
    return rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2)
