"""Exact attention of one query per row over chosen cached tokens: the kernel.

The tokens of a row and KV head are split over several programs (first the chosen part of the stored blocks,
then the near buffer), each of which keeps a running softmax for the whole group of query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._overlap import release, wait
from .merge import LOG2E
from .reference import SELECTABLE as _SELECTABLE
from .reference import VALID as _VALID

SELECTABLE = tl.constexpr(_SELECTABLE)
VALID = tl.constexpr(_VALID)


@triton.jit
def take_tile(
    b_q,
    b_max,
    b_sum,
    b_acc,
    p_k,
    m_n,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Take a tile of tokens into the running softmax: those that ``m_n`` marks, keys at ``p_k [BN]``."""
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    # What is not attended may hold anything, NaN included, and is not read.
    b_k = tl.load(p_k[:, None] + o_k[None, :], mask=m_n[:, None] & (o_k < DK)[None, :], other=0.0)  # [BN, BK]
    b_v = tl.load(p_k[:, None] + DK + o_v[None, :], mask=m_n[:, None] & (o_v < DV)[None, :], other=0.0)  # [BN, BV]
    if not NATIVE:
        b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BG, BN]
    if SOFTCAP:
        b_s = b_s * (scale / softcap)
        b_s = softcap * (2.0 * tl.sigmoid(2.0 * b_s) - 1.0)  # tanh
        b_s = b_s * LOG2E
    else:
        b_s = b_s * (scale * LOG2E)
    b_s = tl.where(m_n[None, :], b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1))  # [BG]
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # nothing attended yet: -inf - -inf is no number
    b_p = tl.exp2(b_s - b_base[:, None])  # [BG, BN]
    b_keep = tl.exp2(b_max - b_base)  # [BG]
    b_sum = b_sum * b_keep + tl.sum(b_p, 1)
    b_acc = b_acc * b_keep[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")  # [BG, BV]
    return b_new, b_sum, b_acc


@triton.jit
def split_kernel(
    p_q,
    p_kv,
    p_flags,
    p_slots,
    p_ids,
    p_frames,
    p_places,
    p_near,
    p_near_valid,
    p_acc,
    p_lse,
    p_count,
    p_from_host,
    n,
    near,
    skip,
    splits,
    per_split,
    scale,
    softcap,
    q_batch,
    q_head,
    q_dim,
    kv_slot,
    kv_head,
    kv_token,
    flags_slot,
    slots_batch,
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
    GRANULARITY: tl.constexpr,
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
    BG: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one part of the tokens of one row and KV head."""
    wait(PDL)
    i_row, i_part = tl.program_id(0), tl.program_id(1)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    o_g, o_k, o_v = tl.arange(0, BG), tl.arange(0, BK), tl.arange(0, BV)
    m_g = o_g < GROUP
    p_row = p_q + i_batch * q_batch + (i_head * GROUP + o_g[:, None]) * q_head
    b_q = tl.load(p_row + o_k[None, :] * q_dim, mask=m_g[:, None] & (o_k < DK)[None, :], other=0.0)  # [BG, BK]
    if not NATIVE:
        b_q = b_q.to(tl.float32)
    b_max = tl.full([BG], float("-inf"), tl.float32)
    b_sum = tl.zeros([BG], tl.float32)
    b_acc = tl.zeros([BG, BV], tl.float32)
    b_count = tl.zeros([BN], tl.int32)
    b_host = tl.zeros([BN], tl.int32)

    if i_part < splits:
        first = i_part * per_split
        end = tl.minimum(first + per_split, n)
        for i in tl.range(first, end, BN, num_stages=STAGES):
            # Position -> block of the row and place in it -> slot.
            o_n = i + tl.arange(0, BN)
            m_n = o_n < end
            b_block, o_in = o_n // BLOCK_SIZE, o_n % BLOCK_SIZE
            if GRANULARITY == "token":
                p_id = p_ids + i_batch * ids_batch + i_head * ids_head + o_n
                b_id = tl.load(p_id, mask=m_n, other=-1)  # [BN]
                if PLACED:  # both towards minus infinity
                    b_place, o_in = b_id >> LOG_BLOCK, b_id & (BLOCK_SIZE - 1)
                else:
                    m_n = m_n & (b_id >= 0)
                    b_block, o_in = b_id // BLOCK_SIZE, b_id % BLOCK_SIZE
            elif GRANULARITY == "block":
                p_id = p_ids + i_batch * ids_batch + i_head * ids_head + b_block
                if PLACED:
                    p_place = p_places + i_batch * places_batch + i_head * places_head + b_block
                    b_place = tl.load(p_place, mask=m_n, other=-1)  # [BN]
                b_block = tl.load(p_id, mask=m_n, other=-1)  # [BN]
                m_n = m_n & (b_block >= 0)
            if not PLACED or GRANULARITY == "block":
                b_slot = tl.load(p_slots + i_batch * slots_batch + b_block, mask=m_n, other=-1).to(tl.int64)  # [BN]
                m_n = m_n & (b_slot >= 0)
            if GRANULARITY != "token":
                b_flag = tl.load(p_flags + b_slot * flags_slot + o_in, mask=m_n, other=0)  # [BN]
                if GRANULARITY == "block":
                    m_n = m_n & (b_flag == SELECTABLE)
                else:
                    m_n = m_n & ((b_flag & VALID) > 0)
            if PLACED:
                m_n = m_n & (b_place != -1)
                p_host = p_kv + (-(b_place + 2)).to(tl.int64) * kv_slot + i_head * kv_head
                p_frame = p_frames + b_place.to(tl.int64) * frames_frame
                o_token = o_in.to(tl.int64) * tl.where(b_place < 0, kv_token, frames_token)
                p_k = tl.where(b_place < 0, p_host, p_frame) + o_token  # [BN]
                if COUNT_HOST:
                    b_host += (m_n & (b_place < 0)).to(tl.int32)
            else:
                if COUNT_HOST:
                    b_host += m_n.to(tl.int32)
                p_k = p_kv + b_slot * kv_slot + i_head * kv_head + o_in.to(tl.int64) * kv_token  # [BN]
            b_count += m_n.to(tl.int32)
            b_max, b_sum, b_acc = take_tile(
                b_q, b_max, b_sum, b_acc, p_k, m_n, scale, softcap, SOFTCAP, NATIVE, DK, DV, BK, BV
            )
    else:
        first = skip + (i_part - splits) * per_split
        end = tl.minimum(first + per_split, near)
        for i in tl.range(first, end, BN, num_stages=STAGES):
            o_n = i + tl.arange(0, BN)
            m_n = o_n < end
            b_valid = tl.load(p_near_valid + i_batch * near_valid_batch + o_n, mask=m_n, other=0)  # [BN]
            m_n = m_n & (b_valid != 0)
            p_k = p_near + i_batch * near_batch + i_head * near_head + o_n.to(tl.int64) * near_token  # [BN]
            b_count += m_n.to(tl.int32)
            b_max, b_sum, b_acc = take_tile(
                b_q, b_max, b_sum, b_acc, p_k, m_n, scale, softcap, SOFTCAP, NATIVE, DK, DV, BK, BV
            )

    release(PDL)
    if COUNT_HOST:
        n_host = tl.sum(b_host, 0)
        p_host = p_from_host + i_batch * from_host_batch + i_head * from_host_head
        tl.atomic_add(p_host, n_host.to(tl.int64), mask=n_host > 0, sem="relaxed")
    # A part without tokens is stored as zeros of no weight.
    b_any = b_sum > 0
    b_lse = tl.where(b_any, b_max + tl.log2(tl.where(b_any, b_sum, 1.0)), float("-inf"))
    b_acc = b_acc / tl.where(b_any, b_sum, 1.0)[:, None]
    i_out = i_row.to(tl.int64) * tl.num_programs(1) + i_part
    o_out = i_out * GROUP + o_g
    tl.store(p_lse + o_out, b_lse, mask=m_g)
    tl.store(p_acc + o_out[:, None] * DV + o_v[None, :], b_acc, mask=m_g[:, None] & (o_v < DV)[None, :])
    tl.store(p_count + i_out, tl.sum(b_count, 0).to(tl.float32))
