"""Attention of one query per row over cached tokens, split over programs: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from .merge import LOG2E, merge_heads
from .reference import SELECTABLE as _SELECTABLE
from .reference import VALID as _VALID

SELECTABLE = tl.constexpr(_SELECTABLE)
VALID = tl.constexpr(_VALID)


@triton.jit
def _attend(
    b_q,
    b_max,
    b_sum,
    b_acc,
    p_k,
    m_read,
    m_use,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Take a tile of tokens into the running softmax: those that ``m_use`` marks, keys at ``p_k [BN]``.

    Keys are there where ``m_read`` is set. To read all of them does not wait for the flags; the logits of those that
    are not used, which may be anything, are replaced. Their values, NaN perhaps, are not read.
    """
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_k = tl.load(p_k[:, None] + o_k[None, :], mask=m_read[:, None] & (o_k < DK)[None, :], other=0.0)  # [BN, BK]
    b_v = tl.load(p_k[:, None] + DK + o_v[None, :], mask=m_use[:, None] & (o_v < DV)[None, :], other=0.0)  # [BN, BV]
    if not NATIVE:
        b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BG, BN]
    if SOFTCAP:
        b_s = b_s * (scale / softcap)
        b_s = softcap * (2.0 * tl.sigmoid(2.0 * b_s) - 1.0)  # tanh
        b_s = b_s * LOG2E
    else:
        b_s = b_s * (scale * LOG2E)
    b_s = tl.where(m_use[None, :], b_s, float("-inf"))
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
    p_near,
    p_near_valid,
    p_acc,
    p_lse,
    p_count,
    p_done,
    p_sink,
    p_attended,
    p_out,
    n,
    near,
    skip,
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
    near_batch,
    near_head,
    near_token,
    near_valid_batch,
    attended_batch,
    attended_head,
    out_batch,
    out_head,
    GRANULARITY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
    MERGE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_ATTENDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BG: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
):
    """Attend to one part of the ``n`` stored and ``near`` recent tokens of one row and KV head."""
    i_row, i_part = tl.program_id(0), tl.program_id(1)
    parts = tl.num_programs(1)
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

    begin = i_part * per_split
    end = tl.minimum(begin + per_split, n + near)
    for i in range(begin, end, BN):
        o_n = i + tl.arange(0, BN)
        m_stored, m_near = (o_n < n) & (o_n < end), (o_n >= n) & (o_n < end)
        # Position -> block of the row and place in it -> slot.
        b_block, o_in = o_n // BLOCK_SIZE, o_n % BLOCK_SIZE
        if GRANULARITY == "token":
            p_id = p_ids + i_batch * ids_batch + i_head * ids_head + o_n
            b_id = tl.load(p_id, mask=m_stored, other=-1)  # [BN]
            m_stored = m_stored & (b_id >= 0)
            b_block, o_in = b_id // BLOCK_SIZE, b_id % BLOCK_SIZE
        elif GRANULARITY == "block":
            p_id = p_ids + i_batch * ids_batch + i_head * ids_head + b_block
            b_block = tl.load(p_id, mask=m_stored, other=-1)  # [BN]
            m_stored = m_stored & (b_block >= 0)
        b_slot = tl.load(p_slots + i_batch * slots_batch + b_block, mask=m_stored, other=-1).to(tl.int64)  # [BN]
        m_stored = m_stored & (b_slot >= 0)
        m_use = m_stored
        if GRANULARITY != "token":
            b_flag = tl.load(p_flags + b_slot * flags_slot + o_in, mask=m_stored, other=0)  # [BN]
            if GRANULARITY == "block":
                m_use = b_flag == SELECTABLE
            else:
                m_use = (b_flag & VALID) > 0
        o_near = o_n - n + skip
        b_valid = tl.load(p_near_valid + i_batch * near_valid_batch + o_near, mask=m_near, other=0)  # [BN]
        m_use = m_use | (b_valid != 0)
        p_stored = p_kv + b_slot * kv_slot + i_head * kv_head + o_in.to(tl.int64) * kv_token
        p_recent = p_near + i_batch * near_batch + i_head * near_head + o_near.to(tl.int64) * near_token
        p_k = tl.where(m_near, p_recent, p_stored)  # [BN]
        b_count += m_use.to(tl.int32)
        b_max, b_sum, b_acc = _attend(
            b_q, b_max, b_sum, b_acc, p_k, m_stored | m_near, m_use, scale, softcap, SOFTCAP, NATIVE, DK, DV, BK, BV
        )

    # A part without tokens is stored as zeros of no weight.
    b_any = b_sum > 0
    b_lse = tl.where(b_any, b_max + tl.log2(tl.where(b_any, b_sum, 1.0)), float("-inf"))
    b_acc = b_acc / tl.where(b_any, b_sum, 1.0)[:, None]
    i_out = i_row.to(tl.int64) * parts + i_part
    o_out = i_out * GROUP + o_g
    tl.store(p_lse + o_out, b_lse, mask=m_g)
    tl.store(p_acc + o_out[:, None] * DV + o_v[None, :], b_acc, mask=m_g[:, None] & (o_v < DV)[None, :])
    tl.store(p_count + i_out, tl.sum(b_count, 0).to(tl.float32))
    if MERGE:
        # All of this program's stores come before its arrival, and all parts' stores before the last arrival.
        tl.debug_barrier()
        if tl.atomic_add(p_done + i_row, 1, sem="acq_rel") == parts - 1:
            tl.store(p_done + i_row, 0)  # for the next launch
            merge_heads(
                p_acc,
                p_lse,
                p_count,
                p_sink,
                p_attended,
                p_out,
                i_row,
                0,
                parts,
                attended_batch,
                attended_head,
                out_batch,
                out_head,
                HAS_SINK,
                HAS_ATTENDED,
                HEADS,
                GROUP,
                DV,
                BM,
                BV,
                BS,
            )
