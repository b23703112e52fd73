"""Add the residual stream and normalise the sum."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import MAX_WIDTH
from .reference import add_norm as _reference

__all__ = ["MAX_WIDTH", "add_norm"]


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    unit_offset: bool = False,
    post_weight: Tensor | None = None,
    post_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``residual + x`` and its RMS norm; see ``reference.add_norm``."""
    if use_triton(x):
        from .triton import add_norm as kernel

        return kernel(x, residual, weight, eps, unit_offset, post_weight, post_eps)
    return _reference(x, residual, weight, eps, unit_offset, post_weight, post_eps)
