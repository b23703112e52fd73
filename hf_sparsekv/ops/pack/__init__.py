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
    scratch: Tensor | None = None,
) -> None:
    """Bring a selection together in place; see ``reference.pack``.

    ``kv`` may be pinned host memory, and ``packed`` and ``places`` another GPU's. ``scratch`` is int32 of twice as many
    entries as ``ids``.
    """
    named = {"enabled": enabled, "counters": counters}
    # The kernel reads host memory in place only where it is pinned.
    if use_triton(ids) and packed.is_cuda and (kv.is_cuda or kv.is_pinned()):
        from .triton import pack as kernel

        kernel(ids, kv, slots, held, order, packed, places, **named, scratch=scratch)
    else:
        _reference(ids, kv, slots, held, order, packed, places, **named)
