"""Tokens chosen by their labels for a query that is not there yet, whoever expects it.

Apart from who expects it: earlier queries (:mod:`.earlier_queries`), or the layer before (:mod:`.layer_ahead`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...kv.state import Held
from ...kv.store import LayerStore
from ...ops.selection.topk_select import token_select
from ...tensors import no_inference_mode
from ..label_index import LabelIndex
from ..labelled import LabelledPolicy
from ..memory import Request
from ..plan import CROSSOVER, DENSE, Plan, planned
from .predictive_config import PredictiveConfig


class PredictedTokens(LabelledPolicy):
    """State: the tokens that are chosen; with blocks in host memory, their copies."""

    TENSORS: ClassVar = {"ids": Held(trial=True, counted=True)}  # [batch, H, room]

    config: PredictiveConfig
    labels: LabelIndex
    ids: Tensor
    method = "predictive"

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        if self.config.tail is not None and not on_second_device(self.config):
            store.keep_means(self.config.tail_tokens)
        room, batch = room_for(self.config), store.batch
        if self.ids is None or self.ids.shape[0] != batch or self.ids.device != store.device:
            self.ids = torch.full((batch, store.heads, room), -1, dtype=torch.int32, device=store.device)

    def plan_all(self, store: LayerStore) -> Plan | None:
        """The plan of a step that attends to all tokens, because few are cached or channels are not known yet."""
        if self.labels.calibrating:
            return planned(learns=True, captured=self.labels.goes_on)
        if not selects(self.config, store):
            return DENSE
        return CROSSOVER if self.crossover.below(store) else None

    def choose_for(self, q: Tensor, store: LayerStore) -> None:
        """Write the tokens that this query wants to :attr:`ids`."""
        budget = self.config.token_budget
        scores, ids = self.scores(q, store), self.ids[..., :budget]
        token_select(scores, None, budget, store.block_size, rows=store.rows, out=ids)

    def scores(self, q: Tensor, store: LayerStore, out: Tensor | None = None) -> Tensor:
        """Scores of all tokens in full blocks for ``q [batch, Hq, Dk]``: ``[batch, H, n]``.

        Contents after a row's sealed tokens may be anything.
        """
        return self.labels.scores(q, store, out=out, fill=False)

    def file_names(self) -> set[str]:
        return super().file_names() | {"chosen", "queries", "queries_from"}  # perhaps of another predictor


def selects(config: PredictiveConfig, store: LayerStore, all_of: int | None = None) -> bool:
    """Steps attend to a selection at this length; that changes only where a block is sealed.

    ``all_of``: so many tokens in full blocks are all attended to; default: the budget.
    """
    held = store.full_blocks * store.block_size
    if held <= (config.token_budget if all_of is None else all_of):
        return False
    return held + config.window + config.max_draft >= config.start_length


def room_for(config: PredictiveConfig) -> int:
    """Tokens that a row and KV head can hold chosen: the budget, in whole blocks."""
    return -(-config.token_budget // config.block_size) * config.block_size


def ids_bytes(request: Request) -> int:
    """Bytes of the ids of chosen tokens, all layers."""
    return sum(request.batch * each.heads * room_for(request.config) * 4 for each in request.layers)


def on_second_device(config: PredictiveConfig) -> bool:
    """Another device keeps the blocks, and chooses."""
    return config.cache_rank not in (None, "stream", "host")
