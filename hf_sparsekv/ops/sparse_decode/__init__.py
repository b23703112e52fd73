"""Exact attention of one query per row over chosen cached tokens."""

from __future__ import annotations

from torch import Tensor

from .._dispatch import give, use_triton
from .reference import sparse_decode as _reference

__all__ = ["sparse_decode"]


def sparse_decode(
    q: Tensor,
    kv: Tensor,
    flags: Tensor,
    slots: Tensor,
    ids: Tensor | None,
    near_kv: Tensor,
    near_valid: Tensor,
    *,
    granularity: str,
    value_dim: int,
    sinks: int,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    attended: Tensor | None = None,
    frames: Tensor | None = None,
    places: Tensor | None = None,
    from_host: Tensor | None = None,
    lse: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Softmax attention over the near buffer and the chosen part of the stored blocks.

    See ``reference.sparse_decode``. ``out`` receives the result; ``scratch`` is float32 of
    ``triton.scratch_size()`` entries. ``kv`` may be pinned host memory while the rest is on the device.
    """
    named = {
        "granularity": granularity,
        "value_dim": value_dim,
        "sinks": sinks,
        "scale": scale,
        "softcap": softcap,
        "sink_logits": sink_logits,
        "attended": attended,
        "frames": frames,
        "places": places,
        "from_host": from_host,
        "lse": lse,
    }
    # The kernel reads host memory in place only where it is pinned.
    if use_triton(q) and (kv.is_cuda or kv.is_pinned()):
        from .triton import sparse_decode as kernel

        return kernel(q, kv, flags, slots, ids, near_kv, near_valid, **named, out=out, scratch=scratch)
    return give(_reference(q, kv, flags, slots, ids, near_kv, near_valid, **named), out)
