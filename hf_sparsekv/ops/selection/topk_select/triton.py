"""The k best entries of each row as ascending ids: the kernels.

Scores are compared as integers that order as the floats do. One program holds a whole row (``row``). Rows that are
too long for that are in ``cluster``, where the GPU has clusters; elsewhere in ``sampled``. Prefix sums give the ids in
ascending order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._layout import is_whole
from ..._operands import Rows, batch_and_head, operand, row_ptr
from ..._overlap import launch, wait
from . import cluster, sampled
from .config import Config
from .keys import MINUS_INF, entries, ordered, readable
from .reference import require_all_blocks, tokens_of
from .row import select_row


@triton.jit(do_not_specialize=["rows", "n", "k"])
def topk_select_row_kernel(
    scores,
    blocks,
    out,
    rows,
    n,
    k,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    N: tl.constexpr,
    TAIL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select from one whole row. ``WHOLE``: rows can be read up to the next multiple of 16 entries."""
    wait(PDL)
    i_row = tl.program_id(0)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    o_n = tl.arange(0, N)
    p_row = row_ptr(scores, i_batch, i_head)
    b_key = ordered(tl.load(p_row + o_n, mask=o_n < readable(n, WHOLE), other=float("-inf")))  # [N]
    # All of it is read: nothing is won if a program first asks for how much.
    if rows is not None or WHOLE:
        b_key = tl.where(o_n < entries(rows, i_batch, n, TOKENS), b_key, MINUS_INF)

    p_to = row_ptr(out, i_batch, i_head)
    p_blocks = None
    if BLOCK_SIZE > 0:
        p_blocks = row_ptr(blocks, i_batch, i_head)
    select_row(p_to, p_blocks, b_key, n // BLOCK_SIZE if BLOCK_SIZE > 0 else 0, k, BLOCK_SIZE, N, TAIL, PDL)


def row_warps(width: int) -> int:
    """Warps of a program that selects from ``width`` entries, measured on an H200 with 512, 2048 and 8192."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


def scratch_size(scores, k, config=None):
    """int32 entries of scratch memory that a selection of ``k`` from ``scores`` needs: none for short rows."""
    batch, heads, n = scores.shape
    config = config or Config()
    if n <= config.row or cluster.serves(scores, config):
        return 0
    return sampled.scratch_size(batch * heads, n, config.tiles(n, k)[1], config.chunk)


def block_select(scores, k, *, rows=None, block_size=None, out=None, scratch=None, config=None):
    """As ``reference.block_select``; ``config`` replaces the usual one."""
    return _select(scores, None, k, 0, rows, tokens_of(rows, block_size), out, scratch, config)


def token_select(scores, block_ids, k, block_size, *, rows=None, out=None, scratch=None, config=None):
    """As ``reference.token_select``; ``config`` replaces the usual one."""
    return _select(scores, block_ids, k, block_size, rows, 1, out, scratch, config)


def _select(scores, block_ids, k, block_size, rows, tokens, out, scratch, config):
    """``tokens``: of an entry of the scores, where ``rows`` bound them."""
    batch, heads, n = scores.shape
    require_all_blocks(rows, block_ids, batch)
    config = config or Config()
    if out is None:
        out = torch.empty(batch, heads, k, dtype=torch.int32, device=scores.device)
    if not k:
        return out
    require_dense_rows(scores=scores, block_ids=block_ids, out=out)
    fixed = {
        "HEADS": heads,
        "BLOCK_SIZE": 0 if block_ids is None else block_size,
        "TOKENS": tokens,
        "WHOLE": is_whole(scores),
        "TAIL": min(1024, triton.next_power_of_2(k)),
    }
    operands = operand(Rows, scores), operand(Rows, block_ids), operand(Rows, out), rows
    if cluster.select_clusters(scores, block_ids, k, block_size, rows, tokens, out, config):
        return out
    if n > config.row:
        # No scratch memory was requested if clusters support such scores but not these ids.
        size = scratch_size(scores, k, replace(config, clusters=False))
        if scratch is None or scratch.numel() < size:
            scratch = torch.empty(size, dtype=torch.int32, device=scores.device)
        sampled.select_sampled(scores, *operands, k, scratch, fixed, *config.tiles(n, k), config)
        return out
    width = max(16, block_size, triton.next_power_of_2(n))
    warps = config.warps or row_warps(width)
    launch(topk_select_row_kernel, (batch * heads,), scores, *operands, n, k, N=width, num_warps=warps, **fixed)
    return out
