"""Move the oldest full block of the ring into a slot, with what a selection keeps of it."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import Index, key_bounds, key_metadata, quantise_labels
from .reference import seal as _reference

__all__ = ["Index", "key_bounds", "key_metadata", "quantise_labels", "seal"]


def seal(
    near_kv: Tensor,
    near_valid: Tensor,
    at: int,
    sinks: int,
    seen: Tensor,
    slots: Tensor,
    kv: Tensor,
    flags: Tensor,
    fill: Tensor,
    index: Index,
) -> None:
    """Seal one block of every row; see ``reference.seal``. ``kv`` may be pinned host memory."""
    args = (near_kv, near_valid, at, sinks, seen, slots, kv, flags, fill, index)
    # The kernel writes host memory in place only where it is pinned.
    if use_triton(near_kv) and (kv.is_cuda or kv.is_pinned()):
        from .triton import seal as kernel

        kernel(*args)
    else:
        _reference(*args)
