"""Sparse attention of a prompt, or of a piece of it: some tiles of queries at a time, and an audit of what they cover.

It leaves keys out, so it is optional (``SparseConfig(prefill=...)``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._prompts import TILE, blocks_of, key_means, seen_blocks, step_of, tiles_of
from ..ops.attention.block_attention import block_attention
from ..ops.selection.prompt_choice import prompt_choice
from ..ops.selection.prompt_mass import prompt_mass
from ..tensors import no_inference_mode
from ..types import AttentionParams
from . import flash_4

LAST = 256  # last queries of a pass, whose tiles attend to everything: answers begin with what they make
WIDEST = 256  # channels of a head that the kernels hold
# In float32, whose products are not the tensor cores': with more, a thread spills 7 to 40 KB (compiled for sm_90). That
# takes gigabytes of the GPU's memory, and minutes to compile.
WIDEST_FLOAT32 = 64
SPREAD = 1.5  # times the share that audited rows may miss in the mean: the root mean square that they may
_BYTES = 1 << 28  # of the estimates of the tiles that are taken at once


class PromptAudit:
    """Blocks attended to and mass truly covered by the sparse prompts of one layer, by query head.

    Attributes:
        table: float64 ``[Hq, 8]`` on the layer's device: rows audited, the sum of their covered mass, blocks attended
            to, blocks that could be seen; how often the head chose, chose again, and became dense; and the least
            covered mass of a row, 1 without any. None: there was no such prompt.
        passes: how many pieces of prompts were sparse.
    """

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.passes = 0

    def clear(self) -> None:
        self.table, self.passes = None, 0

    @no_inference_mode
    def merge(self, other: PromptAudit) -> None:
        """Count what another of the same layer has counted, too."""
        mine, more = self.table, other.table
        self.passes += other.passes
        if mine is None or more is None:
            self.table = mine if more is None else more.clone()
        else:
            self.table = torch.cat((mine[:, :-1] + more[:, :-1], mine[:, -1:].minimum(more[:, -1:])), dim=1)

    @no_inference_mode
    def add(
        self,
        covered: Tensor,
        counts: Tensor,
        seen: Tensor,
        again: Tensor,
        dense: Tensor,
        first_head: int,
        heads: int,
    ) -> None:
        """Count the tiles of some heads.

        Args:
            covered, counts: of ``prompt_choice``, ``[batch, h, tiles]``.
            seen: blocks that each tile sees, ``[batch or 1, tiles]``.
            again, dense: bool ``[batch, h]``: the head chose again, and attends to everything after that.
            first_head, heads: which query heads they are, from where on and of how many.
        """
        if self.table is None or self.table.device != covered.device:
            self.table = torch.zeros(heads, 8, dtype=torch.float64, device=covered.device)
            self.table[:, -1] = 1
        audited = ~covered.isnan()
        known = covered.masked_fill(~audited, 1.0)
        by_tile = torch.stack(
            (audited.float(), known * audited, counts.float(), seen[:, None].expand_as(counts).float())
        )
        by_row = torch.stack((torch.ones_like(again), again, dense))
        sums = (by_tile.sum((1, 3), dtype=torch.float64), by_row.sum(1, dtype=torch.float64))
        mine = self.table[first_head : first_head + covered.shape[1]]
        mine[:, :-1] += torch.cat(sums).T
        mine[:, -1] = mine[:, -1].minimum(known.amin((0, 2)))


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    params: AttentionParams,
    mass: float,
    audit: PromptAudit,
    *,
    start: Tensor | None = None,
    below: int = 0,
    first_head: int = 0,
    heads: int | None = None,
    step: int | None = None,
) -> Tensor:
    """Causal softmax attention of the last ``q`` columns to the blocks of keys that hold ``mass`` of their attention.

    Tiles of queries choose by estimates (``prompt_mass``, ``prompt_choice``). Heads whose audited rows miss too much
    (:func:`missing`) choose again for half of what they left out, and attend to everything if that is too little.
    Learned sinks are no part of the mass.

    Args:
        query: ``[batch, Hq, q, Dk]``, the queries of columns ``n - q .. n - 1``.
        key, value: ``[batch, H, n, D]``.
        params: scale, soft cap and learned sinks (of these heads).
        mass: share to cover, at most 1.
        audit: counts what is chosen.
        start: int32 ``[batch]``, the first column that is no padding. None: 0.
        below: rows of fewer tokens, padding not counted, attend to everything.
        first_head, heads: of a layer of ``heads`` query heads these are the ones from ``first_head`` on.
        step: of so many queries the scores of one are exact. None: :func:`..ops._prompts.step_of` says.

    Returns:
        ``[batch, Hq, q, Dv]``.
    """
    batch, q_heads, q, _ = query.shape
    n = key.shape[2]
    means = key_means(key, start)
    out = query.new_empty(batch, q, q_heads, value.shape[3]).transpose(1, 2)
    wanted = torch.full((batch, q_heads), mass, dtype=torch.float32, device=query.device)
    if start is not None and below:
        wanted.masked_fill_((n - start < below)[:, None], 1.0)
    plain = params.softcap is None and params.sink_logits is None
    at_once, step = queries_at_once(batch * q_heads, q, n), step or step_of(n)
    for lo in range(0, q, at_once):
        some, past = query[:, :, lo : lo + at_once], n - q + lo
        rows = some.shape[2]
        made = prompt_mass(some, key, means, params.scale, past, start, step, params.softcap)
        lists = prompt_choice(*made, wanted, past, rows, n - LAST, start)
        missed = [torch.zeros_like(wanted, dtype=torch.bool)] * 2
        for i, more in enumerate(() if mass >= 1 else (1 - (1 - mass) / 2, 1.0)):
            missed[i] = low = missing(lists[2], mass)
            lists = prompt_choice(*made, wanted.masked_fill(low, more), past, rows, n - LAST, start, low, lists)
        ids, counts, covered = lists
        seen = seen_blocks(past, rows, start, query.device)
        audit.add(covered, counts, seen, missed[0], missed[1], first_head, q_heads if heads is None else heads)
        mine = out[:, :, lo : lo + at_once]
        if start is None and plain and flash_4.serves(some, value):
            flash_4.block_attention(some, key, value, ids, counts, params.scale, past, mine)
        else:
            about = params.softcap, params.sink_logits
            block_attention(some, key, value, ids, counts, params.scale, past, start, mine, *about)
    return out


def missing(covered: Tensor, mass: float) -> Tensor:
    """Which heads miss more than 1 - ``mass``: in the mean or, as single rows do that look up a key, a few rows much.

    Args:
        covered: of ``prompt_choice``, ``[batch, Hq, tiles]``.

    Returns:
        bool ``[batch, Hq]``; False where nothing is left out.
    """
    square = (1 - covered).square().nanmean(-1)
    return (covered.nanmean(-1) < mass) | (square > (SPREAD * (1 - mass)) ** 2)


def queries_at_once(rows: int, q: int, n: int) -> int:
    """How many of ``q`` queries choose at a time, of ``rows`` rows and heads over ``n`` columns.

    ``step_of(n)`` tiles, whose exact rows make a tile, or a multiple of them.
    """
    step = step_of(n)
    tiles = min(_BYTES // (4 * rows * blocks_of(n) * (TILE // step + 2)), tiles_of(q))
    return max(1, tiles // step) * step * TILE
