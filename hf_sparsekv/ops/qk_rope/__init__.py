"""Normalise queries and keys and turn them to their positions."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import qk_rope as _reference

__all__ = ["qk_rope"]


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
    """Queries and keys ready for the cache; see ``reference.qk_rope``."""
    if use_triton(q):
        from .triton import qk_rope as kernel

        return kernel(q, k, cos, sin, q_weight, k_weight, q_eps, k_eps, unit_offset)
    return _reference(q, k, cos, sin, q_weight, k_weight, q_eps, k_eps, unit_offset)
