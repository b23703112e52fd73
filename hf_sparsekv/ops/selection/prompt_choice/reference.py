"""Which blocks of keys a tile of a prompt's queries attends to: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._prompts import BLOCK, NEAR, SINKS, TILE

Choice = tuple[Tensor, Tensor, Tensor]


def prompt_choice(
    pooled: Tensor,
    exact: Tensor,
    mass: Tensor,
    past: int,
    rows: int,
    dense_from: int,
    start: Tensor | None = None,
    only: Tensor | None = None,
    into: Choice | None = None,
) -> Choice:
    """Blocks in order of their estimate until ``mass`` of it is covered.

    Each tile holds one of its exact rows back, in turn, to say what is truly covered. The others' mean share and the
    share by means of keys are scaled to a sum of 1; the estimate is the larger one, scaled likewise. The blocks of the
    row's first ``SINKS`` tokens, ``NEAR`` whole blocks before the tile and its own ones are always chosen, and count
    first. Equal blocks are chosen together or not at all.

    Args:
        pooled, exact: what ``prompt_mass`` gives.
        mass: float32 ``[batch, Hq]``, the share to cover; 1: everything is chosen.
        past: the column of the first of ``rows`` queries.
        dense_from: tiles with a later query than of this column choose everything.
        start: int32 ``[batch]``, the first column that is no padding. None: 0.
        only: bool ``[batch, Hq]``, heads that choose; the others' lists in ``into`` stay. None: all do.
        into: receives the result.

    Returns:
        int32 ``[batch, Hq, tiles, blocks]``, ascending, -1 after the last; int32 ``[batch, Hq, tiles]``, how many; and
        float32 ``[batch, Hq, tiles]``, which share of the mass of the row held back they cover: NaN if the tile has
        no such row, or leaves nothing out.
    """
    batch, q_heads, tiles, nb = pooled.shape
    n_exact = exact.shape[2] // tiles
    device = pooled.device
    first = torch.zeros(1, dtype=torch.int32, device=device) if start is None else start
    begin = torch.arange(tiles, device=device) * TILE + past
    last = (begin + TILE).clamp_max(past + rows) - 1
    block = torch.arange(nb, device=device)
    own = first[:, None, None] // BLOCK  # the block that the row begins in
    allowed = (block >= own) & (block * BLOCK <= last[:, None]) & (last >= first[:, None])[..., None]
    sinks = block <= (first[:, None, None] + SINKS - 1) // BLOCK
    forced = allowed & (sinks | (block >= begin[:, None] // BLOCK - NEAR))
    forced = (forced | (allowed & (last >= dense_from)[:, None]))[:, None]
    allowed = allowed[:, None]  # [batch or 1, 1, tiles, blocks]

    exact = exact.unflatten(2, (tiles, n_exact)).masked_fill(~allowed[:, :, :, None], float("-inf"))
    nth = torch.arange(n_exact, device=device)
    at = begin[:, None] + (nth + 1) * (TILE // n_exact) - 1  # columns of the exact rows, [tiles, n_exact]
    there = (at < past + rows) & (at >= first[:, None, None])  # [batch or 1, tiles, n_exact]
    shares = torch.softmax(exact * 0.6931471805599453, dim=-1).nan_to_num(0.0)
    shares = shares * there[:, None, :, :, None]
    back = (begin // TILE) % n_exact == nth[:, None]  # [n_exact, tiles]
    held = back.T[None, None, :, :, None]
    by_rows = (shares * ~held).sum(3)
    by_means = pooled.masked_fill(~allowed, 0)
    parts = (part / part.sum(-1, keepdim=True).clamp_min(1e-20) for part in (by_means, by_rows))
    estimate = torch.maximum(*parts)
    estimate = estimate / estimate.sum(-1, keepdim=True).clamp_min(1e-20)

    sure = (estimate * forced).sum(-1, keepdim=True)
    free = estimate * ~forced
    order = free.sort(-1, descending=True)
    before = order.values.cumsum(-1) - order.values
    # Equal ones: none counts before another.
    low = torch.searchsorted(-order.values.contiguous(), -order.values.contiguous(), right=False)
    larger = torch.empty_like(before).scatter_(-1, order.indices, before.gather(-1, low.clamp_max(nb - 1)))
    wanted = mass[:, :, None, None]
    chosen = allowed & (forced | (sure + larger < wanted) | (wanted >= 1))

    counts = chosen.sum(-1)
    ids = torch.where(chosen, block, nb).sort(-1).values
    ids = ids.masked_fill(ids == nb, -1).int()
    true = (shares * held).sum(3)
    covered = (true * chosen).sum(-1) / true.sum(-1)
    covered = covered.masked_fill(counts == allowed.sum(-1), float("nan"))
    made = ids, counts.int(), covered
    if into is None:
        return made
    for old, new in zip(into, made):
        mine = torch.ones((batch, q_heads), dtype=torch.bool, device=device) if only is None else only
        old.copy_(torch.where(mine.view(batch, q_heads, *(1,) * (old.dim() - 2)), new, old))
    return into
