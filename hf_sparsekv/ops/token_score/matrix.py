"""Approximate score of tokens from packed labels by tensor cores: the kernel for the maximum over a group.

As in ``words`` a program scores block after block, but a group's queries are the columns of one matrix product, so
that their number hardly matters. Digits and 16-bit queries are exact in the queries' type, the sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._overlap import overlap, release, wait
from .reference import SELECTABLE as _SELECTABLE
from .words import _block, _slot, aligned

SELECTABLE = tl.constexpr(_SELECTABLE)
PROGRAMS = 4096  # programs to aim for where one scores several blocks. Not measured yet.
MOST_BLOCKS = 16  # blocks of such a program. Not measured yet.
MOST_HEADS = 16  # columns of the product
MOST_CHANNELS = 64


@triton.jit
def _digits(b_code, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Words ``[ROWS, COLUMNS]`` of eight digits as ``[ROWS, 8 COLUMNS]``, in the order of ``words``.

    Two digits at a time become the lowest bits of two numbers whose last mantissa bit counts 1.
    """
    if dtype == tl.bfloat16:
        bits: tl.constexpr = 0x43004300
        above: tl.constexpr = 128.0
    else:
        bits: tl.constexpr = 0x64006400
        above: tl.constexpr = 1024.0
    b_01 = tl.join((b_code & 0x000F000F) | bits, ((b_code >> 4) & 0x000F000F) | bits)
    b_23 = tl.join(((b_code >> 8) & 0x000F000F) | bits, ((b_code >> 12) & 0x000F000F) | bits)
    b_pair = tl.join(b_01, b_23)  # [ROWS, COLUMNS, i % 2, i // 2]: digits i and i + 4
    b_low = b_pair.to(tl.int16).to(dtype, bitcast=True)
    b_high = (b_pair >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(b_low, b_high), [ROWS, 8 * COLUMNS]) - above


@triton.jit
def _matrix_score_kernel(
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
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BG: tl.constexpr,
    BW: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of ``BLOCKS`` blocks of one row and KV head. A token's codes are ``WIDTH`` int32, one after the other."""
    wait(PDL)
    i_row = tl.program_id(1)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)

    # The queries in the order of _digits, for which see words.
    o_c, o_g = tl.arange(0, 8 * BW), tl.arange(0, BG)
    i_word, i_digit = o_c // 8, o_c // 4 % 2 + o_c // 2 % 2 * 2 + o_c % 2 * 4
    m_c, m_g = i_word < WIDTH, (o_g < GROUP)[None, :]
    o_channel = 4 * i_word + i_digit // 2 + i_digit % 2 * 4 * WIDTH
    p_channel = p_channels + i_batch * channels_batch + i_head * channels_head
    b_channel = tl.load(p_channel + o_channel, mask=m_c, other=0)  # [8 BW]
    p_query = p_q + i_batch * q_batch + (i_head * GROUP + o_g)[None, :] * q_head + b_channel[:, None] * q_dim
    b_q = tl.load(p_query, mask=m_c[:, None] & m_g, other=0.0)  # [8 BW, BG]
    b_total = tl.sum(b_q.to(tl.float32), 0)  # [BG]

    o_t, o_w = tl.arange(0, BLOCK_SIZE), tl.arange(0, BW)
    m_w = (o_w < WIDTH)[None, :]
    p_code = p_words + i_head * words_head + o_t[:, None] * WIDTH + o_w[None, :]
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
        b_all = tl.dot(_digits(b_code, b_q.dtype, BLOCK_SIZE, BW), b_q)  # [BLOCK_SIZE, BG]
        b_all = b_scale[:, None] * b_all + b_zero[:, None] * b_total[None, :]
        b_s = tl.max(tl.where(m_g, b_all, float("-inf")), 1)  # [BLOCK_SIZE]
        p_to = p_out + i_batch * out_batch + i_head * out_head + i * BLOCK_SIZE + o_t
        tl.store(p_to, tl.where(b_flag == SELECTABLE, b_s, float("-inf")))
        slot_2, b_code, b_pair, b_flag = slot_3, b_code_2, b_pair_2, b_flag_2
    release(PDL)


def can_score_matrix(q: Tensor, codes: Tensor, qparams: Tensor) -> bool:
    """Whether the queries are of 16 bits and few enough, and a block's codes lie together as int32."""
    width = codes.shape[-1]
    few = q.shape[1] <= MOST_HEADS * codes.shape[1] and 2 * width <= MOST_CHANNELS
    return q.dtype in (torch.float16, torch.bfloat16) and few and codes.stride(2) == width and aligned(codes, qparams)


def score_matrix(
    q: Tensor,
    codes: Tensor,
    qparams: Tensor,
    channels: Tensor,
    flags: Tensor,
    slots: Tensor,
    block_ids: Tensor | None,
    out: Tensor,
    blocks_a_program: int | None,
) -> None:
    """As ``reference.token_score`` with ``"max"``."""
    batch, q_heads, _ = q.shape
    heads, block_size, width = codes.shape[1:]
    blocks = (slots if block_ids is None else block_ids).shape[-1]
    rows = batch * heads
    each = blocks_a_program or min(MOST_BLOCKS, triton.next_power_of_2(max(1, rows * blocks // PROGRAMS)))
    words, pairs = codes.view(torch.int32), qparams.view(torch.int32)
    with torch.cuda.device_of(q):
        _matrix_score_kernel[(triton.cdiv(blocks, each), rows)](
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
            *words.stride()[:2],
            *pairs.stride()[:2],
            *channels.stride()[:2],
            flags.stride(0),
            slots.stride(0),
            *((0, 0) if block_ids is None else block_ids.stride()[:2]),
            *out.stride()[:2],
            HAS_BLOCKS=block_ids is not None,
            HEADS=heads,
            GROUP=q_heads // heads,
            BLOCK_SIZE=block_size,
            WIDTH=width // 4,
            BG=MOST_HEADS,
            BW=max(2, triton.next_power_of_2(width // 4)),
            BLOCKS=each,
            num_warps=1 if block_size <= 64 else 2,
            **overlap(q),
        )
