"""Drafts that full attention verifies in a captured pass: each row's queries read what is cached once for all of them.

Apart from drafts that attend to selections, because nothing here selects, and rows need not be alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv.store import LayerStore
from ..ops.attention.sparse_decode import sparse_decode
from ..types import AttentionParams


def attend_at_once(
    store: LayerStore, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, params: AttentionParams
) -> Tensor:
    """Attention of new tokens to all that is cached before them, and to each other, causally.

    The queries of a row are further query heads of each KV head to the kernel that reads what is cached. It gives the
    denominators too, by which a softmax takes the new tokens in.

    Args:
        query: ``[batch, Hq, n, Dk]``.
        key, value: of the new tokens, ``[batch, H, n, D]``, as they are stored afterwards.
        rows: int32 ``[batch, 2]``, tokens of each row before these, and those of them in full blocks.

    Returns:
        ``[batch, Hq, n, Dv]``.
    """
    batch, q_heads, n, _ = query.shape
    heads, width = store.heads, store.value_dim
    if store.latent:  # the whole row is the key, and its first part the value
        key, value = torch.cat((key, value), dim=-1), key
    asked, sinks = query.flatten(1, 2), params.sink_logits
    lse = query.new_empty(batch, q_heads * n, dtype=torch.float32)
    past = sparse_decode(
        asked,
        store.pool.kv,
        rows,
        store.table,
        None,
        store.recent_kv,
        granularity="all",
        value_dim=width,
        sinks=store.sinks,
        scale=params.scale,
        softcap=params.softcap,
        sink_logits=None if sinks is None else sinks.repeat_interleave(n),
        attended=store.counters.attended,
        lse=lse,
        scales=store.pool.fields.get("scales"),
        out=query.new_empty(batch, q_heads * n, width, dtype=torch.float32),
    )
    logits = asked.view(batch, heads, -1, asked.shape[-1]).float() @ key.float().transpose(-1, -2) * params.scale
    if params.softcap is not None:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    logits = logits.view(batch, heads, -1, n, n)  # of the heads of a group: queries, keys
    later = torch.ones(n, n, dtype=torch.bool, device=query.device).triu(1)
    logits = torch.cat((lse.view(*logits.shape[:-1], 1), logits.masked_fill(later, float("-inf"))), dim=-1)
    weights = logits.softmax(-1)
    new = weights[..., 1:].flatten(2, 3) @ value.float()  # [batch, H, group * n, Dv]
    out = torch.addcmul(new.view(batch, -1, width), weights[..., :1].reshape(batch, -1, 1), past)
    return out.view(batch, q_heads, n, width).to(query.dtype)
