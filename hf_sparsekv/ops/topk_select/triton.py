"""The k best entries of each row as ascending ids: the kernels.

Scores are compared as integers that order as the floats do. One program holds a whole row (``row``); rows that are
too long for that are in ``long_rows`` and, chosen from a sample, in ``sampled``. Either way prefix sums give the ids in
ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import require_dense_rows
from .._overlap import overlap, wait
from . import long_rows, sampled
from .keys import ordered
from .row import select_row

ROW = 16384  # entries that one program holds in registers


@triton.jit
def _row_kernel(
    p_scores,
    p_blocks,
    p_out,
    n,
    k,
    scores_batch,
    scores_head,
    blocks_batch,
    blocks_head,
    out_batch,
    out_head,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    TAIL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select from one whole row."""
    wait(PDL)
    i_row = tl.program_id(0)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    o_n = tl.arange(0, N)
    p_row = p_scores + i_batch * scores_batch + i_head * scores_head
    b_key = ordered(tl.load(p_row + o_n, mask=o_n < n, other=float("-inf")))  # [N]

    p_to = p_out + i_batch * out_batch + i_head * out_head
    p_row = p_blocks + i_batch * blocks_batch + i_head * blocks_head
    select_row(p_to, p_row, b_key, n // BLOCK_SIZE if BLOCK_SIZE > 0 else 0, k, BLOCK_SIZE, N, TAIL, PDL)


def row_warps(width: int) -> int:
    """Warps of a program that selects from ``width`` entries, measured on an H200 with 512, 2048 and 8192."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


@dataclass(frozen=True)
class How:
    """What may replace the constants of a selection.

    Attributes:
        row: longest row that one program holds, at most 32,768.
        split: longer rows go by a sample of them, where one serves, and not digit by digit.
        chunk, warps: entries and warps of one of the programs that share a row; with short rows, its program's warps.
        sample, fewest: entries of a sample, and that its last step has room for at least.
        last_warps: of that step's programs.
    """

    row: int = ROW
    split: bool = True
    chunk: int | None = None
    warps: int | None = None
    sample: int | None = None
    fewest: int = sampled.FEWEST
    last_warps: int | None = None

    def tiles(self, n: int, k: int) -> tuple[int, int] | None:
        """Of a selection of ``k`` from a long row that goes by a sample of it; see ``sampled.tiles``."""
        return sampled.tiles(n, k, self.sample, self.fewest) if self.split else None


def scratch_size(scores: Tensor, k: int, **how: int | None) -> int:
    """int32 entries that a selection of ``k`` from ``scores`` needs beside its result: none for short rows."""
    return _scratch_size(scores, k, How(**how))


def _scratch_size(scores: Tensor, k: int, how: How) -> int:
    batch, heads, n = scores.shape
    if n <= how.row:
        return 0
    if tiles := how.tiles(n, k):
        return sampled.scratch_size(batch * heads, n, tiles[1], how.chunk)
    return long_rows.scratch_size(batch * heads, n, how.chunk or long_rows.CHUNK)


def _select(
    scores: Tensor,
    block_ids: Tensor | None,
    k: int,
    block_size: int,
    out: Tensor | None,
    scratch: Tensor | None,
    how: How,
) -> Tensor:
    batch, heads, n = scores.shape
    if out is None:
        out = torch.empty(batch, heads, k, dtype=torch.int32, device=scores.device)
    if not k:
        return out
    require_dense_rows(scores=scores, block_ids=block_ids, out=out)
    fixed = {
        "HEADS": heads,
        "BLOCK_SIZE": 0 if block_ids is None else block_size,
        "TAIL": min(1024, triton.next_power_of_2(k)),
    }
    if block_ids is None:
        block_ids = out  # not read
    with torch.cuda.device_of(scores):
        if n > how.row:
            if scratch is None:
                scratch = torch.empty(_scratch_size(scores, k, how), dtype=torch.int32, device=scores.device)
            if tiles := how.tiles(n, k):
                others = how.chunk, how.warps, how.last_warps
                sampled.select_sampled(scores, block_ids, k, out, scratch, fixed, *tiles, *others)
            else:
                long_rows.select_long(scores, block_ids, k, out, scratch, fixed, how.chunk, how.warps)
            return out
        width = max(16, block_size, triton.next_power_of_2(n))
        _row_kernel[(batch * heads,)](
            scores,
            block_ids,
            out,
            n,
            k,
            *scores.stride()[:2],
            *block_ids.stride()[:2],
            *out.stride()[:2],
            N=width,
            num_warps=how.warps or row_warps(width),
            **overlap(scores),
            **fixed,
        )
    return out


def block_select(
    scores: Tensor, k: int, *, out: Tensor | None = None, scratch: Tensor | None = None, **how: int | None
) -> Tensor:
    """As ``reference.block_select``, into ``out`` if given.

    ``scratch`` is int32 of ``scratch_size(scores, k)`` entries; ``how``: see :class:`How`.
    """
    return _select(scores, None, k, 0, out, scratch, How(**how))


def token_select(
    scores: Tensor,
    block_ids: Tensor | None,
    k: int,
    block_size: int,
    *,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    **how: int | None,
) -> Tensor:
    """As ``reference.token_select``; the rest as for ``block_select``."""
    return _select(scores, block_ids, k, block_size, out, scratch, How(**how))
