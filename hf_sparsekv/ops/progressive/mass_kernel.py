"""Masses of the blocks of a round over latents: the kernel.

The attention within a block would be kept 512 wide for every query head until the walk has ended: with 20 heads 40 KB
for each block of 74 KB, with 128 heads 262 KB. So a round computes the masses alone, and the blocks that the walk has
used are attended to at its end: they are read twice, the second time from the L2 cache if it holds them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._overlap import release, wait
from .._paged import SELECTABLE
from ..sparse_decode.latents import load_queries, load_rows
from ..sparse_decode.split import base_2


@triton.jit
def mass_kernel(
    p_q,
    p_kv,
    p_flags,
    p_block_table,
    p_ids,
    p_pages,
    p_page_ids,
    p_near,
    p_near_valid,
    p_limits,
    p_lse,
    p_from_host,
    n,
    near,
    rows,
    parts,
    near_parts,
    scale,
    softcap,
    q_batch,
    q_head,
    q_dim,
    kv_slot,
    kv_head,
    kv_token,
    flags_slot,
    block_table_batch,
    ids_batch,
    ids_head,
    frames_frame,
    frames_token,
    places_batch,
    places_head,
    near_batch,
    near_head,
    near_token,
    near_valid_batch,
    from_host_batch,
    from_host_head,
    PLACED: tl.constexpr,
    COUNT_HOST: tl.constexpr,
    NATIVE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BH: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every ``num_programs``-th of the ``near_parts`` parts of near buffers and of the blocks that the limits name.

    ``BH`` of the query heads of a group.
    """
    wait(PDL)
    i_first = tl.program_id(1) * BH
    o_w, o_n, o_h = tl.arange(0, BW), tl.arange(0, BN), i_first + tl.arange(0, BH)
    b_low = tl.load(p_limits + o_w, mask=o_w < rows, other=0)  # [BW]
    b_high = tl.minimum(tl.load(p_limits + rows + o_w, mask=o_w < rows, other=0), n)  # [BW]
    b_size = tl.maximum(b_high - b_low, 0)
    b_end = tl.cumsum(b_size, 0)  # [BW]: blocks of the rows up to this one
    for i in tl.range(tl.program_id(0), near_parts + tl.sum(b_size, 0), tl.num_programs(0), num_stages=1):
        is_near = i < near_parts
        i_block = i - near_parts
        i_row = tl.where(is_near, i // parts, tl.sum((b_end <= i_block).to(tl.int32), 0))
        rank = i_block + tl.sum(tl.where(o_w == i_row, b_low - b_end + b_size, 0), 0)
        i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
        block = tl.load(p_ids + i_batch * ids_batch + i_head * ids_head + rank, mask=i_block >= 0, other=-1)
        physical_id = tl.load(p_block_table + i_batch * block_table_batch + block, mask=block >= 0, other=-1).to(
            tl.int64
        )
        there = physical_id >= 0
        p_rows = p_kv + physical_id * kv_slot + i_head * kv_head
        step, in_kv = kv_token, there
        if PLACED:
            p_place = p_page_ids + i_batch * places_batch + i_head * places_head + rank
            place = tl.load(p_place, mask=i_block >= 0, other=-1)
            there = there & (place != -1)
            in_kv = there & (place < 0)
            p_host = p_kv + (-(place + 2)).to(tl.int64) * kv_slot + i_head * kv_head
            p_rows = tl.where(place < 0, p_host, p_pages + place.to(tl.int64) * frames_frame)
            step = tl.where(place < 0, step, frames_token)
        first = tl.where(is_near, i % parts * BLOCK_SIZE, 0)
        p_part = p_near + i_batch * near_batch + i_head * near_head + first.to(tl.int64) * near_token
        p_rows = tl.where(is_near, p_part, p_rows)
        step = STEP if STEP else tl.where(is_near, near_token, step)
        p_mark = tl.where(
            is_near, p_near_valid + i_batch * near_valid_batch + first, p_flags + physical_id * flags_slot
        )

        p_query = p_q + i_batch * q_batch + i_head * GROUP * q_head
        o_c, o_r = tl.arange(0, BC)[:, None], tl.arange(0, BR)[:, None]
        b_qc, b_qr = load_queries(p_query, q_head, q_dim, o_h[None, :], o_c, o_r, NATIVE, GROUP, DK, DV)
        b_max = tl.full([BH], float("-inf"), tl.float32)
        b_sum = tl.zeros([BH], tl.float32)
        b_count = tl.zeros([BN], tl.int32)
        for j in range(0, BLOCK_SIZE, BN):
            m_n = there | (is_near & (first + j + o_n < near))
            b_mark = tl.load(p_mark + j + o_n, mask=m_n, other=0)  # [BN]
            m_n = b_mark == SELECTABLE  # valid entries of the recent buffer are 1, too
            b_count += m_n.to(tl.int32)
            p_row = p_rows + (j + o_n) * step  # [BN]
            b_c, b_r = load_rows(p_row, m_n, DK, DV, BC, BR)
            b_s = tl.dot(b_c.to(b_qc.dtype), b_qc, input_precision="ieee")  # [BN, BH]
            b_s = base_2(tl.dot(b_r.to(b_qr.dtype), b_qr, b_s, input_precision="ieee"), scale, softcap)
            b_s = tl.where(m_n[:, None], b_s, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_s, 0))  # [BH]
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_sum = b_sum * tl.exp2(b_max - b_base) + tl.sum(tl.exp2(b_s - b_base[None, :]), 0)
            b_max = b_new
        b_any = b_sum > 0
        b_lse = tl.where(b_any, b_max + tl.log2(tl.where(b_any, b_sum, 1.0)), float("-inf"))
        i_part = tl.where(is_near, i % parts, parts + rank)
        i_out = i_row.to(tl.int64) * (parts + n) + i_part
        tl.store(p_lse + i_out * GROUP + o_h, b_lse, mask=o_h < GROUP)
        if COUNT_HOST:
            n_host = tl.where(in_kv, tl.sum(b_count, 0), 0)
            p_host_count = p_from_host + i_batch * from_host_batch + i_head * from_host_head
            tl.atomic_add(p_host_count, n_host.to(tl.int64), mask=(n_host > 0) & (i_first == 0), sem="relaxed")
    release(PDL)
