"""Attention of a prompt's queries to chosen blocks of keys: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._prompts import BLOCK, TILE, blocks_of


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    counts: Tensor,
    scale: float,
    past: int,
    start: Tensor | None = None,
    out: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal softmax attention of each tile of queries to the keys of its blocks.

    Args:
        query: ``[batch, Hq, r, Dk]``, of columns ``past .. past + r - 1``.
        key, value: ``[batch, H, n, D]``, ``n >= past + r``.
        ids: int32 ``[batch, Hq, tiles, blocks]``, ascending. A list that is not empty ends with all blocks that the
            tile's last query sees and its first does not see whole.
        counts: int32 ``[batch, Hq, tiles]``: how many of the ids count.
        scale: softmax scaling, positive.
        start: int32 ``[batch]``, the first column that is no padding. None: 0.
        out: ``[batch, Hq, r, Dv]``, receives the result.
        softcap: logits become ``softcap * tanh(logits / softcap)``. None: they stay.
        sinks: ``[Hq]``, logits that take part in each query's softmax and have no value. None: there are none.

    Returns:
        ``[batch, Hq, r, Dv]``; zeros for a query that sees none of the keys.
    """
    batch, q_heads, r, _ = query.shape
    group, end = q_heads // key.shape[1], past + r
    if out is None:
        # As projections lie, which is how the caller's result is used.
        out = query.new_empty(batch, r, q_heads, value.shape[3]).transpose(1, 2)
    nb, columns = blocks_of(end), torch.arange(end, device=query.device)
    k = key[:, :, None, :end].float().transpose(-1, -2)
    v = value[:, :, None, :end].float()
    listed = torch.arange(ids.shape[-1], device=query.device) < counts[..., None]
    ids = ids.masked_fill(~listed, nb).clamp(0, nb).long()
    for tile in range(ids.shape[2]):
        lo, hi = tile * TILE, min((tile + 1) * TILE, r)
        at = torch.arange(past + lo, past + hi, device=query.device)[:, None]
        chosen = torch.zeros(batch, q_heads, nb + 1, dtype=torch.bool, device=query.device)
        chosen = chosen.scatter_(-1, ids[:, :, tile], True)[..., :nb].repeat_interleave(BLOCK, -1)[..., :end]
        seen = chosen[:, :, None] & (columns <= at)
        if start is not None:
            seen = seen & (columns >= start[:, None, None, None])
        s = (query[:, :, lo:hi].float().unflatten(1, (-1, group)) @ k).mul_(scale)
        if softcap is not None:
            s = s.div_(softcap).tanh_().mul_(softcap)
        s = s.masked_fill_(~seen.unflatten(1, (-1, group)), float("-inf"))
        if sinks is not None:
            s = torch.cat((s, sinks.float().view(-1, group, 1, 1).expand(*s.shape[:4], 1)), dim=-1)
        weights = s.softmax(-1).nan_to_num_(0.0)[..., :end]
        out[:, :, lo:hi] = (weights @ v).flatten(1, 2).to(out.dtype)
    return out
