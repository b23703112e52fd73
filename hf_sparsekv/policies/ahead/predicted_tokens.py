"""Tokens chosen by their labels for a query that is not there yet, by any prediction.

The expected query is an earlier one (:mod:`.earlier_queries`), or comes from the layer before (:mod:`.layer_ahead`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hf_sparsekv_config.predictive import PredictiveConfig

from ...kv.state import Held
from ...kv.store import LayerStore
from ...ops.selection.topk_select import token_select
from ...tensors import no_inference_mode
from ..label_index import LabelIndex
from ..labelled import LabelledPolicy
from ..memory import Request


class PredictedTokens(LabelledPolicy):
    """State: the tokens that are chosen, where their number is fixed; with blocks in host memory, their copies."""

    TENSORS: ClassVar = {"ids": Held(trial=True, counted=True)}  # [batch, H, room]

    config: PredictiveConfig
    labels: LabelIndex
    ids: Tensor
    method = "predictive"

    def __init__(self, config: PredictiveConfig, layer_idx: int, offloaded: bool, channels=None) -> None:
        super().__init__(config, layer_idx, offloaded, channels)
        self.whole_tokens = max(self.whole_tokens, whole_until(config))

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        if self.need is not None:
            return
        room, batch = room_for(self.config), store.batch
        if self.ids is None or self.ids.shape[0] != batch or self.ids.device != store.device:
            self.ids = torch.full((batch, store.heads, room), -1, dtype=torch.int32, device=store.device)

    def choose_for(self, q: Tensor, store: LayerStore) -> None:
        """Write the tokens that this query wants to :attr:`ids`."""
        budget = self.config.budget
        scores, ids = self.scores(q, store), self.ids[..., :budget]
        token_select(scores, None, budget, store.block_size, rows=store.rows, out=ids)

    def scores(self, q: Tensor, store: LayerStore, out: Tensor | None = None) -> Tensor:
        """Scores of all tokens in full blocks for ``q [batch, Hq, Dk]``: ``[batch, H, n]``.

        Contents after a row's sealed tokens may be anything.
        """
        return self.labels.scores(q, store, out=out, fill=False)

    def file_names(self) -> set[str]:
        return super().file_names() | {"chosen", "queries", "queries_from"}  # perhaps of another predictor


def whole_until(config: PredictiveConfig) -> int:
    """So many tokens in full blocks are all attended to because of ``start_length``."""
    return config.start_length - config.window - config.max_draft - 1


def room_for(config: PredictiveConfig) -> int:
    """Tokens that a row and KV head can hold chosen of a fixed number: the budget, in whole blocks."""
    return -(-config.budget // config.block_size) * config.block_size


def ids_bytes(request: Request) -> int:
    """Bytes of the ids of chosen tokens, all layers."""
    config = request.config
    room = room_for(config) if config.threshold is None else 0  # by need they are not kept
    return sum(request.batch * each.heads * room * 4 for each in request.layers)
