"""Which chosen blocks lie in a frame on the device, and which frame the others get."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import give, use_triton
from .reference import WINDOW
from .reference import lookup as _lookup
from .reference import residency as _reference
from .state import COUNTERS, FREE, FrameState

__all__ = ["COUNTERS", "FREE", "WINDOW", "FrameState", "lookup", "residency"]


def residency(
    block_ids: Tensor,
    slots: Tensor,
    state: FrameState,
    layer: int,
    keep: int,
    window: int = WINDOW,
    *,
    places: Tensor | None = None,
    copies: Tensor | None = None,
    n_copies: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Places of one layer's chosen blocks; see ``reference.residency``.

    ``places``, ``copies`` and ``n_copies`` receive the result.
    """
    if use_triton(block_ids):
        from .triton import residency as kernel

        return kernel(block_ids, slots, state, layer, keep, window, places=places, copies=copies, n_copies=n_copies)
    result = _reference(block_ids, slots, state, layer, keep, window)
    return tuple(give(r, out) for r, out in zip(result, (places, copies, n_copies)))


def lookup(
    block_ids: Tensor, slots: Tensor, table: Tensor, stamp: Tensor, since: Tensor | None = None, *, out=None
) -> Tensor:
    """Places of blocks as they are; see ``reference.lookup``. ``out`` receives the result."""
    if use_triton(block_ids):
        from .lookup import lookup as kernel

        return kernel(block_ids, slots, table, stamp, since, out=out)
    return give(_lookup(block_ids, slots, table, stamp, since), out)
