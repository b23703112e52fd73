"""Approximate score of the tokens of chosen blocks from the label cache: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import require_dense_rows
from .._group import MANY, mean_heads
from .._overlap import overlap, release, wait
from .matrix import can_score_matrix, known, score_matrix
from .reference import SELECTABLE as _SELECTABLE

SELECTABLE = tl.constexpr(_SELECTABLE)
TILE = 128  # tokens a program. Not tuned yet.
# Whole keys of latents (576 wide) as labels are taken in pieces: at once they exceed an H200's shared memory.
WIDEST, WIDEST_PACKED, PIECE = 256, 128, 64  # entries of codes; not tuned yet
QUERIES = 2048  # bytes of labels times heads above which a program has twice the warps


@triton.jit
def _token_score_kernel(
    p_q,
    p_codes,
    p_qparams,
    p_channels,
    p_flags,
    p_slots,
    p_blocks,
    p_out,
    tokens,
    q_batch,
    q_head,
    q_dim,
    codes_slot,
    codes_head,
    codes_token,
    qparams_slot,
    qparams_head,
    qparams_token,
    channels_batch,
    channels_head,
    flags_slot,
    slots_batch,
    blocks_batch,
    blocks_head,
    out_batch,
    out_head,
    HAS_BLOCKS: tl.constexpr,
    PACKED: tl.constexpr,
    MEAN: tl.constexpr,
    NATIVE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BG: tl.constexpr,
    BW: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of ``BT`` tokens of one row and KV head. A token's codes are ``WIDTH`` entries."""
    wait(PDL)
    i_row = tl.program_id(1)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)

    # Token -> block of the selection -> block of the row -> slot.
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t = o_t < tokens
    b_block = o_t // BLOCK_SIZE
    o_in = o_t % BLOCK_SIZE
    m_live = m_t
    if HAS_BLOCKS:
        p_block = p_blocks + i_batch * blocks_batch + i_head * blocks_head + b_block
        b_block = tl.load(p_block, mask=m_t, other=-1)  # [BT]
        m_live = m_t & (b_block >= 0)
    b_slot = tl.load(p_slots + i_batch * slots_batch + b_block, mask=m_live, other=-1).to(tl.int64)  # [BT]
    m_live = m_live & (b_slot >= 0)
    b_flag = tl.load(p_flags + b_slot * flags_slot + o_in, mask=m_live, other=0)  # [BT]
    m_live = m_live & (b_flag == SELECTABLE)

    o_g = tl.arange(0, BG)
    p_channels += i_batch * channels_batch + i_head * channels_head
    p_row = p_q + i_batch * q_batch + (i_head * GROUP + o_g[:, None]) * q_head
    p_code = p_codes + b_slot[:, None] * codes_slot + i_head * codes_head + o_in[:, None] * codes_token
    if PACKED:
        # label = digit * scale + zero, so q . label = scale * (q . digits) + zero * sum(q)
        if MEAN:
            b_s, b_sum = tl.zeros([BT], tl.float32), tl.zeros([BW], tl.float32)
        else:
            b_all, b_sum = tl.zeros([BT, BG], tl.float32), tl.zeros([BG], tl.float32)
        for i in tl.static_range(0, WIDTH, BW):
            # The query's label channels; packed codes hold the second half of them in the high four bits.
            o_w = i + tl.arange(0, BW)
            m_w = o_w < WIDTH
            m_q = (o_g < GROUP)[:, None] & m_w[None, :]
            b_channel = tl.load(p_channels + o_w, mask=m_w, other=0)  # [BW]
            b_low = tl.load(p_row + b_channel[None, :] * q_dim, mask=m_q, other=0.0).to(tl.float32)  # [BG, BW]
            b_channel = tl.load(p_channels + o_w + WIDTH, mask=m_w, other=0)  # [BW]
            b_high = tl.load(p_row + b_channel[None, :] * q_dim, mask=m_q, other=0.0).to(tl.float32)  # [BG, BW]
            # What is not live may hold anything, NaN included, and is not read.
            b_code = tl.load(p_code + o_w[None, :], mask=m_live[:, None] & m_w[None, :], other=0).to(tl.int32)
            b_low_code, b_high_code = b_code & 15, b_code >> 4  # [BT, BW]
            if MEAN:
                b_low_mean = tl.sum(b_low, 0) / GROUP  # [BW]
                b_high_mean = tl.sum(b_high, 0) / GROUP  # [BW]
                b_sum += b_low_mean + b_high_mean
                b_both = b_low_code.to(tl.float32) * b_low_mean[None, :]
                b_s += tl.sum(b_both + b_high_code.to(tl.float32) * b_high_mean[None, :], 1)
            else:
                b_sum += tl.sum(b_low + b_high, 1)
                b_low_q, b_high_q = tl.trans(b_low), tl.trans(b_high)  # [BW, BG]
                if NATIVE:  # digits 0 .. 15 are exact in any 16-bit type
                    b_low_q, b_high_q = b_low_q.to(p_q.dtype.element_ty), b_high_q.to(p_q.dtype.element_ty)
                b_all = tl.dot(b_low_code.to(b_low_q.dtype), b_low_q, b_all, input_precision="ieee")  # [BT, BG]
                b_all = tl.dot(b_high_code.to(b_high_q.dtype), b_high_q, b_all, input_precision="ieee")
        p_param = p_qparams + b_slot * qparams_slot + i_head * qparams_head + o_in * qparams_token
        b_scale = tl.load(p_param, mask=m_live, other=0.0).to(tl.float32)  # [BT]
        b_zero = tl.load(p_param + 1, mask=m_live, other=0.0).to(tl.float32)  # [BT]
        if MEAN:
            b_s = b_scale * b_s + b_zero * known(tl.sum(b_sum, 0))  # [BT]
        else:
            b_all = b_scale[:, None] * b_all + b_zero[:, None] * known(b_sum)[None, :]
    else:
        if MEAN:
            b_s, b_sum = tl.zeros([BT], tl.float32), tl.zeros([BW], tl.float32)
        else:
            b_all, b_sum = tl.zeros([BT, BG], tl.float32), tl.zeros([BG], tl.float32)
        for i in tl.static_range(0, WIDTH, BW):
            o_w = i + tl.arange(0, BW)
            m_w = o_w < WIDTH
            m_q = (o_g < GROUP)[:, None] & m_w[None, :]
            b_channel = tl.load(p_channels + o_w, mask=m_w, other=0)  # [BW]
            b_q = tl.load(p_row + b_channel[None, :] * q_dim, mask=m_q, other=0.0).to(tl.float32)  # [BG, BW]
            b_code = tl.load(p_code + o_w[None, :], mask=m_live[:, None] & m_w[None, :], other=0)  # [BT, BW]
            if MEAN:
                b_mean = tl.sum(b_q, 0) / GROUP  # [BW]
                b_sum += b_mean
                b_s += tl.sum(b_code.to(tl.float32) * b_mean[None, :], 1)
            else:
                b_sum += tl.sum(b_q, 1)
                b_q = tl.trans(b_q)  # [BW, BG]
                if NATIVE:
                    b_q = b_q.to(p_q.dtype.element_ty)
                b_all = tl.dot(b_code.to(b_q.dtype), b_q, b_all, input_precision="ieee")  # [BT, BG]
        if MEAN:
            b_s += 0.0 * known(tl.sum(b_sum, 0))
        else:
            b_all += (0.0 * known(b_sum))[None, :]
    if not MEAN:  # of NaN and numbers the largest is a number
        b_s = tl.max(tl.where((o_g < GROUP)[None, :], b_all, float("-inf")), 1)  # [BT]
    release(PDL)
    p_to = p_out + i_batch * out_batch + i_head * out_head + o_t
    tl.store(p_to, tl.where(m_live & (b_s == b_s), b_s, float("-inf")), mask=m_t)


def token_score(
    q: Tensor,
    codes: Tensor,
    qparams: Tensor | None,
    channels: Tensor,
    flags: Tensor,
    slots: Tensor,
    block_ids: Tensor | None,
    reduce: str,
    *,
    out: Tensor | None = None,
    matrix: bool = True,
    blocks_a_program: int | None = None,
) -> Tensor:
    """As ``reference.token_score``, into ``out`` if given.

    ``matrix`` (by tensor cores, where that can be) and ``blocks_a_program`` (of that kernel) replace what shapes tell.
    """
    batch, q_heads, _ = q.shape
    heads, block_size, width = codes.shape[1:]
    tokens = (slots if block_ids is None else block_ids).shape[-1] * block_size
    if out is None:
        out = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    if not tokens:
        return out
    require_dense_rows(
        codes=codes,
        qparams=qparams,
        channels=channels,
        flags=flags,
        slots=slots,
        block_ids=block_ids,
        out=out,
    )
    group = q_heads // heads
    packed = qparams is not None
    mean = reduce == "mean"
    by_matrix = packed and matrix and can_score_matrix(q, codes, qparams, mean)
    if mean and group > MANY:
        q, group = mean_heads(q, heads), 1
    if by_matrix:
        score_matrix(q, codes, qparams, channels, flags, slots, block_ids, mean, out, blocks_a_program)
        return out
    with torch.cuda.device_of(q):
        _token_score_kernel[(triton.cdiv(tokens, TILE), batch * heads)](
            q,
            codes,
            qparams,
            channels,
            flags,
            slots,
            block_ids,
            out,
            tokens,
            *q.stride(),
            *codes.stride()[:3],
            *(qparams.stride()[:3] if packed else (0, 0, 0)),
            *channels.stride()[:2],
            flags.stride(0),
            slots.stride(0),
            *((0, 0) if block_ids is None else block_ids.stride()[:2]),
            *out.stride()[:2],
            HAS_BLOCKS=block_ids is not None,
            PACKED=packed,
            MEAN=mean,
            NATIVE=q.dtype != torch.float32 and (packed or codes.dtype == q.dtype),
            HEADS=heads,
            GROUP=group,
            BLOCK_SIZE=block_size,
            WIDTH=width,
            BG=max(16, triton.next_power_of_2(group)),
            BW=max(16, triton.next_power_of_2(width)) if width <= (WIDEST_PACKED if packed else WIDEST) else PIECE,
            BT=TILE,
            num_warps=8 if group * width > QUERIES else 4,
            **overlap(q),
        )
    return out
