"""Selection for the query that the layer before expects in the same step (InfiniGen speculates likewise)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...kv.counters import Tally
from ...kv.state import Held
from ...kv.store import LayerStore
from ...ops.topk_select import token_select
from ...predictor.channels import LabelChannels
from ...tensors import no_inference_mode, reads_here
from ...types import AttentionParams
from ..plan import Plan, planned
from .predictive import PredictivePolicy
from .predictive_config import PredictiveConfig


class LayerAheadPolicy(PredictivePolicy):
    """Tokens of all full blocks by their labels, for the query expected of this step; or for its own query.

    Nothing that is chosen outlives its step: what the step before has sealed can be chosen, and crops, beams and copies
    of the cache have no choice to follow. Where nobody foresees a layer's query (the first layer; no hooks on the
    model), :meth:`attend` chooses by the query that it gets, before it attends. So do drafts: nobody foresees theirs.

    State, with :attr:`source` ``"in_delta"``: what the layer before added to the residual stream for each row's last
    token. Zero where that is not known: in a new or loaded cache, after a crop, and after steps that were not foreseen.
    """

    warns_unforeseen = True
    rows_join = True
    drafts = "together"
    TENSORS: ClassVar = {"added": Held(trial=True)}  # [batch, 1, hidden], of the stream's dtype
    HOST: ClassVar = {
        "foreseen": None,  # columns that were cached when tokens were chosen beforehand
        "added_at": None,  # columns cached with the token that `added` belongs to
        "_places": None,  # where the chosen tokens are, from their choice to the attention to them
    }
    note = None

    @property
    def whole_tokens(self) -> int:
        return self.config.token_budget

    def __init__(
        self, config: PredictiveConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded, channels)
        self.foresight = self.foresees_by(config, offloaded)
        self.low_priority = False  # the next layer waits for it
        self.layers_per_launch = 1

    @property
    def saved_as(self) -> str:
        return PredictivePolicy.__name__  # files know which predictor it was from the configuration

    @property
    def follows_crops(self) -> bool:
        return self.source == "in_delta"

    def plan(self, store: LayerStore) -> Plan:
        plan = super().plan(store)
        if not plan.ahead:
            return plan  # where others choose for the next step, this one chooses
        return planned("chosen", paged=self.tokens is not None, foresees=self.source is not None)

    def prepare(self, store: LayerStore) -> Plan:
        plan = self.plan(store)
        if not plan.dense and not plan.paged and self.enter(store):
            plan = self.plan(store)
        if plan.foresees and self.source == "in_delta":
            width, dtype = self.stream_like
            self._fit_added((store.batch, 1, width), dtype, store)
        return plan

    @no_inference_mode
    def _fit_added(self, shape: tuple[int, ...], dtype: torch.dtype, store: LayerStore) -> None:
        """A step is about to read :attr:`added`: zeros, unless it belongs to the last token."""
        if self.added is None or tuple(self.added.shape) != shape or self.added.device != store.device:
            self.added = torch.zeros(shape, dtype=dtype, device=store.device)
        elif self.added_at != store.length:
            self.added.zero_()
        self.added_at = store.length

    def expected(self, stream: Tensor, store: LayerStore) -> Tensor:
        if self.source != "in_delta":
            return stream
        if not store.capturing:
            self._fit_added(tuple(stream.shape), stream.dtype, store)
        return stream + self.added.to(stream.dtype)

    @no_inference_mode
    def note_added(
        self,
        before: Tensor,
        after: Tensor,
        length: int | None = None,
        mask: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> None:
        added = after - before
        if mask is not None:
            added = added * (mask[:, -1, None, None] != 0)  # nothing is known of a row that ends with padding
        if self.added is None or self.added.shape != added.shape or self.added.device != added.device:
            self.added = torch.empty_like(added)
        self.added.copy_(added if valid is None else torch.where(valid[..., None], added, self.added))
        if length is not None:
            self.added_at = length

    def join_row(self, row: int, other: LayerAheadPolicy, store: LayerStore) -> None:
        if other.added is not None:
            shape = (store.batch, *other.added.shape[1:])
            if self.added is None or self.added.shape != shape or self.added_at != store.length:
                self._fit_added(shape, other.added.dtype, store)
            if other.added_at is None:
                other.added.zero_()
        elif self.added is not None:
            self.added[row].zero_()  # of the row that was there before

    def crop_row(self, row: int) -> None:
        super().crop_row(row)
        if self.added is not None:
            self.added[row].zero_()

    def cropped(self) -> None:
        super().cropped()
        self.added_at = None

    def foresee(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        self._choose_for(q, store)
        self.foreseen = store.length

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        if self.foreseen != store.length - 1:
            self._choose_for(q, store)
        elif not store.capturing:
            store.counters.foreseen += 1
        self.foreseen = None  # layers that share these keys attend for queries of their own
        if self.watch is not None:
            self.watch.mark_tokens(self.ids, store.block_size)
        if self._places is None:
            return store.attend(q, self.ids, "token", params)
        places, self._places = reads_here(self._places), None
        return store.attend(q, places, "token", params, pages=self.tokens.pages, columns=self.ids)

    def begin_drafts(self) -> None:
        self.foreseen = self._places = None

    def attend_drafts(
        self, q: Tensor, store: LayerStore, rows: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        ids = self.best_tokens(q, rows)
        return self.attend_to(q, ids, rows, params, self.bring(ids, store))

    def _choose_for(self, q: Tensor, store: LayerStore) -> None:
        """Write the tokens that this query wants to :attr:`ids`, and bring them to the device."""
        budget = self.config.token_budget
        scores, ids = self.scores(q, store), self.ids[..., :budget]
        token_select(scores, None, budget, store.block_size, rows=store.rows, out=ids)
        if self.bring(self.ids, store):
            self._places = self.tokens.locate(self.ids, store)

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().account(q, store, plan, tally)
        if not plan.dense:
            store.counters.index_bytes += self.labels.nbytes_read(store, tally.blocks)

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        """Nothing: the next step chooses by itself."""

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().replayed(store, plan, tally)
        store.counters.foreseen += plan.foresees * tally.steps
        self.added_at = store.length if plan.foresees else None

    def file_names(self) -> set[str]:
        return super().file_names() | {"queries", "queries_from"}  # of a cache saved with another predictor

    def from_file(self, found: dict[str, Tensor], device: torch.device, lengths: Sequence[int]) -> None:
        super().from_file(found, device, lengths)
        self.chosen = False


PredictivePolicy.layer_ahead = LayerAheadPolicy
