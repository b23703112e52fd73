"""Approximate score of the tokens of chosen blocks from packed labels, eight codes at a time: the kernel.

A program scores block after block with the query in registers: what a group of query heads and a label's channels
multiply to is small enough for that with the usual four heads of 32 channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._overlap import overlap, release, wait
from .reference import SELECTABLE as _SELECTABLE

SELECTABLE = tl.constexpr(_SELECTABLE)
PROGRAMS = 1024  # programs to aim for where one scores several blocks: measured on an H200
MOST_BLOCKS = 16  # blocks of such a program
QUERY = 128  # entries of the group's queries that a program may hold in registers


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
def known(b_total):
    """Sums of queries, NaN where they are infinite: then all their scores are NaN, which counts as ``-inf``."""
    return tl.where(tl.abs(b_total) < float("inf"), b_total, float("nan"))


@triton.jit
def _unit(i_digit):
    """What digit ``i_digit`` of :func:`_digits` is multiplied by: ``16 ** i``, from digit 5 on ``16 ** (i - 3)``."""
    o_bit = 4 * tl.where(i_digit < 5, i_digit, i_digit - 3)
    return (1 << o_bit).to(tl.float32)


@triton.jit
def _slot(p_block, p_slot, i, end, HAS_BLOCKS: tl.constexpr):
    """Slot of block ``i`` of those to score, -1 beyond the ``end``."""
    block = i
    if HAS_BLOCKS:
        block = tl.load(p_block + i, mask=i < end, other=-1)
    return tl.load(p_slot + block, mask=(i < end) & (block >= 0), other=-1).to(tl.int64)


@triton.jit
def _block(p_code, p_pair, p_flag, slot, words_slot, pairs_slot, flags_slot, m_w):
    """Codes, scales and zero points, and flags of the block in ``slot``; flags of 0 where there is none.

    Codes are read without waiting for the flags: the scores of tokens that cannot be selected, which may be anything,
    are replaced.
    """
    is_there = slot >= 0
    b_code = tl.load(p_code + slot * words_slot, mask=is_there & m_w, other=0)
    b_pair = tl.load(p_pair + slot * pairs_slot, mask=is_there, other=0)
    b_flag = tl.load(p_flag + slot * flags_slot, mask=is_there, other=0)
    return b_code, b_pair, b_flag


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
    wait(PDL)
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
    next_head = i_head * 0 + q_head  # int64: heads of a prompt's last query lie as far apart as the prompt is long
    b_unit = 1.0 / _unit(i_digit)
    b_q0 = tl.load(p_query, mask=m_c, other=0.0).to(tl.float32)  # [8 BW]
    b_q1, b_q2, b_q3 = b_q0, b_q0, b_q0
    if MEAN:
        for i in tl.static_range(1, GROUP):
            b_q0 += tl.load(p_query + i * next_head, mask=m_c, other=0.0).to(tl.float32)
        b_q0 = b_q0 / GROUP
    else:
        if GROUP > 1:
            b_q1 = tl.load(p_query + next_head, mask=m_c, other=0.0).to(tl.float32)
        if GROUP > 2:
            b_q2 = tl.load(p_query + 2 * next_head, mask=m_c, other=0.0).to(tl.float32)
        if GROUP > 3:
            b_q3 = tl.load(p_query + 3 * next_head, mask=m_c, other=0.0).to(tl.float32)
    total0, total1, total2, total3 = tl.sum(b_q0, 0), tl.sum(b_q1, 0), tl.sum(b_q2, 0), tl.sum(b_q3, 0)
    total0, total1, total2, total3 = known(total0), known(total1), known(total2), known(total3)
    b_q0, b_q1, b_q2, b_q3 = b_q0 * b_unit, b_q1 * b_unit, b_q2 * b_unit, b_q3 * b_unit

    o_t, o_w = tl.arange(0, BLOCK_SIZE), tl.arange(0, BW)
    m_w = (o_w < WIDTH)[None, :]
    p_code = p_words + i_head * words_head + o_t[:, None] * words_token + o_w[None, :]
    p_pair = p_pairs + i_head * pairs_head + o_t
    p_slot = p_slots + i_batch * slots_batch
    p_block = p_blocks + i_batch * blocks_batch + i_head * blocks_head
    first = tl.program_id(0) * BLOCKS
    end = tl.minimum(first + BLOCKS, blocks)
    # While a block is scored, the next one's codes and the slot of the one after it are on their way.
    slot = _slot(p_block, p_slot, first, end, HAS_BLOCKS)
    slot_2 = _slot(p_block, p_slot, first + 1, end, HAS_BLOCKS)
    b_code, b_pair, b_flag = _block(p_code, p_pair, p_flags + o_t, slot, words_slot, pairs_slot, flags_slot, m_w)
    for i in range(first, end):
        slot_3 = _slot(p_block, p_slot, i + 2, end, HAS_BLOCKS)
        b_code_2, b_pair_2, b_flag_2 = _block(
            p_code, p_pair, p_flags + o_t, slot_2, words_slot, pairs_slot, flags_slot, m_w
        )
        b_scale = (b_pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # [BLOCK_SIZE]
        b_zero = (b_pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # [BLOCK_SIZE]
        # label = digit * scale + zero, so q . label = scale * (q . digits) + zero * sum(q)
        b_digit = _digits(b_code, BLOCK_SIZE, BW)  # [BLOCK_SIZE, 8 BW]
        b_s = b_scale * tl.sum(b_digit * b_q0[None, :], 1) + b_zero * total0  # [BLOCK_SIZE]
        if not MEAN:  # (of NaN and a number the maximum is the number)
            if GROUP > 1:
                b_s = tl.maximum(b_s, b_scale * tl.sum(b_digit * b_q1[None, :], 1) + b_zero * total1)
            if GROUP > 2:
                b_s = tl.maximum(b_s, b_scale * tl.sum(b_digit * b_q2[None, :], 1) + b_zero * total2)
            if GROUP > 3:
                b_s = tl.maximum(b_s, b_scale * tl.sum(b_digit * b_q3[None, :], 1) + b_zero * total3)
        p_to = p_out + i_batch * out_batch + i_head * out_head + i * BLOCK_SIZE + o_t
        tl.store(p_to, tl.where((b_flag == SELECTABLE) & (b_s == b_s), b_s, float("-inf")))
        slot_2, b_code, b_pair, b_flag = slot_3, b_code_2, b_pair_2, b_flag_2
    release(PDL)


def can_score_words(codes: Tensor, qparams: Tensor, vectors: int) -> bool:
    """Whether ``vectors`` queries fit, and a token's codes and parameters can be read as int32."""
    return vectors <= 4 and vectors * 2 * codes.shape[-1] <= QUERY and aligned(codes, qparams)


def aligned(codes: Tensor, qparams: Tensor) -> bool:
    """Whether the codes and the scale and zero point of a token can be read as int32."""
    places = (codes.shape[-1], codes.data_ptr(), *codes.stride()[:-1])
    pairs = (qparams.data_ptr(), *(2 * stride for stride in qparams.stride()[:-1]))
    return all(place % 4 == 0 for place in (*places, *pairs)) and qparams.stride(2) == 2


def score_words(
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
    """As ``reference.token_score``; ``mean`` or the largest."""
    batch, q_heads, _ = q.shape
    heads, block_size, width = codes.shape[1:]
    blocks = (slots if block_ids is None else block_ids).shape[-1]
    rows = batch * heads
    each = blocks_a_program or min(MOST_BLOCKS, triton.next_power_of_2(max(1, rows * blocks // PROGRAMS)))
    words, pairs = codes.view(torch.int32), qparams.view(torch.int32)
    with torch.cuda.device_of(q):
        _word_score_kernel[(triton.cdiv(blocks, each), rows)](
            q,
            words,
            pairs,
            channels,
            flags,
            slots,
            slots if block_ids is None else block_ids,  # not read without ids
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
