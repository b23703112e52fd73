"""Types that several folders share. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttentionParams:
    """Parameters of a model's attention, besides q, k and v.

    Args:
        scale: softmax scaling.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sink_logits: ``[Hq]`` logits of learned attention sinks (``s_aux``), or None.
        sliding_window: a query at column ``c`` sees columns ``> c - sliding_window``, or None.
    """

    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None
    sliding_window: int | None = None
