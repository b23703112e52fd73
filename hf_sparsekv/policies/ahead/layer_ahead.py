"""Tokens chosen for the query that the layer before expects in the same step (InfiniGen speculates likewise).

No selection outlives its step.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from hf_sparsekv_config.predictive import PredictiveConfig

from ...kv.counters import Tally
from ...kv.store import LayerStore
from ...predictor.channels import LabelChannels
from ...tensors import reads_here
from ...types import AttentionParams
from ..drafting import Drafting
from ..launch import Launch
from ..plan import Plan, planned
from .foresight import Foresight
from .predicted_tokens import PredictedTokens


class LayerAheadPolicy(Drafting, PredictedTokens):
    """Tokens of all full blocks by their labels, for the query expected of this step; or for its own query.

    The selection includes blocks that the step before filled. Crops, beams and copies of the cache have no selection to
    follow. Some queries are not foreseen: the first layer's, drafts', and all without hooks on the model. For these,
    :meth:`attend` chooses by the query that it gets, before it attends.
    """

    drafts = "together"
    HOST: ClassVar = {
        "foreseen": None,  # columns that were cached when tokens were chosen beforehand
        # From their choice to the attention to them: by need the tokens and how many there are; and where they are.
        "_chosen": None,
        "_places": None,
    }

    foresight: Foresight
    foreseen: int | None
    _chosen: tuple[Tensor, Tensor] | None
    _places: Tensor | None

    def __init__(
        self, config: PredictiveConfig, layer_idx: int, offloaded: bool, channels: LabelChannels | None = None
    ) -> None:
        super().__init__(config, layer_idx, offloaded, channels)
        self.foresight = Foresight()
        self.launch = Launch(low_priority=False)  # the next layer waits for it

    @property
    def follows_crops(self) -> bool:
        return self.foresight.by_delta

    def plan(self, store: LayerStore) -> Plan:
        if (plan := self.plan_all(store)) is not None:
            return plan
        return planned("chosen", paged=self.tokens is not None, foresees=self.foresight.source is not None)

    def prepare(self, store: LayerStore) -> Plan:
        plan = self.plan(store)
        if not plan.dense and not plan.paged and self.enter(store):
            plan = self.plan(store)
        if plan.foresees:
            self.foresight.prepare(store)
        return plan

    def cropped(self) -> None:
        super().cropped()
        self.foresight.cropped()

    def foresee(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        """The layer before expects ``q [batch, Hq, Dk]`` of this one, in the step that has begun."""
        # This layer stores the step's token after that, perhaps at the same time; all tokens before it are in the ring.
        # An eager step's rows do not count it yet. A captured step's do, so those before it are told.
        self._choose_for(q, store, store.step_rows.past if store.capturing else None)
        self.foreseen = store.length

    def attend(self, q: Tensor, store: LayerStore, plan: Plan, params: AttentionParams) -> Tensor:
        if self.foreseen != store.length - 1:
            self._choose_for(q, store)
        elif not store.capturing:
            store.counters.foreseen += 1
        chosen, places = self._chosen, self._places
        self._forget()  # layers that share these keys attend for queries of their own
        ids, used = (self.ids, None) if chosen is None else map(reads_here, chosen)
        if self.watch is not None:
            self.watch.mark_tokens(ids, store.block_size, used)
        if places is None:
            return store.attend(q, ids, "token", params, used=used)
        assert self.tokens is not None
        pages = self.tokens.pages
        return store.attend(q, reads_here(places), "token", params, pages=pages, used=used, columns=ids)

    def begin_drafts(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Nothing is chosen."""
        self.foreseen = self._chosen = self._places = None

    def attend_drafts(
        self, q: Tensor, store: LayerStore, rows: LayerStore, plan: Plan, params: AttentionParams
    ) -> Tensor:
        ids, used = self.tokens_for(q, rows, params)
        return self.attend_to(q, ids, rows, params, self.bring(ids, store, used), used)

    def _choose_for(self, q: Tensor, store: LayerStore, stored: Tensor | None = None) -> None:
        """Choose the tokens that this query wants, and bring them to the device; ``stored``: see :mod:`..by_need`."""
        if self.need is None:
            self.choose_for(q, store)
            ids, used = self.ids, None
        else:
            assert self.params is not None
            ids, used, *_ = self.need.select(q, store, self.labels, self.params, stored=stored)
            self._chosen = ids, used
        self._places = None
        if self.bring(ids, store, used):
            assert self.tokens is not None
            self._places = self.tokens.locate(ids, store, used)

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().replayed(store, plan, tally)
        store.counters.foreseen += plan.foresees * tally.steps
        self.foresight.replayed(store, plan.foresees)
