"""Copy listed blocks into frames (SparseServe's FlashH2D)."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import block_copy as _reference

__all__ = ["block_copy"]


def block_copy(kv: Tensor, frames: Tensor, copies: Tensor, n_copies: Tensor) -> None:
    """Copy blocks into frames; see ``reference.block_copy``.

    Where there is a GPU and the source is pinned or on it, a kernel reads it in place: nothing waits, and it can be
    captured.
    """
    if use_triton(frames) and (kv.is_cuda or kv.is_pinned()):
        from .triton import block_copy as kernel

        kernel(kv, frames, copies, n_copies)
    else:
        _reference(kv, frames, copies, n_copies)
