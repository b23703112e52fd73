"""Estimates of the attention mass that tiles of a prompt's queries give to blocks of keys: the definition."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._prompts import BLOCK, EVERY, POOL, STEP, TILE, blocks_of, pool_counts, tiles_of


def prompt_mass(
    query: Tensor,
    key: Tensor,
    means: Tensor,
    scale: float,
    past: int,
    start: Tensor | None = None,
    step: int = STEP,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Two estimates: means of keys against every ``EVERY``-th query, and all keys against every ``step``-th.

    A mean stands for as many keys as it is of. A query sees it if it sees its first key.

    Args:
        query: ``[batch, Hq, r, Dk]``, of columns ``past .. past + r - 1``.
        key: ``[batch, H, n, Dk]``, ``n >= past + r``.
        means: ``[batch, H, ceil(n / POOL), Dk]``, :func:`..._prompts.key_means` of ``key``.
        scale: softmax scaling.
        start: int32 ``[batch]``, the first column that is no padding. None: 0.
        step: of so many queries the last one is exact; a power of two, less than ``TILE``.
        softcap: logits become ``softcap * tanh(logits / softcap)``. None: they stay.

    Returns:
        float32 ``[batch, Hq, tiles, blocks]``: the share of each block by the means, the mean over those of the
        tile's queries that see anything; and float32 ``[batch, Hq, tiles * TILE / step, blocks]``: of queries
        ``step - 1``, ``2 step - 1`` and so on the binary logarithm of the sum of the exponentials of a block's logits,
        ``-inf`` where there is none. Nobody may read entries of blocks that no query of a tile sees.
    """
    batch, q_heads, r, _ = query.shape
    group, n, nb, tiles = q_heads // key.shape[1], key.shape[2], blocks_of(past + r), tiles_of(r)
    first = torch.zeros(1, dtype=torch.int32, device=query.device) if start is None else start
    at = torch.arange(past, past + r, device=query.device)
    live = at >= first[:, None]  # [batch or 1, r]

    def logits(q: Tensor, k: Tensor) -> Tensor:
        k = k.float()[:, :, None].transpose(-1, -2)
        s = (q.float().unflatten(1, (-1, group)) @ k).flatten(1, 2) * scale
        return (s if softcap is None else softcap * torch.tanh(s / softcap)) * math.log2(math.e)

    width = min(means.shape[2], -(-(past + r) // POOL))
    counts = pool_counts(n, start, query.device)[:, :width]
    group_at = torch.arange(width, device=query.device) * POOL
    rows = torch.arange(EVERY - 1, r, EVERY, device=query.device)
    s = logits(query[:, :, rows], means[:, :, :width]) + counts.log2()[:, None, None]
    s = s.masked_fill(~((group_at <= at[rows][:, None])[None] & live[:, rows, None])[:, None], float("-inf"))
    share = torch.softmax(s * math.log(2), dim=-1).nan_to_num(0.0)
    missing = tiles * (TILE // EVERY) - len(rows)
    share = F.pad(share, (0, nb * BLOCK // POOL - width, 0, missing))
    share = share.view(batch, q_heads, tiles, TILE // EVERY, nb, BLOCK // POOL).sum((3, 5))
    seeing = F.pad(live[:, rows].float(), (0, missing)).view(-1, tiles, TILE // EVERY).sum(-1).clamp_min(1)
    pooled = share / seeing[:, None, :, None]

    rows = torch.arange(step - 1, r, step, device=query.device)
    columns = torch.arange(nb * BLOCK, device=query.device)
    s = F.pad(logits(query[:, :, rows], key[:, :, : past + r]), (0, nb * BLOCK - past - r), value=float("-inf"))
    seen = (columns <= at[rows][:, None])[None] & (columns >= first[:, None, None])
    s = s.masked_fill(~seen[:, None], float("-inf")).unflatten(-1, (nb, BLOCK))
    top = s.amax(-1, keepdim=True)
    exact = (s - top).nan_to_num(float("-inf")).exp2().sum(-1).log2() + top[..., 0]
    missing = tiles * (TILE // step) - len(rows)
    return pooled, F.pad(exact, (0, 0, 0, missing), value=float("-inf"))
