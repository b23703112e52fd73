"""Attention sinks and the recent window, nothing else (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..config import SparseConfig
from ..kv.store import LayerStore
from ..types import AttentionParams
from .registry import register
from .selector import Selector


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(SparseConfig):
    """A decode step attends to the first ``sinks`` tokens and to the ``window`` most recent ones.

    Source: StreamingLLM. What lies between them stays stored, at its own position, so that a later prompt can attend to
    it; a step never reads it. Recent tokens that do not fill a block yet are attended to as well (``SparseConfig``).
    """

    window: int = 1024


@register(
    "streaming",
    StreamingConfig,
    about="attention sinks and the recent window, nothing else (StreamingLLM)",
    knob=("window", 64, 4096),
)
class StreamingPolicy(Selector):
    """Sinks and recent tokens are always attended to: there is nothing to choose."""

    drafts = "together"

    def select(self, q: Tensor, store: LayerStore, params: AttentionParams) -> Tensor:
        return store.table.new_full((store.batch, store.heads, 1), -1)
