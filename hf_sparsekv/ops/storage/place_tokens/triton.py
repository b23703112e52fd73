"""Columns of chosen tokens, and their addresses in device pages: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._operands import Rows, batch_and_head, operand, row_ptr
from ..._overlap import begin, launch

TILE = 256  # tokens of a program. Not tuned yet.


@triton.jit(do_not_specialize=["k"])
def place_tokens_kernel(
    at,
    blocks,
    pages,
    columns,
    places,
    k,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` tokens of one row and KV head."""
    begin(PDL)
    i_batch, i_head = batch_and_head(tl.program_id(0), HEADS)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_n = o_n < k
    b_at = tl.load(row_ptr(at, i_batch, i_head) + o_n, mask=m_n, other=-1)  # [BN]
    m_at = b_at >= 0
    b_in = b_at % BLOCK_SIZE
    b_block = tl.load(row_ptr(blocks, i_batch, i_head) + b_at // BLOCK_SIZE, mask=m_at, other=0)
    b_column = b_block * BLOCK_SIZE + b_in
    tl.store(row_ptr(columns, i_batch, i_head) + o_n, tl.where(m_at, b_column, -1), mask=m_n)
    b_page = tl.load(row_ptr(pages, i_batch, i_head) + b_at // BLOCK_SIZE, mask=m_at, other=0)
    b_place = b_page * BLOCK_SIZE + b_in
    tl.store(row_ptr(places, i_batch, i_head) + o_n, tl.where(m_at, b_place, -1), mask=m_n)


def place_tokens(at, block_ids, page_ids, block_size):
    """As ``reference.place_tokens``."""
    require_dense_rows(at=at, block_ids=block_ids, page_ids=page_ids)
    batch, heads, k = at.shape
    columns, places = (torch.empty(at.shape, dtype=torch.int32, device=at.device) for _ in range(2))
    grid = batch * heads, triton.cdiv(k, TILE)
    args = *(operand(Rows, t) for t in (at, block_ids, page_ids, columns, places)), k
    if at.numel():
        launch(place_tokens_kernel, grid, at, *args, HEADS=heads, BLOCK_SIZE=block_size, BN=TILE, num_warps=2)
    return columns, places
