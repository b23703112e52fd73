"""Drafts that full attention verifies in a captured pass: each row's queries read what is cached once for all of them.

Nothing here selects, and there may be several rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv.store import LayerStore
from ..ops.attention.new_tokens import new_tokens
from ..ops.attention.sparse_decode import sparse_decode
from ..types import AttentionParams

HEADS = 32  # query heads of a KV head that the kernel for keys and values takes at once with the parameters of a step


def attend_at_once(
    store: LayerStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    params: AttentionParams,
    at_once: int = HEADS,
) -> Tensor:
    """Attention of new tokens to all that is cached before them, and to each other, causally.

    The queries of a row are further query heads of each KV head to the kernel that reads what is cached. It gives the
    denominators too, by which another kernel takes the new tokens in.

    Args:
        query: ``[batch, Hq, n, Dk]``.
        key, value: of the new tokens, ``[batch, H, n, D]``, as they are stored afterwards.
        rows: int32 ``[batch, 2]``, tokens of each row before these, and those of them in full blocks.
        at_once: query heads of a KV head that read what is cached together.

    Returns:
        ``[batch, Hq, n, Dv]``.
    """
    n, group = query.shape[2], query.shape[1] // store.heads
    if store.latent:  # the whole row is the key, and its first part the value
        key, value = torch.cat((key, value), dim=-1), key
    most = n if store.latent else max(1, at_once // group)  # the kernel for latents has tiles of heads
    parts = [_past(store, part, rows, params, count=not i) for i, part in enumerate(query.split(most, dim=2))]
    past, lse = parts[0] if len(parts) == 1 else (torch.cat(part, dim=2) for part in zip(*parts))
    return new_tokens(query, key, value, past, lse, params.scale, params.softcap)


def _past(
    store: LayerStore, query: Tensor, rows: Tensor, params: AttentionParams, count: bool
) -> tuple[Tensor, Tensor]:
    """Attention of ``query [batch, Hq, n, Dk]`` to what is cached, and the logarithm of its denominators, in float32.

    ``count``: what it reads is counted.
    """
    batch, q_heads, n, _ = query.shape
    sinks, shape = params.sink_logits, (batch, q_heads * n)
    lse = query.new_empty(shape, dtype=torch.float32)
    out = sparse_decode(
        query.flatten(1, 2),
        store.pool.kv,
        rows,
        store.table,
        None,
        store.recent_kv,
        granularity="all",
        value_dim=store.value_dim,
        sinks=store.sinks,
        scale=params.scale,
        softcap=params.softcap,
        sink_logits=None if sinks is None else sinks[:, None].expand(-1, n).reshape(-1),
        attended=store.counters.attended if count else None,
        lse=lse,
        scales=store.pool.fields.get("scales"),
        out=query.new_empty(*shape, store.value_dim, dtype=torch.float32),
    )
    return out.view(batch, q_heads, n, -1), lse.view(batch, q_heads, n)
