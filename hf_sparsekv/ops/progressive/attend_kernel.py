"""Attention within each block of a round: the kernel.

A fixed number of programs share the blocks of all rows and KV heads, however these are spread: program ``p`` takes
every ``programs``-th block of a list that nobody writes down; a prefix sum over the rows' numbers of blocks tells whose
the i-th block is. So a flat head, which reads a thousand blocks, has all processors to itself while peaked ones are
done, and a round that nobody needs ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._overlap import release, wait
from .._paged import SELECTABLE
from ..sparse_decode.split import take_tile


@triton.jit
def _load_q(
    p_q,
    i_batch,
    i_head,
    q_batch,
    q_head,
    q_dim,
    NATIVE: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
):
    """Queries of a KV head ``[BG, BK]``."""
    o_g, o_k = tl.arange(0, BG), tl.arange(0, BK)
    p_row = p_q + i_batch * q_batch + (i_head * GROUP + o_g[:, None]) * q_head
    b_q = tl.load(p_row + o_k[None, :] * q_dim, mask=(o_g < GROUP)[:, None] & (o_k < DK)[None, :], other=0.0)
    if not NATIVE:
        b_q = b_q.to(tl.float32)
    return b_q


@triton.jit
def _store(
    p_acc,
    p_lse,
    i_out,
    b_max,
    b_sum,
    b_acc,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BG: tl.constexpr,
    BV: tl.constexpr,
):
    """The attention within one part; zeros of no weight if it is empty."""
    o_g, o_v = tl.arange(0, BG), tl.arange(0, BV)
    b_any = b_sum > 0
    b_lse = tl.where(b_any, b_max + tl.log2(tl.where(b_any, b_sum, 1.0)), float("-inf"))
    b_acc = b_acc / tl.where(b_any, b_sum, 1.0)[:, None]
    o_out = i_out * GROUP + o_g
    tl.store(p_lse + o_out, b_lse, mask=o_g < GROUP)
    tl.store(p_acc + o_out[:, None] * DV + o_v[None, :], b_acc, mask=(o_g < GROUP)[:, None] & (o_v < DV)[None, :])


@triton.jit
def _near(
    p_q,
    p_near,
    p_near_valid,
    p_acc,
    p_lse,
    i_program,
    n,
    near,
    parts,
    scale,
    softcap,
    q_batch,
    q_head,
    q_dim,
    near_batch,
    near_head,
    near_token,
    near_valid_batch,
    NATIVE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
):
    """One part of a row's recent buffer."""
    i_row, i_part = i_program // parts, i_program % parts
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    b_q = _load_q(p_q, i_batch, i_head, q_batch, q_head, q_dim, NATIVE, GROUP, DK, BG, BK)
    b_max = tl.full([BG], float("-inf"), tl.float32)
    b_sum = tl.zeros([BG], tl.float32)
    b_acc = tl.zeros([BG, BV], tl.float32)
    for i in range(0, BLOCK_SIZE, BN):
        o_n = i_part * BLOCK_SIZE + i + tl.arange(0, BN)
        b_valid = tl.load(p_near_valid + i_batch * near_valid_batch + o_n, mask=o_n < near, other=0)  # [BN]
        p_k = p_near + i_batch * near_batch + i_head * near_head + o_n.to(tl.int64) * near_token  # [BN]
        b_max, b_sum, b_acc = take_tile(b_q, b_max, b_sum, b_acc, p_k, b_valid != 0, scale, softcap, DK, DV, BK, BV)
    i_out = i_row.to(tl.int64) * (parts + n) + i_part
    _store(p_acc, p_lse, i_out, b_max, b_sum, b_acc, GROUP, DV, BG, BV)


@triton.jit
def _blocks(
    p_q,
    p_kv,
    p_flags,
    p_block_table,
    p_ids,
    p_pages,
    p_page_ids,
    p_limits,
    p_acc,
    p_lse,
    p_from_host,
    i_program,
    programs,
    n,
    rows,
    parts,
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
    from_host_batch,
    from_host_head,
    PLACED: tl.constexpr,
    COUNT_HOST: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """Every ``programs``-th block of those that the limits name."""
    o_r = tl.arange(0, BR)
    b_low = tl.load(p_limits + o_r, mask=o_r < rows, other=0)  # [BR]
    b_high = tl.minimum(tl.load(p_limits + rows + o_r, mask=o_r < rows, other=0), n)  # [BR]
    b_size = tl.maximum(b_high - b_low, 0)
    b_end = tl.cumsum(b_size, 0)  # [BR]: blocks of the rows up to this one
    total = tl.sum(b_size, 0)
    for i in range(i_program, total, programs):
        i_row = tl.sum((b_end <= i).to(tl.int32), 0)
        rank = i + tl.sum(tl.where(o_r == i_row, b_low - b_end + b_size, 0), 0)
        i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
        block = tl.load(p_ids + i_batch * ids_batch + i_head * ids_head + rank)
        physical_id = tl.load(p_block_table + i_batch * block_table_batch + block, mask=block >= 0, other=-1).to(
            tl.int64
        )
        there = physical_id >= 0
        place = -1
        if PLACED:
            place = tl.load(p_page_ids + i_batch * places_batch + i_head * places_head + rank)
            there = there & (place != -1)
        b_q = _load_q(p_q, i_batch, i_head, q_batch, q_head, q_dim, NATIVE, GROUP, DK, BG, BK)
        b_max = tl.full([BG], float("-inf"), tl.float32)
        b_sum = tl.zeros([BG], tl.float32)
        b_acc = tl.zeros([BG, BV], tl.float32)
        b_count = tl.zeros([BN], tl.int32)
        for j in range(0, BLOCK_SIZE, BN):
            o_in = j + tl.arange(0, BN)
            m_n = (o_in >= 0) & there
            b_flag = tl.load(p_flags + physical_id * flags_slot + o_in, mask=m_n, other=0)  # [BN]
            m_n = m_n & (b_flag == SELECTABLE)
            if PLACED:
                p_host = p_kv + (-(place + 2)).to(tl.int64) * kv_slot + i_head * kv_head + o_in.to(tl.int64) * kv_token
                p_page = p_pages + place.to(tl.int64) * frames_frame + o_in.to(tl.int64) * frames_token
                p_k = tl.where(place + o_in * 0 < 0, p_host, p_page)  # [BN]
            else:
                p_k = p_kv + physical_id * kv_slot + i_head * kv_head + o_in.to(tl.int64) * kv_token  # [BN]
            b_count += m_n.to(tl.int32)
            b_max, b_sum, b_acc = take_tile(b_q, b_max, b_sum, b_acc, p_k, m_n, scale, softcap, DK, DV, BK, BV)
        i_out = i_row.to(tl.int64) * (parts + n) + parts + rank
        _store(p_acc, p_lse, i_out, b_max, b_sum, b_acc, GROUP, DV, BG, BV)
        if COUNT_HOST:
            n_host = tl.sum(b_count, 0)
            if PLACED:
                n_host = tl.where(place < 0, n_host, 0)
            p_host_count = p_from_host + i_batch * from_host_batch + i_head * from_host_head
            tl.atomic_add(p_host_count, n_host.to(tl.int64), mask=n_host > 0, sem="relaxed")


@triton.jit
def attend_kernel(
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
    p_acc,
    p_lse,
    p_from_host,
    n,
    near,
    rows,
    parts,
    near_programs,
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
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first ``near_programs`` programs take the near buffers, the others the blocks."""
    wait(PDL)
    i_program = tl.program_id(0)
    if i_program < near_programs:
        _near(
            p_q,
            p_near,
            p_near_valid,
            p_acc,
            p_lse,
            i_program,
            n,
            near,
            parts,
            scale,
            softcap,
            q_batch,
            q_head,
            q_dim,
            near_batch,
            near_head,
            near_token,
            near_valid_batch,
            NATIVE,
            BLOCK_SIZE,
            HEADS,
            GROUP,
            DK,
            DV,
            BG,
            BK,
            BV,
            BN,
        )
    else:
        _blocks(
            p_q,
            p_kv,
            p_flags,
            p_block_table,
            p_ids,
            p_pages,
            p_page_ids,
            p_limits,
            p_acc,
            p_lse,
            p_from_host,
            i_program - near_programs,
            tl.num_programs(0) - near_programs,
            n,
            rows,
            parts,
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
            from_host_batch,
            from_host_head,
            PLACED,
            COUNT_HOST,
            NATIVE,
            BLOCK_SIZE,
            HEADS,
            GROUP,
            DK,
            DV,
            BG,
            BK,
            BV,
            BN,
            BR,
        )
    release(PDL)
