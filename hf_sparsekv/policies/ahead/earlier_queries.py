"""Tokens chosen for a query that is predicted from those of earlier steps (AsyncSpade section 4).

The selection outlives its step, and needs the latest queries.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hf_sparsekv_config.predictive import PredictiveConfig

from ...kv.counters import Tally
from ...kv.state import Held
from ...kv.store import LayerStore
from ...predictor.channels import LabelChannels
from ...tensors import no_inference_mode
from ...types import AttentionParams
from ..launch import Launch
from ..plan import Plan, planned
from .chosen_before import ChosenBefore
from .predicted_tokens import PredictedTokens
from .query_ring import QueryRing


class EarlierQueriesPolicy(ChosenBefore, PredictedTokens):
    """Tokens of all full blocks by their labels, for the query that the next step will have.

    State: the latest queries; the tokens chosen for the next step. A step attends to what the last one has chosen and
    to everything that is not sealed. Sealing a block chooses again, so every token is either recent or could have been
    chosen.
    """

    TENSORS: ClassVar = {"ids": Held(trial=True, counted=True, file="chosen", when="chosen")}  # [batch, H, room]
    HOST: ClassVar = {"_predicted": None}  # in a captured step, from its query to the end of its attention
    PARTS: ClassVar = ("queries",)

    queries: QueryRing
    _predicted: Tensor | None

    def __init__(
        self, config: PredictiveConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded, channels)
        # Measured on an H200, 8 x 32k on the device (benchmarks/NOTES.md, "Choosing from all tokens"): choosing after
        # the step 7.5 ms, among it 7.1; fetching yields.
        self.launch = Launch(low_priority=offloaded)

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        made = store.batch, q_heads, store.key_dim, store.dtype, store.device
        if self.queries is None or not self.queries.fits(*made):
            self.queries = QueryRing(*made)
        self.queries.clear()

    # ------------------------------------------------------------------ a step

    @property
    def observes(self) -> bool:
        return True

    @no_inference_mode
    def observe(self, q: Tensor, k: Tensor, valid: Tensor | None, store: LayerStore, new: int | None = None) -> None:
        super().observe(q, k, valid, store, new)
        if store.capturing:
            return  # note() stores it beside the step
        lengths, end = store.held.lengths, store.coming
        if q is k:  # something else attends: there is no query
            self.chosen = False
            self.queries.forget(end)
            return
        if self.queries.held.shape[1] != q.shape[1]:  # the layer began without queries
            self.queries = QueryRing(store.batch, q.shape[1], q.shape[3], store.dtype, store.device)
            self.queries.forget(lengths)
        picks = None if valid is None else store.table_of_rows.picks(valid)
        # Some passes give a query for each key, others only the last queries.
        self.queries.store(q, lengths, end, picks, k.shape[2])

    def plan(self, store: LayerStore) -> Plan:
        if (plan := self.plan_all(store)) is not None:
            return plan
        return planned("chosen" if self.chosen else "dense", True, self.chosen and self.paged)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        return self.attend_to(q, self.ids, store, params, plan.paged)

    def labels_scored(self, plan: Plan, tally: Tally) -> int:
        return tally.blocks + tally.sealed if plan.ahead else 0  # after what the step has sealed

    # ------------------------------------------------------------------ the next step

    def prepare(self, store: LayerStore) -> Plan:
        self.queries.rewind(store.held.lengths)
        plan = self.plan(store)
        if plan.ahead:
            self.enter(store)
        return plan

    def note(self, q: Tensor, valid: Tensor | None, store: LayerStore, plan: Plan) -> None:
        # Scores then begin as soon as attention has ended, and meet linear layers of many programs rather than of few.
        # Measured on an H200, 8 x 32k, 16 x 16k and 1 x 128k: 6.46, 6.55 and 4.81 ms. The query alone stored here:
        # 6.54, 6.90, 5.24. All of it after attention: 6.85, 7.01, 4.75. Scores here as well: 6.78, 6.92, 5.19.
        # Other orders: benchmarks/NOTES.md, "Choosing from all tokens".
        self.queries.push(q[:, :, None], valid, store.step_rows.past)
        if plan.ahead:
            self._predicted = self.queries.predict()

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        super().look_ahead(q, store, plan)
        if not plan.ahead:
            return
        self.chosen = True
        predicted, self._predicted = self._predicted, None
        self.choose_for(self.queries.predict() if predicted is None else predicted, store)
        self.paged = self.bring(self.ids, store)

    # ------------------------------------------------------------------ after replays

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().replayed(store, plan, tally)
        self.queries.end = store.held.lengths
        if plan.ahead:
            self.chosen, self.paged = True, self.tokens is not None
