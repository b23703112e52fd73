"""Predict the next query from the last ones."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import give, use_triton
from .reference import check
from .reference import query_predict as _reference

__all__ = ["query_predict"]


def query_predict(
    ring: Tensor,
    position: Tensor,
    count: Tensor,
    window: int,
    epsilon: float,
    pool: bool = True,
    softmax: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """The next query of each row and head, ``[batch, Hq, D]``; see ``reference.query_predict``."""
    check(ring, position, count, window, epsilon, out)
    if use_triton(ring):
        from .triton import query_predict as kernel

        return kernel(ring, position, count, window, epsilon, pool, softmax, out)
    return give(_reference(ring, position, count, window, epsilon, pool, softmax), out)
