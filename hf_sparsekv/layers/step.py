"""One decode step of one layer, run eagerly; and how a step is planned and counted that a graph replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..attention.handle import Step
from ..kv.rows import Rows
from ..kv.store import LayerStore
from ..policies.base import Policy
from ..policies.plan import DENSE, Plan
from ..tensors import as_called, lowered, no_autocast
from ..types import AttentionParams
from .cache_state import OWN_QUERIES, CacheState, FullLayer, new_rows, warn_once
from .next_step import NextStep


def run(layer: FullLayer, step: Step, query: Tensor, params: AttentionParams) -> Tensor:
    """One decode step, ``query [batch, Hq, 1, Dk]`` to ``[batch, Hq, 1, Dv]``.

    Where another layer has stored the step's token, that one prepares the next step.
    """
    store, policy, owner, own = layer.store, layer.policy, layer.owner, not step.committed
    if own:
        step.touched = True
        layer.next_step.begin(store, policy)
        if policy.observes:
            store.announce(1, step.under_way.valid)
            policy.observe(query, step.keys, step.under_way.valid, store)
        store.append(*step.kept, step.under_way.valid, step.under_way.taken)
        step.committed = True
        owner.passed(layer.index)
    exactness, q = owner.row_table.exactness, query[:, :, 0]
    plan = plan_of(store, policy) if exactness.everything else policy.plan(store)
    if policy.foresight is not None and not (plan.dense or owner.met):
        warn_once(owner, OWN_QUERIES)
    known = exactness.inexact_from  # looked at here: a call in each step takes longer
    if not plan.dense and (known is None or step.past < known):
        exactness.selected(step.past)
    if not own:
        return attend(store, policy, q, replace(plan, ahead=False), params)
    out = attend(store, policy, q, plan, params)
    store.seal_due(policy)
    policy.look_ahead(q, store, plan)
    policy.account(q, store, plan, step.under_way.tally)
    return out


def plan_of(store: LayerStore, policy: Policy, prepares: bool = False) -> Plan:
    """The plan of the next step: the policy's, or attention to everything in exact mode.

    ``prepares``: the step is about to be captured or replayed.
    """
    if not store.table_of_rows.exactness.everything:
        return policy.prepare(store) if prepares else policy.plan(store)
    plan = policy.plan(store)
    return plan if plan.dense else DENSE


def attend(store: LayerStore, policy: Policy, q: Tensor, plan: Plan, params: AttentionParams) -> Tensor:
    """Attention of one query per row, ``q [batch, Hq, Dk]`` to ``[batch, Hq, 1, Dv]``, to what the plan says."""
    out = store.attend(q, None, "all", params) if plan.dense else policy.attend(q, store, plan, params)
    return out[:, :, None]


def asking(
    policy: Policy, expected: Callable[[], tuple[Tensor, AttentionParams]], dtype: torch.dtype | None
) -> Callable[[], Tensor]:
    """A function that returns a layer's expected query, and gives its policy the attention's parameters.

    Called inside :func:`no_autocast`, it computes in the autocast that is on now; the query is lowered to ``dtype``.
    """

    def asks() -> Tensor:
        query, params = expected()
        if policy.params is None:  # a cache from a file has attended to nothing yet
            policy.params = params
        return lowered(query, dtype)

    return as_called(asks)


@no_autocast
@torch.no_grad()
def foresee(store: LayerStore, policy: Policy, rows: Rows, query: Callable[[], Tensor]) -> None:
    """A step that finds ``rows`` has begun in the layer before, which expects ``query()`` of this one."""
    with store.at(rows):
        plan = plan_of(store, policy)
        if plan.foresees:
            policy.foresee(query(), store, plan)


def asked(store: LayerStore, owner: CacheState) -> Rows:
    """The rows as the step that begins finds them; of a continuous batch, which get a token."""
    return owner.row_table.asked(store.held, new_rows(owner, store.device))


def prepare(store: LayerStore, policy: Policy, next_step: NextStep, rows: Rows, drafts: bool = False) -> Plan:
    """A decode step is about to be captured or replayed that finds ``rows``: what it does; see :func:`planned`."""
    if drafts and policy.drafts != "exact":
        policy.begin_drafts()
    next_step.begin(store, policy)
    with store.at(rows):
        plan = plan_of(store, policy, prepares=True)
    return _unforeseen(plan) if drafts else plan


def planned(store: LayerStore, policy: Policy, rows: Rows, drafts: bool = False) -> Plan:
    """The plan of a decode step that finds ``rows``, or of a pass over drafts that leaves them. Changes nothing."""
    with store.at(rows):
        plan = plan_of(store, policy)
    return _unforeseen(plan) if drafts else plan


def _unforeseen(plan: Plan) -> Plan:
    """``plan`` without foresight: the queries of drafts are not expected."""
    return replace(plan, foresees=False) if plan.foresees else plan
