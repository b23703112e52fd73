"""Replayed steps that the layers have not accounted for yet.

Apart from the cache because a replay has no time for its layers: what they count, they count when someone asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..kv.store import Tally
from ..layers.decode import account
from ..layers.sparse_layer import SparseLayer
from ..policies.plan import Plan


class Replayed(NamedTuple):
    """Replayed steps that were alike: what each layer did, its last query, and what they met."""

    plans: Sequence[Plan]
    queries: Sequence[Tensor]
    tally: Tally

    def settle(self, layers: Iterable[SparseLayer]) -> None:
        """Let the layers account for them."""
        for layer, plan, query in zip(layers, self.plans, self.queries):
            account(layer.store, layer.policy, plan, query, self.tally)
