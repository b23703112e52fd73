"""All blocks of each row in order of their scores: the kernel.

The rank of a block is the number of blocks that come before it, so every program ranks a few blocks by comparing them
with all others: quadratic, but without any exchange between programs or threads. For 2,048 blocks and eight heads that
are 34 million comparisons, some three microseconds of an H200; a sort of one row a program would leave most processors
idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .._dispatch import require_dense_rows
from .._operands import Rows, Table, batch_and_head, operand, row_ptr
from .._overlap import begin, launch


@dataclass(frozen=True)
class Config:
    """Blocks that a program ranks, and with how many it compares them at a time. Not tuned yet."""

    tile: int = 16
    others: int = 512


@triton.jit
def _number(b_s):
    """NaN as ``-inf``: as it is it would come neither before nor after any other, and leave ranks without a block."""
    return tl.where(b_s == b_s, b_s, float("-inf"))


@triton.jit
def block_rank_kernel(
    scores,
    p_fill,
    block_table,
    p_ids,
    p_tokens,
    n,
    HEADS: tl.constexpr,
    BI: tl.constexpr,
    BJ: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ranks of ``BI`` blocks of one row and KV head."""
    begin(PDL)
    i_row = tl.program_id(1)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    p_row = row_ptr(scores, i_batch, i_head)
    o_i = tl.program_id(0) * BI + tl.arange(0, BI)
    m_i = o_i < n
    b_i = _number(tl.load(p_row + o_i, mask=m_i, other=float("-inf")))  # [BI]
    b_physical_id = tl.load(
        block_table.ptr + i_batch * block_table.row + o_i, mask=m_i & (b_i > float("-inf")), other=-1
    )  # [BI]
    b_tokens = tl.load(p_fill + b_physical_id, mask=b_physical_id >= 0, other=0)  # [BI]
    # Of equal scores the lower id comes first. Tiles of others lie on one side of these blocks, all but the one that
    # holds them, so two comparisons in three are left out. (Counted in float32: one instruction less for each.)
    b_before = tl.zeros([BI, BJ], tl.float32)
    own = tl.program_id(0) * BI // BJ * BJ
    for j in range(0, own, BJ):
        b_j = _number(tl.load(p_row + j + tl.arange(0, BJ)))  # [BJ]
        b_before += tl.where(b_j[None, :] >= b_i[:, None], 1.0, 0.0)
    o_j = own + tl.arange(0, BJ)
    b_j = _number(tl.load(p_row + o_j, mask=o_j < n, other=float("-inf")))  # [BJ]; what is no block comes last
    m_tie = (b_j[None, :] == b_i[:, None]) & (o_j[None, :] < o_i[:, None])
    b_before += ((b_j[None, :] > b_i[:, None]) | m_tie).to(tl.float32)
    for j in range(own + BJ, n, BJ):
        o_j = j + tl.arange(0, BJ)
        b_j = _number(tl.load(p_row + o_j, mask=o_j < n, other=float("-inf")))  # [BJ]
        b_before += tl.where(b_j[None, :] > b_i[:, None], 1.0, 0.0)
    o_out = i_row.to(tl.int64) * n + tl.sum(b_before, 1).to(tl.int32)  # [BI]
    tl.store(p_ids + o_out, tl.where(b_i > float("-inf"), o_i, -1), mask=m_i)
    tl.store(p_tokens + o_out, b_tokens, mask=m_i)


def block_rank(scores, fill, block_table, *, config=None):
    """As ``reference.block_rank``; ``config`` replaces the usual one."""
    batch, heads, n = scores.shape
    config = config or Config()
    ids, tokens = (torch.empty(batch, heads, n, dtype=torch.int32, device=scores.device) for _ in range(2))
    if not n:
        return ids, tokens
    require_dense_rows(scores=scores, fill=fill, block_table=block_table)
    others = max(config.tile, min(config.others, triton.next_power_of_2(n)))  # a multiple of the tile
    grid, strided = (
        (triton.cdiv(n, config.tile), batch * heads),
        (operand(Rows, scores), fill, operand(Table, block_table)),
    )
    launch(block_rank_kernel, grid, scores, *strided, ids, tokens, n, HEADS=heads, BI=config.tile, BJ=others)
    return ids, tokens
