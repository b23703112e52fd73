"""Replayed steps that the layers have not accounted for yet: counters are brought up to date when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..kv.counters import Tally
from ..kv.rows import Rows, Taken
from ..kv.store import LayerStore
from ..policies.base import Policy
from ..policies.plan import Plan

_KINDS = 4  # of steps at most: each needs memory for its plans, which may be those of a graph that was evicted


class Counted(Protocol):
    """A layer whose steps are counted."""

    store: LayerStore
    policy: Policy


class Replayed(NamedTuple):
    """Replayed steps that were alike: what each layer did, its last query, and what they met."""

    plans: Sequence[Plan]
    queries: Sequence[Tensor]
    tally: Tally


class Replays:
    """The replayed steps of one cache that its layers have not accounted for.

    Attributes:
        pending: these, by the identity of their plans: drafts, verifications and dense steps take turns. The last one
            is at the end.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Replayed] = {}

    def add(
        self,
        layers: Iterable[Counted],
        plans: Sequence[Plan],
        queries: Sequence[Tensor],
        taken: Taken,
        sinks: int,
        drafts: Rows | None = None,
    ) -> None:
        """A captured step of these layers was replayed; or a pass over drafts, which as rows are ``drafts``."""
        known = self.pending.pop(id(plans), None)
        if known is None:
            if len(self.pending) >= _KINDS:
                self.settle(layers)
            known = Replayed(plans, queries, Tally())
        self.pending[id(plans)] = known
        known.tally.add(taken, sinks, drafts)

    def settle(self, layers: Iterable[Counted]) -> None:
        """Let the layers account for the steps that were replayed since they last did."""
        pending, self.pending = self.pending, {}
        for replayed in pending.values():
            for layer, plan, query in zip(layers, replayed.plans, replayed.queries):
                account(layer.store, layer.policy, plan, query, replayed.tally)


def account(store: LayerStore, policy: Policy, plan: Plan, query: Tensor, tally: Tally) -> None:
    """Steps were replayed, the last one for ``query``: what of them is left to the host."""
    store.counters.count_to_host(tally.sealed)
    policy.account(query, store, plan, tally)
    policy.replayed(store, plan, tally)
