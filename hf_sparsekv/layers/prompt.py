"""A prompt, or a piece of one, in one layer: its exact attention, its store, and what the next layer reads back."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..attention.gradient import NoGradient
from ..attention.handle import Step
from ..attention.mla import SAMPLE
from ..kv import read_back
from ..kv.store import LayerStore
from ..policies.base import Policy
from ..types import AttentionParams
from .cache_state import CacheState, FullLayer, end_pass, next_layer
from .drafts import attend_as_steps
from .sparse_prompt import attention_of


def run(
    layer: FullLayer, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float
) -> Tensor:
    """Attention of a prompt, or of a piece of it, to all tokens: ``query [batch, Hq, q, Dk]`` to ``[..., Dv]``.

    Args:
        mask: ``[batch, columns]``, or a 4-D one.
    """
    own, owner, sparse = not step.committed, layer.owner, layer.audit.passes
    columns, whole = (mask, None) if mask is None or mask.ndim == 2 else (None, mask)
    exact = attention_of(step, owner.config, layer.index, layer.audit, query, params)
    if step.past == 0:
        out = exact(query, step.k, step.v, params, columns=columns, mask=whole, dropout=dropout)
        if own:
            layer.commit(step, query, step.under_way.valid)
    else:
        if layer.captured is not None:
            raise RuntimeError("exact attention over a cached past, which waits for the host")
        store = layer.store
        key, value = read_back.materialise(store, *step.kept) if own else read_back.materialise(store)
        if own:
            after = next_layer(owner, layer.index)
            if after is not None and after.store is not None:
                read_ahead(after.store, after.policy, step)
            layer.commit(step, query, step.under_way.valid)
        columns = None if store.held.valid is None else store.held.valid_columns(store.device)
        with torch.no_grad():
            out = exact(query, key, value, params, columns=columns, mask=whole, dropout=dropout)
            store.counters.exact += layer.audit.passes == sparse
            store.counters.masked += query.shape[2] == 1 and whole is not None
        out = NoGradient.apply(out, query) if torch.is_grad_enabled() else out
    if layer.audit.passes > sparse:
        owner.row_table.exactness.selected(step.past)
    if own:
        layer.next_step.after_prompt(layer.store, layer.policy, query, step.absorbed)
        end_pass(owner, layer.index)
    return out


def new_store(
    policy: Policy, owner: CacheState, index: int, step: Step, latent: bool, valid: Tensor | None
) -> LayerStore:
    """A store for the tokens of ``step``; ``valid`` bool ``[batch, q]`` (None: all) are no padding."""
    pools = None
    if policy.fetches:
        pools = owner.device_pools
        assert pools is not None
        pools.layers = sum(layer.policy.fetches for layer in owner.sparse_layers)
    host = owner.budget if policy.offloaded else None
    copy_streams = None if host is None else owner.copy_streams
    made = owner.config, host, owner.row_table, pools, copy_streams, latent
    tokens = () if valid is None else owner.row_table.tokens_of(step.k.shape[2], valid)
    blocks = None if valid is None else sum(-(-n // owner.config.block_size) for n in tokens)
    block_pools = owner.block_pools
    pool = None if block_pools is None else block_pools.get(index)
    store = policy.store_type(step.k, step.v, *made, pool, blocks)
    if block_pools is not None:
        block_pools[index] = store.pool
    return store


def leave_device_pools(owner: CacheState) -> None:
    """The first of a cache's layers gets another store, as all will: the old ones give their device pages back."""
    assert owner.device_pools is not None
    owner.device_pools.clear()
    for layer in owner.sparse_layers:
        if layer.store is not None and layer.store.pages is not None:
            layer.store.pages.leave()


def store_columns(store: LayerStore, policy: Policy, step: Step, query: Tensor | None, valid: Tensor | None) -> None:
    """Cache the tokens of ``step``: the policy observes them, then blocks are sealed on the way.

    Args:
        query: ``[batch, Hq, q, Dk]``; None: keys stand for queries.
        valid: bool ``[batch, q]``, False for padding; None: there is none.
    """
    if policy.observes:
        store.announce(step.k.shape[2], valid)
        policy.observe(*_observed(policy, step, query, valid), store, step.k.shape[2])
    store.extend(*step.kept, valid, policy)


def _observed(
    policy: Policy, step: Step, query: Tensor | None, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, keys and validity of the step's columns as :meth:`.base.Policy.observe` takes them."""
    labels, part = policy.labels, step
    first = None if labels is None else labels.wanted
    if first is not None and first < step.k.shape[2]:
        part = replace(step, k=step.k[:, :, :first], v=step.v[:, :, :first])
        query = None if query is None else query[:, :, :first]
        valid = None if valid is None else valid[:, :first]
    if step.absorbed is not None and query is not None:
        most = max(SAMPLE, getattr(policy.config, "calibration_tokens", 0))
        return step.absorbed.observed(query, part.k, part.v, valid, most)
    keys = part.keys
    return keys if query is None else query, keys, valid  # the very same tensor twice: there is no query


def read_ahead(store: LayerStore, policy: Policy, step: Step) -> None:
    """Begin to read back what the next layer, of ``store`` and ``policy``, needs for this piece of a prompt."""
    if store.writer.copy_stream is None or not store.full_blocks or store.length != step.past:
        return
    if not (step.under_way.drafts and attend_as_steps(store, policy, step.under_way.columns)):
        read_back.read_ahead(store, step.length)
