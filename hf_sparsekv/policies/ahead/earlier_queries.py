"""Tokens chosen for a query that is predicted from those of earlier steps (AsyncSpade section 4).

Apart from :mod:`.layer_ahead` because the choice outlives its step, and needs the latest queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hf_sparsekv_config.predictive import PredictiveConfig

from ...kv.counters import Tally
from ...kv.state import Held
from ...kv.store import LayerStore
from ...predictor.channels import LabelChannels
from ...predictor.query import CustomPredictor, QueryPredictor, make_predictor
from ...tensors import no_inference_mode
from ...types import AttentionParams
from ..launch import Launch
from ..memory import Request
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

    TENSORS: ClassVar = {
        "ids": Held(trial=True, counted=True, file="chosen", when="chosen"),  # [batch, H, room]
        "counts": Held(trial=True, counted=True),  # by need: int32 [batch, H], how many of the ids there are
    }
    HOST: ClassVar = {"_predicted": None}  # in a captured step, from its query to the end of its attention
    PARTS: ClassVar = ("queries",)

    queries: QueryRing
    counts: Tensor | None
    _predicted: Tensor | None

    def __init__(
        self, config: PredictiveConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded, channels)
        self.predictor = predictor_of(config)
        # Measured on an H200, 8 x 32k on the device (benchmarks/NOTES.md, "Choosing from all tokens"): choosing after
        # the step 7.5 ms, among it 7.1; fetching yields.
        self.launch = Launch(low_priority=offloaded)

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        self._fit(store)
        made = store.batch, q_heads, store.key_dim, store.dtype, store.device
        if self.queries is None or not self.queries.fits(*made):
            self.queries = QueryRing(store.batch, q_heads, self.predictor.slots, *made[2:])
        self.queries.clear()

    @no_inference_mode
    def _fit(self, store: LayerStore) -> None:
        """By need, have room for all tokens that the block table has room for."""
        if self.need is None:
            return
        held, shape = self.ids, (store.batch, store.heads, store.block_table.shape[1] * store.block_size)
        same = held is not None and (held.shape[0], held.device) == (store.batch, store.device)
        if same and held.shape[-1] >= shape[-1]:
            return
        self.ids = torch.full(shape, -1, dtype=torch.int32, device=store.device)
        if same:
            self.ids[..., : held.shape[-1]] = held
        else:
            self.counts = torch.zeros(shape[:2], dtype=torch.int32, device=store.device)

    def _there(self, store: LayerStore) -> Tensor:
        """The ids that a step of these rows may choose, ``[batch, H, n]``."""
        return self.ids if self.need is None else self.ids[..., : store.table.shape[1] * store.block_size]

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
            held = self.queries
            self.queries = QueryRing(store.batch, q.shape[1], held.size, q.shape[3], store.dtype, store.device)
            self.queries.forget(lengths)
        picks = None if valid is None else store.table_of_rows.picks(valid)
        # Of some of a prompt's tokens the queries are there as they are the keys; of others the last ones only.
        self.queries.store(q, lengths, end, picks, k.shape[2])

    def plan(self, store: LayerStore) -> Plan:
        if (plan := self.plan_all(store)) is not None:
            return plan
        return planned("chosen" if self.chosen else "dense", True, self.chosen and self.paged)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        return self.attend_to(q, self._there(store), store, params, plan.paged, self.counts)

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().account(q, store, plan, tally)
        if plan.ahead:  # after what the step has sealed
            store.counters.index_bytes += self.labels.nbytes_read(store, tally.blocks + tally.sealed)
        if not plan.dense:
            store.count_means(tally)

    # ------------------------------------------------------------------ the next step

    def prepare(self, store: LayerStore) -> Plan:
        self.queries.rewind(store.held.lengths)
        plan = self.plan(store)
        if plan.ahead:
            self._fit(store)
            self.enter(store)
        return plan

    def note(self, q: Tensor, valid: Tensor | None, store: LayerStore, plan: Plan) -> None:
        # Scores then begin as soon as attention has ended, and meet linear layers of many programs rather than of few.
        # Measured on an H200, 8 x 32k, 16 x 16k and 1 x 128k: 6.46, 6.55 and 4.81 ms. The query alone stored here:
        # 6.54, 6.90, 5.24. All of it after attention: 6.85, 7.01, 4.75. Scores here as well: 6.78, 6.92, 5.19.
        # Other orders: benchmarks/NOTES.md, "Choosing from all tokens".
        self.queries.push(q[:, :, None], valid, store.step_rows.past)
        if plan.ahead:
            self._predicted = self._predict()

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        super().look_ahead(q, store, plan)
        if not plan.ahead:
            return
        if self.need is not None and self.params is None:  # tokens came without an attention, as in no step
            self.chosen = self.paged = False
            return
        self.chosen = True
        predicted, self._predicted = self._predicted, None
        self.choose_for(self._predict() if predicted is None else predicted, store)
        self.paged = self.bring(self._there(store), store, self.counts)

    def choose_for(self, q: Tensor, store: LayerStore) -> None:
        if self.need is None:
            super().choose_for(q, store)
            return
        if not store.capturing:
            self._fit(store)
        assert self.params is not None and self.counts is not None
        # The step has stored its token, and sealed: the ring holds every recent token of the rows.
        self.need.select(q, store, self.labels, self.params, out=(self._there(store), self.counts))

    def _predict(self) -> Tensor:
        """The next query ``[batch, Hq, Dk]``."""
        queries = self.queries
        return self.predictor.predict(queries.held, queries.position, queries.count)

    # ------------------------------------------------------------------ files

    def to_file(self, lengths: Sequence[int]) -> dict[str, Tensor]:
        found = super().to_file(lengths)
        if self.counts is not None and "chosen" in found:
            ids = found["chosen"][..., : max(1, int(self.counts.max()))]
            there = torch.arange(ids.shape[-1], device=ids.device) < self.counts[..., None]
            found["chosen"] = torch.where(there, ids, -1)
        return found

    def from_file(self, found: dict[str, Tensor], device: torch.device, lengths: Sequence[int]) -> None:
        chosen = found.get("chosen")
        if self.counts is not None and chosen is not None:  # perhaps of a fixed number
            ids = torch.nn.functional.pad(chosen, (0, self.ids.shape[-1] - chosen.shape[-1]), value=-1)
            found = {**found, "chosen": ids}
            self.counts.copy_((ids >= 0).sum(-1))
        super().from_file(found, device, lengths)

    # ------------------------------------------------------------------ after replays

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().replayed(store, plan, tally)
        self.queries.end = store.held.lengths
        if plan.ahead:
            self.chosen, self.paged = True, self.tokens is not None


def predictor_of(config: PredictiveConfig) -> QueryPredictor | CustomPredictor:
    """What predicts from earlier steps' queries."""
    return make_predictor(config.prediction, config.predictor_window, config.predictor_epsilon)


def queries_bytes(request: Request) -> int:
    """Bytes of the latest queries, all layers."""
    slots = predictor_of(request.config).slots
    each = (request.query_heads * slots * layer.query_dim * request.item + 12 for layer in request.layers)
    return request.batch * sum(each)
