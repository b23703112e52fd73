"""A fixed number of tokens by their labels, among all."""

from __future__ import annotations

from torch import Tensor

from hf_sparsekv_config.tokens import TokenConfig

from ..kv.counters import Tally
from ..kv.store import LayerStore
from ..tensors import no_inference_mode
from ..types import AttentionParams
from .drafting import Drafting
from .label_index import LabelIndex
from .labelled import LabelledPolicy
from .plan import CROSSOVER, DENSE, Plan, planned


class TopKPolicy(Drafting, LabelledPolicy):
    """Each step scores the labels of all tokens for its own query, and attends to the best ones.

    Nothing that is chosen outlives its step. Offloaded, a step reads what it has chosen where it is, and copies it to
    the device after the attention, for the steps that follow.
    """

    config: TokenConfig
    labels: LabelIndex
    method = "token_only"
    drafts = "together"
    follows_crops = False

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        if self.config.means:
            store.keep_means(self.config.tail_tokens)

    def plan(self, store: LayerStore) -> Plan:
        if self.labels.calibrating:
            return planned(learns=True, captured=self.labels.goes_on)
        if store.full_blocks * store.block_size <= self.config.budget:
            return DENSE
        if self.crossover.below(store):
            return CROSSOVER
        if self.fetches:  # what is not on the device yet is read where it is
            return planned("every", True, self.tokens is not None, brings=True)
        return planned("every")

    def prepare(self, store: LayerStore) -> Plan:
        plan = self.plan(store)
        if not plan.ahead:
            return plan
        self.enter(store)
        return self.plan(store)

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        ids = self.best_tokens(q, store)
        if plan.ahead:
            self._taken = ids, None
        return self.attend_to(q, ids, store, params, plan.paged)

    def attend_drafts(
        self, q: Tensor, store: LayerStore, rows: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        ids = self.best_tokens(q, rows)
        return self.attend_to(q, ids, rows, params, self.fetches and self.bring(ids, store))

    def account(self, q: Tensor, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().account(q, store, plan, tally)
        if not plan.dense:
            store.counters.index_bytes += self.labels.nbytes_read(store, tally.blocks)
            store.count_means(tally)

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        if plan.ahead:
            self.bring_taken(q, store)
