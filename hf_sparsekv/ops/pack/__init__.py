"""Keep the chosen tokens of each KV head together; only newly chosen ones travel."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import use_triton
from .reference import pack as _reference

__all__ = ["pack"]


def pack(
    ids: Tensor,
    kv: Tensor,
    slots: Tensor,
    held: Tensor,
    order: Tensor,
    packed: Tensor,
    places: Tensor,
    *,
    enabled: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    """Bring a selection together in place; see ``reference.pack``. ``kv`` may be pinned host memory."""
    named = {"enabled": enabled, "counters": counters}
    # The kernel reads host memory in place only where it is pinned.
    if use_triton(packed) and (kv.is_cuda or kv.is_pinned()):
        from .triton import pack as kernel

        kernel(ids, kv, slots, held, order, packed, places, **named)
    else:
        _reference(ids, kv, slots, held, order, packed, places, **named)
