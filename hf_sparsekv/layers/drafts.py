"""Drafts in one layer: several new tokens that attend to a selection each, as decode steps of their own would."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attention.handle import Step
from ..kv.counters import tally_of
from ..kv.query_rows import QueryRows
from ..kv.rows import Rows, Taken
from ..kv.store import LayerStore
from ..policies.base import Policy
from ..policies.plan import Plan
from ..types import AttentionParams
from .cache_state import FullLayer, end_pass
from .dense_drafts import attend_at_once
from .step import attend, plan_of


def attend_as_steps(store: LayerStore, policy: Policy, new: int) -> bool:
    """Each of ``new`` drafts has a selection of its own, or they are verified for rows that come and go.

    The policy says how, a decode step does not attend to everything, and so many of them do not read more than that.
    """
    if store.table_of_rows.exactness.counts is not None:
        return True
    if policy.drafts == "exact" or plan_of(store, policy).dense:
        return False
    # Exact attention reads all once. Where chosen tokens have copies on the device, what is read in host memory is what
    # any of the drafts chooses: always less.
    return policy.tokens is not None or new * policy.config.budget < store.full_blocks * store.block_size


def captures_drafts(store: LayerStore, policy: Policy, new: int) -> bool:
    """A pass over so many drafts of the only row may be captured, as far as one layer is concerned."""
    if type(policy) is Policy or store.table_of_rows.exactness.everything:  # each query attends to everything
        return not (policy.offloaded or policy.observes)
    changes = policy.launch.each_step or policy.observes  # the host's work
    changes = changes or (policy.foresight is not None and policy.foresight.by_delta)  # of a token
    return policy.drafts == "together" and not changes and attend_as_steps(store, policy, new)


def run(layer: FullLayer, step: Step, query: Tensor, params: AttentionParams) -> Tensor:
    """Store the drafts and attend, ``query [batch, Hq, q, Dk]`` to ``[batch, Hq, q, Dv]``.

    Each query attends as a step of its own would. Queries of one row are decoded together, as rows of a batch, if the
    policy can. With continuous batching they attend to everything.
    """
    step.touched = True
    layer.next_step.begin(layer.store, layer.policy)
    out = _verify(layer.store, layer.policy, step, query, params)
    end_pass(layer.owner, layer.index)
    step.committed = True
    layer.owner.passed(layer.index)
    return out


def _verify(store: LayerStore, policy: Policy, step: Step, query: Tensor, params: AttentionParams) -> Tensor:
    if store.table_of_rows.exactness.counts is not None:
        _, taken, asked, *_ = step.under_way.at_once
        out = attend_at_once(store, query, *step.kept, asked.on[store.device], params)
        store_together(store, policy, step, query, taken)
        policy.account(query[:, :, -1], store, plan_of(store, policy), tally_of(taken, store.sinks, asked))
        return out
    policy.begin_drafts()
    if policy.drafts != "together" or store.batch > 1:
        return _verify_each(store, policy, step, query, params)
    _, taken, queries, *_ = step.under_way.together
    store_together(store, policy, step, query, taken)
    plan = policy.plan(store)
    if not plan.dense:
        store.table_of_rows.exactness.selected(step.past)
    out = attend_together(store, policy, query, plan, params, queries)
    policy.account(query[:, :, -1], store, plan, tally_of(taken, store.sinks, queries))
    return out


def store_together(
    store: LayerStore, policy: Policy, step: Step, query: Tensor, taken: Taken, due: Sequence[Tensor] | None = None
) -> None:
    """Cache all drafts of the only row, and seal the blocks that the last ones make old.

    The ring has room for the tokens that the first ones still find there. Each query's two numbers say which of them it
    attends to.

    Args:
        taken, due: see :class:`.replay.DraftRows`; ``due``: of a captured pass.
    """
    if policy.observes:
        store.announce(step.k.shape[2], None)
        policy.observe(query, step.keys, None, store)
    store.append(*step.kept, None, taken)
    store.seal_due(policy, due)


def attend_together(
    store: LayerStore,
    policy: Policy,
    query: Tensor,
    plan: Plan,
    params: AttentionParams,
    queries: Rows,
    there: Tensor | None = None,
) -> Tensor:
    """Attention of the only row's drafts at once, ``query [1, Hq, n, Dk]`` to ``[1, Hq, n, Dv]``.

    Args:
        queries, there: see :class:`.replay.DraftRows`; ``there``: of a captured pass.
    """
    q = query[0].transpose(0, 1)  # [n, Hq, Dk]
    with QueryRows.of(store, queries, there) as rows:
        if plan.dense:
            out = rows.attend(q, None, "all", params)
        else:
            out = policy.attend_drafts(q, store, rows, plan, params)
    return out.transpose(0, 1)[None]


def _verify_each(store: LayerStore, policy: Policy, step: Step, query: Tensor, params: AttentionParams) -> Tensor:
    """:func:`run` one token after the other."""
    watch, outs = policy.watch, []
    k, v = step.kept
    try:
        for i, taken in enumerate(step.under_way.each):
            at = slice(i, i + 1)
            if policy.observes:
                store.announce(1, None)
                policy.observe(query[:, :, at], step.keys[:, :, at], None, store)
            store.append(k[:, :, at], v[:, :, at], None, taken)
            plan, q = policy.plan(store), query[:, :, i]
            if not plan.dense:
                store.table_of_rows.exactness.selected(step.past + i)
            outs.append(attend(store, policy, q, plan, params))
            store.seal_due(policy)
            policy.look_ahead(q, store, plan)
            tally = tally_of(taken, store.sinks)
            tally.steps, tally.drafts = int(not i), int(i > 0)  # of the pass
            policy.account(q, store, plan, tally)
            if watch is not None:
                watch.adds = True
    finally:
        if watch is not None:
            watch.adds = False
    return torch.cat(outs, dim=2)
