"""Keep the chosen tokens of each KV head in one buffer: the kernels.

Both lists are ascending, so a binary search finds the tokens that stay. One program a row and KV head searches and
lists the positions that become free. Then many programs copy the missing tokens and rewrite the lists.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._ascending import find
from ..._dispatch import require_dense_rows
from ..._operands import PagedKV, Rows, Table, operand, padded, row_ptr
from ..._overlap import begin, launch

TILE = 32  # tokens that a program copies at once. Not tuned yet.
END = tl.constexpr(0x7FFFFFFF)  # replaces -1 at the end of an ascending list


@triton.jit(do_not_specialize=["p_free"])
def pack_match_kernel(
    ids,
    p_held,
    p_order,
    p_position,
    p_free,
    p_enabled,
    p_counters,
    room,
    HEADS: tl.constexpr,
    STEPS: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """New positions of the entries of one row and KV head; ``-(i + 1)`` is the ``i``-th position that becomes free."""
    begin(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_batch, i_head = i_row // HEADS, i_row % HEADS
    p_new = row_ptr(ids, i_batch, i_head)
    p_old, p_at = p_held + i_row * room, p_order + i_row * room
    o_n = tl.arange(0, N)
    m_n = o_n < room

    b_new = tl.load(p_new + o_n, mask=m_n, other=-1)  # [N]
    b_where = find(p_old, tl.where(b_new < 0, END, b_new), room, STEPS)
    m_new = m_n & (b_new >= 0)
    m_known = m_new & (tl.load(p_old + b_where, mask=m_new & (b_where < room), other=-1) == b_new)
    b_nth = tl.cumsum((m_n & (m_known == 0)).to(tl.int32), 0)  # number among the missing entries, from 1
    b_there = tl.load(p_at + b_where, mask=m_known, other=0)
    tl.store(p_position + i_row * room + o_n, tl.where(m_known, b_there, -b_nth), mask=m_n)

    b_old = tl.load(p_old + o_n, mask=m_n, other=-1)  # [N]
    b_where = find(p_new, tl.where(b_old < 0, END, b_old), room, STEPS)
    m_old = m_n & (b_old >= 0)
    m_stays = m_old & (tl.load(p_new + b_where, mask=m_old & (b_where < room), other=-1) == b_old)
    m_free = m_n & (m_stays == 0)
    b_nth = tl.cumsum(m_free.to(tl.int32), 0) - 1
    tl.store(p_free + i_row * room + b_nth, tl.load(p_at + o_n, mask=m_n, other=0), mask=m_free)

    if p_counters is not None:
        n_new, n_known = tl.sum(m_new.to(tl.int32), 0), tl.sum(m_known.to(tl.int32), 0)
        live = n_new > 0
        if p_enabled is not None:
            live = live & (tl.load(p_enabled) != 0)
        tl.atomic_add(p_counters, n_new.to(tl.int64), mask=live, sem="relaxed")
        tl.atomic_add(p_counters + 1, (n_new - n_known).to(tl.int64), mask=live, sem="relaxed")


@triton.jit(do_not_specialize=["p_free"])
def pack_copy_kernel(
    ids,
    kv,
    block_table,
    p_held,
    p_order,
    p_packed,
    p_page_ids,
    p_position,
    p_free,
    p_enabled,
    room,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bring what is missing among ``BN`` entries of one row and KV head, and write their part of the lists."""
    begin(PDL)
    BW: tl.constexpr = padded(WIDTH)
    i_row = tl.program_id(0).to(tl.int64)
    i_batch, i_head = i_row // HEADS, i_row % HEADS
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_n = o_n < room
    if p_enabled is not None:
        m_n = m_n & (tl.load(p_enabled) != 0)
    b_id = tl.load(row_ptr(ids, i_batch, i_head) + o_n, mask=m_n, other=-1)  # [BN]
    b_to = tl.load(p_position + i_row * room + o_n, mask=m_n, other=0)  # [BN]
    m_moves = m_n & (b_to < 0)
    b_free = tl.load(p_free + i_row * room - b_to - 1, mask=m_moves, other=0)  # [BN]
    b_to = tl.where(m_moves, b_free, b_to)
    m_moves = m_moves & (b_id >= 0)

    b_physical_id = tl.load(block_table.ptr + i_batch * block_table.row + b_id // BLOCK_SIZE, mask=m_moves, other=0).to(
        tl.int64
    )
    o_w = tl.arange(0, BW)
    m_w = m_moves[:, None] & (o_w < WIDTH)[None, :]
    p_from = kv.ptr + b_physical_id * kv.block + i_head * kv.head + (b_id % BLOCK_SIZE).to(tl.int64) * kv.token
    b_kv = tl.load(p_from[:, None] + o_w[None, :], mask=m_w, other=0.0)  # [BN, BW]
    p_to = p_packed + (i_row * room + b_to) * WIDTH
    tl.store(p_to[:, None] + o_w[None, :], b_kv, mask=m_w)

    tl.store(p_held + i_row * room + o_n, b_id, mask=m_n)
    tl.store(p_order + i_row * room + o_n, b_to, mask=m_n)
    b_page_id = tl.where(b_id >= 0, (i_row * room).to(tl.int32) + b_to, -1)
    tl.store(p_page_ids + i_row * room + o_n, b_page_id, mask=m_n)


def pack(ids, kv, block_table, held, order, packed, page_ids, *, enabled=None, counters=None, scratch=None):
    """As ``reference.pack``; ``held``, ``order``, ``packed`` and ``page_ids`` are contiguous."""
    batch, heads, room = ids.shape
    if not ids.numel():
        return
    require_dense_rows(ids=ids, kv=kv, block_table=block_table)
    for name, t in {"held": held, "order": order, "packed": packed, "page_ids": page_ids}.items():
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {t.stride()}")
    rows, tile = batch * heads, min(TILE, triton.next_power_of_2(room))
    if scratch is None:
        scratch = torch.empty(2 * ids.numel(), dtype=torch.int32, device=ids.device)
    position, free = scratch.view(2, rows, room)
    wide = max(16, triton.next_power_of_2(room))
    args = operand(Rows, ids), held, order, position, free, enabled, counters, room
    warps = 4 if wide <= 1024 else 8
    launch(pack_match_kernel, (rows,), ids, *args, HEADS=heads, STEPS=room.bit_length(), N=wide, num_warps=warps)
    launch(  # packed may be another GPU's, written over the link
        pack_copy_kernel,
        (rows, triton.cdiv(room, tile)),
        ids,
        operand(Rows, ids),
        operand(PagedKV, kv),
        operand(Table, block_table),
        held,
        order,
        packed,
        page_ids,
        position,
        free,
        enabled,
        room,
        BLOCK_SIZE=kv.shape[2],
        HEADS=heads,
        WIDTH=packed.shape[-1],
        BN=tile,
    )
