"""Attention sinks and the recent window, nothing else (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from torch import Tensor

from hf_sparsekv_config.streaming import StreamingConfig

from ..kv.store import LayerStore
from ..types import AttentionParams
from .registry import register
from .selector import Selector


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
