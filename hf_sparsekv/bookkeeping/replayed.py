"""Replayed steps that the layers have not accounted for yet.

Apart from the cache because a replay has no time for its layers: what they count, they count when someone asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..kv.counters import Tally
from ..kv.rows import Rows, Taken
from ..layers.decode import account
from ..layers.sparse_layer import SparseLayer
from ..policies.plan import Plan


class Replayed(NamedTuple):
    """Replayed steps that were alike: what each layer did, its last query, and what they met."""

    plans: Sequence[Plan]
    queries: Sequence[Tensor]
    tally: Tally


class Replays:
    """The replayed steps of one cache that its layers have not accounted for.

    Attributes:
        pending: these; None: there are none.
    """

    def __init__(self) -> None:
        self.pending: Replayed | None = None

    def add(
        self,
        layers: Iterable[SparseLayer],
        plans: Sequence[Plan],
        queries: Sequence[Tensor],
        taken: Taken,
        sinks: int,
        drafts: Rows | None = None,
    ) -> None:
        """A captured step of these layers was replayed; or a pass over drafts, which as rows are ``drafts``."""
        if self.pending is None or self.pending.plans is not plans:
            self.settle(layers)
            self.pending = Replayed(plans, queries, Tally())
        self.pending.tally.add(taken, sinks, drafts)

    def settle(self, layers: Iterable[SparseLayer]) -> None:
        """Let the layers account for the steps that were replayed since they last did."""
        replayed, self.pending = self.pending, None
        if replayed is not None:
            for layer, plan, query in zip(layers, replayed.plans, replayed.queries):
                assert layer.store is not None
                account(layer.store, layer.policy, plan, query, replayed.tally)
