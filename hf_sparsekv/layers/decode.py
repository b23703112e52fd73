"""One decode step of one layer, run eagerly; and how a step is planned and counted that a graph replays.

It needs no more than a store and a policy, which may be those of a captured step's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..attention.handle import Step
from ..kv.rows import Rows
from ..kv.store import LayerStore, Tally
from ..policies.base import Policy
from ..policies.plan import DENSE, Plan
from ..tensors import as_called, lowered, no_autocast
from ..types import AttentionParams
from .next_step import NextStep
from .owned import Owner, new_rows


def plan_of(store: LayerStore, policy: Policy, prepares: bool = False) -> Plan:
    """The plan of the next step: the policy's, or attention to everything in exact mode.

    ``prepares``: the step is about to be captured or replayed.
    """
    if not store.table_of_rows.exactness.everything:
        return policy.prepare(store) if prepares else policy.plan(store)
    plan = policy.plan(store)
    return plan if plan.dense else DENSE


def store_token(store: LayerStore, policy: Policy, step: Step, query: Tensor) -> None:
    """Cache the step's token of each row that gets one."""
    valid = step.under_way.valid
    if policy.observes:
        store.announce(1, valid)
        policy.observe(query, step.keys, valid, store)
    store.append(*step.kept, valid, step.under_way.taken)


def attend(store: LayerStore, policy: Policy, q: Tensor, plan: Plan, params: AttentionParams) -> Tensor:
    """Attention of one query per row, ``q [batch, Hq, Dk]`` to ``[batch, Hq, 1, Dv]``, to what the plan says."""
    out = store.attend(q, None, "all", params) if plan.dense else policy.attend(q, store, plan, params)
    return out[:, :, None]


def finish(store: LayerStore, policy: Policy, q: Tensor, plan: Plan, tally: Tally) -> None:
    """The step has attended: seal what has become old, prepare the next step, count it as ``tally``."""
    store.seal_due(policy)
    policy.look_ahead(q, store, plan)
    policy.account(q, store, plan, tally)


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


def asked(store: LayerStore, owner: Owner) -> Rows:
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


def account(store: LayerStore, policy: Policy, plan: Plan, query: Tensor, tally: Tally) -> None:
    """Steps were replayed, the last one for ``query``: what of them is left to the host."""
    store.counters.count_to_host(tally.sealed)
    policy.account(query, store, plan, tally)
    policy.replayed(store, plan, tally)
