"""A selection that costs nothing: what is left of a predictive step once choosing and copying are hidden entirely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_sparsekv import PredictiveConfig
from hf_sparsekv.kv.store import LayerStore
from hf_sparsekv.policies.ahead.earlier_queries import EarlierQueriesPolicy
from hf_sparsekv.policies.ahead.predictive import Predictive
from hf_sparsekv.policies.plan import Plan
from hf_sparsekv.policies.registry import register
from hf_sparsekv.predictor.query import PREDICTOR


@dataclass(frozen=True, kw_only=True)
class FreeConfig(PredictiveConfig):
    """As that of the cache whose work is left out. Its prompt's choice is that of a step ahead."""

    predictor: str = PREDICTOR


@register("free", FreeConfig, about="the same selection given for free", reference=True, shared=Predictive)
class FreePolicy(EarlierQueriesPolicy):
    """Attends in each step to what the prompt's last query has chosen: as many tokens, in as many places."""

    HOST: ClassVar = {"given": False}
    note = None

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        if not self.given and not store.capturing:
            super().look_ahead(q, store, plan)
            self.given = self.chosen
