"""Keep the latest queries of each row."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import push as _reference

__all__ = ["push"]


def push(
    q: Tensor, valid: Tensor | None, column: Tensor, ring: Tensor, first: Tensor, count: Tensor, position: Tensor
) -> None:
    """Store new queries; see ``reference.push``."""
    if use_triton(ring):
        from .triton import push as kernel

        kernel(q, valid, column, ring, first, count, position)
    else:
        _reference(q, valid, column, ring, first, count, position)
