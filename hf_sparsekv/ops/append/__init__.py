"""Write new tokens into the ring of recent tokens."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import append as _reference

__all__ = ["append"]


def append(
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    near_kv: Tensor,
    near_valid: Tensor,
    length: Tensor,
    sinks: int,
) -> None:
    """Store new tokens in the near buffer; see ``reference.append``."""
    if use_triton(near_kv):
        from .triton import append as kernel

        kernel(k, v, valid, near_kv, near_valid, length, sinks)
    else:
        _reference(k, v, valid, near_kv, near_valid, length, sinks)
