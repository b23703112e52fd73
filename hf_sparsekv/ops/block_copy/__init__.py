"""Copy listed blocks into frames (SparseServe's FlashH2D)."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .dma import block_copy as _dma
from .reference import block_copy as _reference

__all__ = ["BACKENDS", "block_copy"]

BACKENDS = ("auto", "uva", "dma", "torch")


def block_copy(kv: Tensor, frames: Tensor, copies: Tensor, n_copies: Tensor, how: str = "auto") -> None:
    """Copy blocks into frames; see ``reference.block_copy``.

    Args:
        how: ``"uva"``: a kernel reads pinned memory in place; nothing waits, can be captured. ``"dma"``: the host
            reads the list and drives the copy engine. ``"torch"``: plain indexing. ``"auto"``: ``"uva"`` where there
            is a GPU and the source is pinned or on it. (What prefetching prefers: ``transfer.Settings.backend``.)
    """
    if how not in BACKENDS:
        raise ValueError(f"how must be one of {BACKENDS}, got {how!r}")
    if how == "auto":
        how = "uva" if use_triton(frames) and (kv.is_cuda or kv.is_pinned()) else "torch"
    if how == "uva":
        from .triton import block_copy as kernel

        kernel(kv, frames, copies, n_copies)
    elif how == "dma":
        _dma(kv, frames, copies, n_copies)
    else:
        _reference(kv, frames, copies, n_copies)
