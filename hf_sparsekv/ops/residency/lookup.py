"""Page ids of blocks as they are, without copying any to the device: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._dispatch import require_dense_rows
from .._operands import Rows, Table, operand, row_ptr
from .._overlap import begin, launch

LOOK = 256  # entries that a program looks up. Not tuned yet.


@triton.jit(do_not_specialize=["n", "k"])
def residency_lookup_kernel(
    ids,
    block_table,
    p_table,
    p_stamp,
    p_since,
    p_page_ids,
    n,
    k,
    HEADS: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Places of ``BN`` entries."""
    begin(PDL)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < n
    i_row = o_n // k
    i_batch, i_head = (i_row // HEADS).to(tl.int64), i_row % HEADS
    if ids is not None:
        b_id = tl.load(row_ptr(ids, i_batch, i_head) + o_n % k, mask=m_n, other=-1)  # [BN]
    else:
        b_id = tl.where(m_n, o_n % k, -1)
    b_physical_id = tl.load(block_table.ptr + i_batch * block_table.row + b_id, mask=b_id >= 0, other=-1)  # [BN]
    m_there = b_physical_id >= 0
    b_page = tl.load(p_table + b_physical_id.to(tl.int64) * HEADS + i_head, mask=m_there, other=-1)  # [BN]
    m_found = b_page >= 0
    if p_since is not None:
        b_stamp = tl.load(p_stamp + b_page, mask=m_found, other=0)  # [BN]
        m_found = m_found & (b_stamp == tl.load(p_since))
    tl.store(p_page_ids + o_n, tl.where(m_found, b_page, tl.where(m_there, -b_physical_id - 2, -1)), mask=m_n)


def lookup(block_ids, block_table, table, stamp, since=None, *, out=None, config=None):
    """As ``reference.lookup``, into contiguous ``out`` if given; ``config``: entries that a program looks up."""
    batch, heads = block_table.shape[0], table.shape[1]
    k = (block_table if block_ids is None else block_ids).shape[-1]
    n, look = batch * heads * k, config or LOOK
    if out is None:
        out = torch.empty(batch, heads, k, dtype=torch.int32, device=block_table.device)
    if not n:
        return out
    require_dense_rows(block_ids=block_ids, block_table=block_table, table=table, out=out)
    args = operand(Rows, block_ids), operand(Table, block_table), table, stamp, since, out, n, k
    launch(residency_lookup_kernel, (triton.cdiv(n, look),), block_table, *args, HEADS=heads, BN=look)
    return out
