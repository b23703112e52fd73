"""Attention over chosen cached latents: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from .._overlap import release, wait
from .latent_rows import load_queries, load_rows, no_rows, store_part, take_rows


@triton.jit
def tokens_kernel(
    p_q,
    p_kv,
    p_slots,
    p_ids,
    p_frames,
    p_near,
    p_near_valid,
    p_acc,
    p_lse,
    p_count,
    p_from_host,
    n,
    near,
    scale,
    softcap,
    q_batch,
    q_head,
    q_dim,
    kv_slot,
    kv_head,
    kv_token,
    slots_batch,
    ids_batch,
    ids_head,
    frames_frame,
    frames_token,
    near_batch,
    near_head,
    near_token,
    near_valid_batch,
    from_host_batch,
    from_host_head,
    PLACED: tl.constexpr,
    COUNT_HOST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BH: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one part of the chosen tokens and the near buffer of one row and KV head, with ``BH`` of its heads.

    A part is every ``parts``-th tile.
    """
    wait(PDL)
    TILES: tl.constexpr = (GROUP + BH - 1) // BH
    i_row, i_first, i_part = tl.program_id(0) // TILES, tl.program_id(0) % TILES * BH, tl.program_id(1)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    p_query = p_q + i_batch * q_batch + i_head * GROUP * q_head
    b_qc, b_qr = load_queries(p_query, i_first, q_head, q_dim, NATIVE, False, GROUP, DK, DV, BH, BC, BR)
    b_max, b_sum, b_acc = no_rows(BH, BC)
    b_count, b_host = tl.zeros([BN], tl.int32), tl.zeros([BN], tl.int32)

    p_slots += i_batch * slots_batch
    p_ids += i_batch * ids_batch + i_head * ids_head
    p_kv += i_head * kv_head
    p_near += i_batch * near_batch + i_head * near_head
    p_near_valid += i_batch * near_valid_batch
    for i in tl.range(i_part * BN, n + near, tl.num_programs(1) * BN, num_stages=STAGES):
        o_n = i + tl.arange(0, BN)
        m_near = (o_n >= n) & (o_n < n + near)
        b_valid = tl.load(p_near_valid + o_n - n, mask=m_near, other=0)  # [BN]
        b_id = tl.load(p_ids + o_n, mask=o_n < n, other=-1)  # [BN]
        if PLACED:  # both towards minus infinity
            b_slot, b_in = b_id >> LOG_BLOCK, (b_id & (BLOCK_SIZE - 1)).to(tl.int64)
            m_n = b_slot != -1
            m_host = b_slot < -1
            p_row = p_kv + (-(b_slot + 2)).to(tl.int64) * kv_slot + b_in * kv_token
            p_frame = p_frames + b_slot.to(tl.int64) * frames_frame + b_in * frames_token
            p_row = tl.where(b_slot < 0, p_row, p_frame)
        else:
            b_in = (b_id % BLOCK_SIZE).to(tl.int64)
            b_slot = tl.load(p_slots + b_id // BLOCK_SIZE, mask=b_id >= 0, other=-1)  # [BN]
            m_n = b_slot >= 0
            m_host = m_n
            p_row = p_kv + b_slot.to(tl.int64) * kv_slot + b_in * kv_token  # [BN]
        if COUNT_HOST:
            b_host += m_host.to(tl.int32)
        p_row = tl.where(m_near, p_near + (o_n - n).to(tl.int64) * near_token, p_row)
        m_n = m_n | (b_valid != 0)
        b_count += m_n.to(tl.int32)
        b_c, b_r = load_rows(p_row, m_n, DK, DV, BC, BR)
        b_max, b_sum, b_acc = take_rows(b_qc, b_qr, b_max, b_sum, b_acc, b_c, b_r, m_n, scale, softcap, SOFTCAP, NATIVE)

    release(PDL)
    if COUNT_HOST:
        n_host = tl.sum(b_host, 0)
        p_host = p_from_host + i_batch * from_host_batch + i_head * from_host_head
        tl.atomic_add(p_host, n_host.to(tl.int64), mask=(n_host > 0) & (i_first == 0), sem="relaxed")
    i_out = i_row.to(tl.int64) * tl.num_programs(1) + i_part
    p_acc += i_out * GROUP * DV
    store_part(p_acc, p_lse + i_out * GROUP, i_first, b_max, b_sum, b_acc, GROUP, DV, BH, BC)
    tl.store(p_count + i_out, tl.sum(b_count, 0).to(tl.float32), mask=i_first == 0)
