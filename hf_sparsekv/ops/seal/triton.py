"""Move the oldest full block of the ring into a slot: the kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import require_dense_rows
from .._overlap import begin, overlap
from .reference import MOST_HALF as _MOST_HALF
from .reference import Index

TILE = 16  # tokens at once
WIDE = 256  # channels of a key above which a program takes half as many tokens, with twice the warps
MOST_HALF = tl.constexpr(_MOST_HALF)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds a small float32 to an integer, half to even


@triton.jit
def _most(a, b):
    """The larger one, or NaN: a maximum would leave it out."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _marks(p_valid, o_t, size, seen, sinks, B: tl.constexpr):
    """Rank among the row's valid tokens, and flag, of the tokens ``o_t`` of a block, its validity at ``p_valid``."""
    o_all = tl.arange(0, B)
    b_all = tl.load(p_valid + o_all, mask=o_all < size, other=0) != 0  # [B]
    before = tl.sum((b_all[None, :] & (o_all[None, :] < o_t[:, None])).to(tl.int32), 1)
    b_valid = tl.load(p_valid + o_t) != 0
    b_rank = seen + before
    return b_rank, tl.where(b_valid, tl.where(b_rank < sinks, 3, 1), 0)


@triton.jit
def _seal_kernel(
    p_near,
    p_near_valid,
    p_seen,
    p_slots,
    p_kv,
    p_flags,
    p_fill,
    p_bounds,
    p_part_fill,
    p_channels,
    p_codes,
    p_qparams,
    at,
    sinks,
    near_batch,
    near_head,
    near_token,
    near_valid_batch,
    kv_slot,
    kv_head,
    kv_token,
    flags_slot,
    bounds_slot,
    bounds_part,
    bounds_head,
    bounds_side,
    part_fill_slot,
    channels_batch,
    channels_head,
    codes_slot,
    codes_head,
    codes_token,
    qparams_slot,
    qparams_head,
    qparams_token,
    limit,
    KEEPS: tl.constexpr,
    METADATA: tl.constexpr,
    HAS_PART_FILL: tl.constexpr,
    HAS_CODES: tl.constexpr,
    PACKED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and KV head."""
    begin(PDL)
    i_row = tl.program_id(0)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    slot = tl.load(p_slots + i_batch).to(tl.int64)
    seen = tl.load(p_seen + i_batch)
    o_k, o_v, o_r = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BR)
    m_k, m_v, m_r = o_k < DK, o_v < DV, o_r < R
    p_row = p_near + i_batch * near_batch + i_head * near_head
    p_valid = p_near_valid + i_batch * near_valid_batch + at
    p_to = p_kv + slot * kv_slot + i_head * kv_head
    if HAS_CODES:
        p_channel = p_channels + i_batch * channels_batch + i_head * channels_head
        b_channel = tl.load(p_channel + o_r, mask=m_r, other=0)  # [BR]
        if PACKED:
            b_channel_2 = tl.load(p_channel + R + o_r, mask=m_r, other=0)  # [BR]
    filled = 0
    for i_part in range(PARTS):
        b_max = tl.full([BK], -1.0, tl.float32) * limit
        b_min = tl.full([BK], 1.0, tl.float32) * limit
        b_sum = tl.zeros([BK], tl.float32)
        part_filled = 0
        for i in range(BLOCK_SIZE // PARTS // BT):
            o_t = i_part * (BLOCK_SIZE // PARTS) + i * BT + tl.arange(0, BT)
            b_rank, b_flag = _marks(p_valid, o_t, BLOCK_SIZE, seen, sinks, BLOCK_SIZE)
            b_usable = b_flag == 1
            p_from = p_row + (at + o_t)[:, None].to(tl.int64) * near_token
            b_k = tl.load(p_from + o_k[None, :], mask=m_k[None, :], other=0.0)  # [BT, BK]
            b_v = tl.load(p_from + DK + o_v[None, :], mask=m_v[None, :], other=0.0)  # [BT, BV]
            if KEEPS:
                tl.store(p_to + o_t[:, None] * kv_token + o_k[None, :], b_k, mask=m_k[None, :])
                tl.store(p_to + o_t[:, None] * kv_token + DK + o_v[None, :], b_v, mask=m_v[None, :])
            m_sink = (b_flag == 3)[:, None]
            p_sink = p_row + b_rank[:, None].to(tl.int64) * near_token
            tl.store(p_sink + o_k[None, :], b_k, mask=m_sink & m_k[None, :])
            tl.store(p_sink + DK + o_v[None, :], b_v, mask=m_sink & m_v[None, :])
            if METADATA != "none":
                b_k = b_k.to(tl.float32)
                b_sum += tl.sum(tl.where(b_usable[:, None], b_k, 0.0), 0)
                b_max = _most(b_max, tl.reduce(tl.where(b_usable[:, None], b_k, -limit), 0, _most))
                b_min = _least(b_min, tl.reduce(tl.where(b_usable[:, None], b_k, limit), 0, _least))
            if HAS_CODES:
                b_x = tl.load(p_from + b_channel[None, :], mask=m_r[None, :], other=0.0)  # [BT, BR]
                p_code = p_codes + slot * codes_slot + i_head * codes_head + o_t[:, None] * codes_token
                if PACKED:
                    b_x = _least(_most(b_x.to(tl.float32), -MOST_HALF), MOST_HALF)
                    b_y = tl.load(p_from + b_channel_2[None, :], mask=m_r[None, :], other=0.0).to(tl.float32)
                    b_y = _least(_most(b_y, -MOST_HALF), MOST_HALF)
                    b_low = tl.where(m_r[None, :], _least(b_x, b_y), float("inf"))  # [BT, BR]
                    b_low = tl.reduce(b_low, 1, _least)  # [BT]
                    b_high = tl.where(m_r[None, :], _most(b_x, b_y), float("-inf"))
                    b_high = tl.reduce(b_high, 1, _most)
                    b_scale, b_zero = ((b_high - b_low) / 15.0).to(tl.float16), b_low.to(tl.float16)
                    b_step = b_scale.to(tl.float32)
                    b_step = tl.where(b_step == 0.0, 1.0, b_step)[:, None]
                    b_x = tl.math.div_rn(b_x - b_zero.to(tl.float32)[:, None], b_step + tl.zeros_like(b_x))
                    b_y = tl.math.div_rn(b_y - b_zero.to(tl.float32)[:, None], b_step + tl.zeros_like(b_y))
                    b_x = tl.minimum(tl.maximum((b_x + ROUND) - ROUND, 0.0), 15.0).to(tl.int32)
                    b_y = tl.minimum(tl.maximum((b_y + ROUND) - ROUND, 0.0), 15.0).to(tl.int32)
                    tl.store(p_code + o_r[None, :], (b_x | (b_y << 4)).to(tl.uint8), mask=m_r[None, :])
                    p_param = p_qparams + slot * qparams_slot + i_head * qparams_head + o_t * qparams_token
                    tl.store(p_param, b_scale)
                    tl.store(p_param + 1, b_zero)
                else:
                    tl.store(p_code + o_r[None, :], b_x, mask=m_r[None, :])
            # What belongs to the row is written by its first head's program.
            tl.store(p_flags + slot * flags_slot + o_t, b_flag.to(tl.uint8), mask=i_head == 0)
            part_filled += tl.sum(b_usable.to(tl.int32), 0)
        if METADATA != "none":
            p_bound = p_bounds + slot * bounds_slot + i_part * bounds_part + i_head * bounds_head + o_k
            count = tl.maximum(part_filled, 1).to(tl.float32)
            b_first, b_second = b_max, b_min
            if METADATA == "mean":
                b_first = b_sum / count
            elif METADATA == "cuboid_mean":
                b_first = (b_max + b_min) / 2  # largest and least are of opposite sign where no key is usable
                b_second = tl.zeros([BK], tl.float32)
                for i in range(BLOCK_SIZE // PARTS // BT):  # the keys again, from the cache
                    o_t = i_part * (BLOCK_SIZE // PARTS) + i * BT + tl.arange(0, BT)
                    b_rank, b_flag = _marks(p_valid, o_t, BLOCK_SIZE, seen, sinks, BLOCK_SIZE)
                    p_from = p_row + (at + o_t)[:, None].to(tl.int64) * near_token
                    b_k = tl.load(p_from + o_k[None, :], mask=m_k[None, :], other=0.0).to(tl.float32)  # [BT, BK]
                    b_off = tl.where((b_flag == 1)[:, None], tl.abs(b_k - b_first[None, :]), 0.0)
                    b_second += tl.sum(b_off, 0)
                b_second = b_second / count
            tl.store(p_bound, b_first.to(p_bounds.dtype.element_ty), mask=m_k)
            if METADATA != "mean":
                tl.store(p_bound + bounds_side, b_second.to(p_bounds.dtype.element_ty), mask=m_k)
        if HAS_PART_FILL:
            tl.store(p_part_fill + slot * part_fill_slot + i_part, part_filled, mask=i_head == 0)
        filled += part_filled
    tl.store(p_fill + slot, filled, mask=i_head == 0)


@triton.jit
def _finish_kernel(
    p_near_valid,
    p_seen,
    at,
    sinks,
    near_valid_batch,
    BLOCK_SIZE: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What all heads' programs have read changes after them: validity and the number of tokens seen, of one row."""
    begin(PDL)
    i_batch = tl.program_id(0).to(tl.int64)
    p_row = p_near_valid + i_batch * near_valid_batch
    o_t, o_s = tl.arange(0, BLOCK_SIZE), tl.arange(0, BS)
    count = tl.sum((tl.load(p_row + at + o_t) != 0).to(tl.int32), 0)
    seen = tl.load(p_seen + i_batch)
    tl.store(p_row + o_s, tl.full([BS], 1, tl.uint8), mask=(o_s < sinks) & (o_s >= seen) & (o_s < seen + count))
    tl.store(p_row + at + o_t, tl.zeros([BLOCK_SIZE], tl.uint8))
    tl.store(p_seen + i_batch, seen + count)


def seal(
    near_kv: Tensor,
    near_valid: Tensor,
    at: int,
    sinks: int,
    seen: Tensor,
    slots: Tensor,
    kv: Tensor,
    flags: Tensor,
    fill: Tensor,
    index: Index,
) -> None:
    """As ``reference.seal``."""
    batch, heads = near_kv.shape[:2]
    size, dk = kv.shape[2], index.key_dim
    dv = near_kv.shape[3] - dk
    require_dense_rows(near_kv=near_kv, near_valid=near_valid, kv=kv, flags=flags, bounds=index.bounds)
    require_dense_rows(part_fill=index.part_fill, channels=index.channels, codes=index.codes, qparams=index.qparams)
    near_valid = near_valid.view(torch.uint8)  # a bool is one bit to Triton
    parts = 1 if index.bounds is None else index.bounds.shape[1]
    packed = index.qparams is not None
    width = 0 if index.codes is None else index.codes.shape[-1]
    near = (near_valid, seen, at, sinks, near_valid.stride(0))
    with torch.cuda.device_of(near_kv):
        _seal_kernel[(batch * heads,)](
            near_kv,
            near_valid,
            seen,
            slots,
            kv,
            flags,
            fill,
            index.bounds,
            index.part_fill,
            index.channels,
            index.codes,
            index.qparams,
            at,
            sinks,
            *near_kv.stride()[:3],
            near_valid.stride(0),
            *kv.stride()[:3],
            flags.stride(0),
            *((0, 0, 0, 0) if index.bounds is None else index.bounds.stride()[:4]),
            0 if index.part_fill is None else index.part_fill.stride(0),
            *((0, 0) if index.channels is None else index.channels.stride()[:2]),
            *((0, 0, 0) if index.codes is None else index.codes.stride()[:3]),
            *((0, 0, 0) if index.qparams is None else index.qparams.stride()[:3]),
            torch.finfo(near_kv.dtype).max,
            KEEPS=kv.shape[3] > 0,
            METADATA="none" if index.bounds is None else index.metadata,
            HAS_PART_FILL=index.part_fill is not None,
            HAS_CODES=index.codes is not None,
            PACKED=packed,
            HEADS=heads,
            BLOCK_SIZE=size,
            PARTS=parts,
            DK=dk,
            DV=dv,
            R=width,
            BT=min(TILE // 2 if dk > WIDE else TILE, size // parts),
            BK=triton.next_power_of_2(dk),
            BV=triton.next_power_of_2(max(1, dv)),
            BR=triton.next_power_of_2(max(1, width)),
            num_warps=8 if dk > WIDE else 4,
            **overlap(near_kv),
        )
        _finish_kernel[(batch,)](*near, BLOCK_SIZE=size, BS=triton.next_power_of_2(max(1, sinks)), **overlap(near_kv))
