"""A selection that costs nothing: what is left of a predictive step once choosing and copying are hidden entirely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..config import PredictiveConfig
from ..kv.store import LayerStore
from ..policies.base import Policy
from ..policies.plan import Plan
from ..policies.predictive import PredictivePolicy
from ..predictive_cache import AsyncPredictiveCache


@dataclass(frozen=True, kw_only=True)
class FreeConfig(PredictiveConfig):
    """As that of the cache whose work is left out."""


class FreePolicy(PredictivePolicy):
    """Attends in each step to what the prompt's last query has chosen: as many tokens, in as many places."""

    HOST: ClassVar = {"given": False}
    note = None

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan, again: bool = False) -> None:
        if not self.given and not store.fixed:
            super().look_ahead(q, store, plan, again)
            self.given = self.chosen


class FreeCache(AsyncPredictiveCache):
    """An oracle that does no work: nothing is predicted, chosen or copied after the prompt."""

    def make_policy(self, layer_idx: int) -> Policy:
        made = super().make_policy(layer_idx)
        if not isinstance(made, PredictivePolicy):
            return made
        return FreePolicy(made.config, layer_idx, made.offloaded, self.channels)
