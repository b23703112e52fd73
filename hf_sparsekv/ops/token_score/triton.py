"""Approximate score of the tokens of chosen blocks from the label cache: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import require_dense_rows
from .._overlap import begin, overlap
from .reference import SELECTABLE as _SELECTABLE

SELECTABLE = tl.constexpr(_SELECTABLE)
TILE = 128  # tokens a program. Not tuned yet.
WORD_PROGRAMS = 1024  # programs to aim for where a program scores several blocks. Not tuned yet.
MOST_BLOCKS = 16  # blocks of such a program. Not tuned yet.
QUERY = 128  # entries of the group's queries that a program may hold in registers


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
    begin(PDL)
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

    # The query's label channels; packed codes hold the second half of them in the high four bits.
    o_g, o_w = tl.arange(0, BG), tl.arange(0, BW)
    m_w = o_w < WIDTH
    m_q = (o_g < GROUP)[:, None] & m_w[None, :]
    p_channel = p_channels + i_batch * channels_batch + i_head * channels_head + o_w
    p_row = p_q + i_batch * q_batch + (i_head * GROUP + o_g[:, None]) * q_head
    b_channel = tl.load(p_channel, mask=m_w, other=0)  # [BW]
    b_low = tl.load(p_row + b_channel[None, :] * q_dim, mask=m_q, other=0.0).to(tl.float32)  # [BG, BW]

    # What is not live may hold anything, NaN included, and is not read.
    p_code = p_codes + b_slot[:, None] * codes_slot + i_head * codes_head + o_in[:, None] * codes_token
    m_code = m_live[:, None] & m_w[None, :]
    b_code = tl.load(p_code + o_w[None, :], mask=m_code, other=0)  # [BT, BW]
    if PACKED:
        b_channel = tl.load(p_channel + WIDTH, mask=m_w, other=0)  # [BW]
        b_high = tl.load(p_row + b_channel[None, :] * q_dim, mask=m_q, other=0.0).to(tl.float32)  # [BG, BW]
        p_param = p_qparams + b_slot * qparams_slot + i_head * qparams_head + o_in * qparams_token
        b_scale = tl.load(p_param, mask=m_live, other=0.0).to(tl.float32)  # [BT]
        b_zero = tl.load(p_param + 1, mask=m_live, other=0.0).to(tl.float32)  # [BT]
        b_code = b_code.to(tl.int32)
        b_low_code, b_high_code = b_code & 15, b_code >> 4

    # label = digit * scale + zero, so q . label = scale * (q . digits) + zero * sum(q)
    if MEAN:
        b_low = tl.sum(b_low, 0) / GROUP  # [BW]
        if PACKED:
            b_high = tl.sum(b_high, 0) / GROUP  # [BW]
            b_both = b_low_code.to(tl.float32) * b_low[None, :] + b_high_code.to(tl.float32) * b_high[None, :]
            b_s = b_scale * tl.sum(b_both, 1) + b_zero * tl.sum(b_low + b_high, 0)  # [BT]
        else:
            b_s = tl.sum(b_code.to(tl.float32) * b_low[None, :], 1)  # [BT]
    else:
        if PACKED:
            b_sum = tl.sum(b_low + b_high, 1)  # [BG]
            b_low, b_high = tl.trans(b_low), tl.trans(b_high)  # [BW, BG]
            if NATIVE:  # digits 0 .. 15 are exact in any 16-bit type
                b_low, b_high = b_low.to(p_q.dtype.element_ty), b_high.to(p_q.dtype.element_ty)
            b_all = tl.dot(b_low_code.to(b_low.dtype), b_low, input_precision="ieee")  # [BT, BG]
            b_all += tl.dot(b_high_code.to(b_high.dtype), b_high, input_precision="ieee")
            b_all = b_scale[:, None] * b_all + b_zero[:, None] * b_sum[None, :]
        else:
            b_low = tl.trans(b_low)  # [BW, BG]
            if NATIVE:
                b_low = b_low.to(p_q.dtype.element_ty)
            b_all = tl.dot(b_code.to(b_low.dtype), b_low, input_precision="ieee")  # [BT, BG]
        b_s = tl.max(tl.where((o_g < GROUP)[None, :], b_all, float("-inf")), 1)  # [BT]
    p_to = p_out + i_batch * out_batch + i_head * out_head + o_t
    tl.store(p_to, tl.where(m_live, b_s, float("-inf")), mask=m_t)


@triton.jit
def _digits(b_code, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Words ``[ROWS, COLUMNS]`` of eight digits as float32 ``[ROWS, 8 COLUMNS]``, digit ``i`` times ``_unit(i)``.

    A digit is not converted, of which a processor does few at a time: it becomes part of the mantissa of 2 ** 23.
    """
    b_high = b_code >> 12  # the upper digits do not fit below the exponent where they are
    b_0 = ((b_code & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    b_1 = ((b_code & 0xF0) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    b_2 = ((b_code & 0xF00) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    b_3 = ((b_code & 0xF000) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    b_4 = ((b_code & 0xF0000) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    b_5 = ((b_high & 0xF00) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    b_6 = ((b_high & 0xF000) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    b_7 = ((b_high & 0xF0000) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    b_low = tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3))  # [ROWS, COLUMNS, i % 2, i // 2]
    b_all = tl.join(b_low, tl.join(tl.join(b_4, b_5), tl.join(b_6, b_7)))
    return tl.reshape(b_all, [ROWS, 8 * COLUMNS])


@triton.jit
def _unit(i_digit):
    """What digit ``i_digit`` of :func:`_digits` is multiplied by: ``16 ** i``, from digit 5 on ``16 ** (i - 3)``."""
    o_bit = 4 * tl.where(i_digit < 5, i_digit, i_digit - 3)
    return (1 << o_bit).to(tl.float32)


@triton.jit
def _word_score_kernel(
    p_q,
    p_words,
    p_pairs,
    p_channels,
    p_flags,
    p_slots,
    p_blocks,
    p_out,
    blocks,
    q_batch,
    q_head,
    q_dim,
    words_slot,
    words_head,
    words_token,
    pairs_slot,
    pairs_head,
    channels_batch,
    channels_head,
    flags_slot,
    slots_batch,
    blocks_batch,
    blocks_head,
    out_batch,
    out_head,
    HAS_BLOCKS: tl.constexpr,
    MEAN: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BW: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of ``BLOCKS`` blocks of one row and KV head, a block at a time, the query in registers.

    A token's codes are ``WIDTH`` int32 of eight channels each, its scale and zero point one int32.
    """
    begin(PDL)
    i_row = tl.program_id(1)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)

    # Byte j of word w holds channel 4 w + j of the first half in its low, of the second half in its high four bits.
    # The order is that of _digits.
    o_c = tl.arange(0, 8 * BW)
    i_word, i_digit = o_c // 8, o_c // 4 % 2 + o_c // 2 % 2 * 2 + o_c % 2 * 4
    m_c = i_word < WIDTH
    o_channel = 4 * i_word + i_digit // 2 + i_digit % 2 * 4 * WIDTH
    p_channel = p_channels + i_batch * channels_batch + i_head * channels_head
    b_channel = tl.load(p_channel + o_channel, mask=m_c, other=0)  # [8 BW]
    p_query = p_q + i_batch * q_batch + i_head * GROUP * q_head + b_channel * q_dim
    b_unit = 1.0 / _unit(i_digit)
    b_q0 = tl.load(p_query, mask=m_c, other=0.0).to(tl.float32)  # [8 BW]
    b_q1, b_q2, b_q3 = b_q0, b_q0, b_q0
    if MEAN:
        for i in tl.static_range(1, GROUP):
            b_q0 += tl.load(p_query + i * q_head, mask=m_c, other=0.0).to(tl.float32)
        b_q0 = b_q0 / GROUP
    else:
        if GROUP > 1:
            b_q1 = tl.load(p_query + q_head, mask=m_c, other=0.0).to(tl.float32)
        if GROUP > 2:
            b_q2 = tl.load(p_query + 2 * q_head, mask=m_c, other=0.0).to(tl.float32)
        if GROUP > 3:
            b_q3 = tl.load(p_query + 3 * q_head, mask=m_c, other=0.0).to(tl.float32)
    total0, total1, total2, total3 = tl.sum(b_q0, 0), tl.sum(b_q1, 0), tl.sum(b_q2, 0), tl.sum(b_q3, 0)
    b_q0, b_q1, b_q2, b_q3 = b_q0 * b_unit, b_q1 * b_unit, b_q2 * b_unit, b_q3 * b_unit

    o_t, o_w = tl.arange(0, BLOCK_SIZE), tl.arange(0, BW)
    begin_block = tl.program_id(0) * BLOCKS
    for i in range(begin_block, tl.minimum(begin_block + BLOCKS, blocks)):
        block = i
        if HAS_BLOCKS:
            block = tl.load(p_blocks + i_batch * blocks_batch + i_head * blocks_head + i)
        slot = tl.load(p_slots + i_batch * slots_batch + block, mask=block >= 0, other=-1).to(tl.int64)
        is_there = slot >= 0
        b_flag = tl.load(p_flags + slot * flags_slot + o_t, mask=is_there, other=0)  # [BLOCK_SIZE]
        # Codes are read without waiting for the flags: the scores of tokens that cannot be selected, which may be
        # anything, are replaced.
        p_code = p_words + slot * words_slot + i_head * words_head + o_t[:, None] * words_token + o_w[None, :]
        b_code = tl.load(p_code, mask=is_there & (o_w < WIDTH)[None, :], other=0)  # [BLOCK_SIZE, BW]
        b_pair = tl.load(p_pairs + slot * pairs_slot + i_head * pairs_head + o_t, mask=is_there, other=0)
        b_scale = (b_pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # [BLOCK_SIZE]
        b_zero = (b_pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # [BLOCK_SIZE]
        # label = digit * scale + zero, so q . label = scale * (q . digits) + zero * sum(q)
        b_digit = _digits(b_code, BLOCK_SIZE, BW)  # [BLOCK_SIZE, 8 BW]
        b_s = b_scale * tl.sum(b_digit * b_q0[None, :], 1) + b_zero * total0  # [BLOCK_SIZE]
        if not MEAN:
            if GROUP > 1:
                b_s = tl.maximum(b_s, b_scale * tl.sum(b_digit * b_q1[None, :], 1) + b_zero * total1)
            if GROUP > 2:
                b_s = tl.maximum(b_s, b_scale * tl.sum(b_digit * b_q2[None, :], 1) + b_zero * total2)
            if GROUP > 3:
                b_s = tl.maximum(b_s, b_scale * tl.sum(b_digit * b_q3[None, :], 1) + b_zero * total3)
        p_to = p_out + i_batch * out_batch + i_head * out_head + i * BLOCK_SIZE + o_t
        tl.store(p_to, tl.where(is_there & (b_flag == SELECTABLE), b_s, float("-inf")))


def _are_words(codes: Tensor, qparams: Tensor) -> bool:
    """Whether the codes and the scale and zero point of a token can be read as int32."""
    places = (codes.shape[-1], codes.data_ptr(), *codes.stride()[:-1])
    pairs = (qparams.data_ptr(), *(2 * stride for stride in qparams.stride()[:-1]))
    return all(place % 4 == 0 for place in (*places, *pairs)) and qparams.stride(2) == 2


def _score_words(
    q: Tensor,
    codes: Tensor,
    qparams: Tensor,
    channels: Tensor,
    flags: Tensor,
    slots: Tensor,
    block_ids: Tensor | None,
    mean: bool,
    out: Tensor,
    blocks_a_program: int | None,
) -> None:
    batch, q_heads, _ = q.shape
    heads, block_size, width = codes.shape[1:]
    blocks = (slots if block_ids is None else block_ids).shape[-1]
    rows = batch * heads
    each = blocks_a_program or min(MOST_BLOCKS, triton.next_power_of_2(max(1, rows * blocks // WORD_PROGRAMS)))
    words, pairs = codes.view(torch.int32), qparams.view(torch.int32)
    _word_score_kernel[(triton.cdiv(blocks, each), rows)](
        q,
        words,
        pairs,
        channels,
        flags,
        slots,
        block_ids,
        out,
        blocks,
        *q.stride(),
        *words.stride()[:3],
        *pairs.stride()[:2],
        *channels.stride()[:2],
        flags.stride(0),
        slots.stride(0),
        *((0, 0) if block_ids is None else block_ids.stride()[:2]),
        *out.stride()[:2],
        HAS_BLOCKS=block_ids is not None,
        MEAN=mean,
        HEADS=heads,
        GROUP=q_heads // heads,
        BLOCK_SIZE=block_size,
        WIDTH=width // 4,
        BW=triton.next_power_of_2(width // 4),
        BLOCKS=each,
        num_warps=1 if block_size <= 64 else 2,
        **overlap(q),
    )


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
    words: bool | None = None,
    blocks_a_program: int | None = None,
) -> Tensor:
    """As ``reference.token_score``, into ``out`` if given.

    ``words`` (read eight codes at once, where that can be) and ``blocks_a_program`` replace what shapes tell.
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
    held = 2 * width * (1 if mean else group)
    if packed and words is not False and (mean or group <= 4) and held <= QUERY and _are_words(codes, qparams):
        with torch.cuda.device_of(q):
            args = (q, codes, qparams, channels, flags, slots, block_ids, mean, out, blocks_a_program)
            _score_words(*args)
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
            BW=max(16, triton.next_power_of_2(width)),
            BT=TILE,
            **overlap(q),
        )
    return out
