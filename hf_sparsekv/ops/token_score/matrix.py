"""Approximate score of tokens from packed labels by tensor cores, for queries of 16 bits.

A program scores block after block with the queries in registers. A group's queries are the columns of one product of
8-bit integers: digits 0 to 15, and queries in fixed point, of which each has two columns, 128 a + b. Sums are exact, so
all that is rounded are the queries, to a 32,512th of their largest number. The mean over a group is one query.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._overlap import overlap, release, wait
from .reference import SELECTABLE as _SELECTABLE

SELECTABLE = tl.constexpr(_SELECTABLE)
PROGRAMS = 4096  # programs to aim for where one scores several blocks, measured on an H200, 64 rows of 512 blocks
MOST_BLOCKS = 16  # blocks of such a program
MOST_HEADS, MOST_CHANNELS = 16, 64  # of the queries that a program holds; or few heads with twice the channels
FEW = 4
STAGES = tl.constexpr(3)
LARGEST = tl.constexpr(127 * 128.0)  # of the numbers that stand for queries


@triton.jit
def known(b_total):
    """Sums of queries, NaN where they are infinite: then all their scores are NaN, which counts as ``-inf``."""
    return tl.where(tl.abs(b_total) < float("inf"), b_total, float("nan"))


@triton.jit
def _slot(p_block, p_slot, i, end, HAS_BLOCKS: tl.constexpr):
    """Slot of block ``i`` of those to score, -1 beyond the ``end``."""
    block = i
    if HAS_BLOCKS:
        block = tl.load(p_block + i, mask=i < end, other=-1)
    return tl.load(p_slot + block, mask=(i < end) & (block >= 0), other=-1).to(tl.int64)


@triton.jit
def _digits(b_code, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GPU: tl.constexpr):
    """Bytes ``[ROWS, COLUMNS]`` as int8 ``[ROWS, 2 COLUMNS]``: a byte's low digit, its high one, the next byte's."""
    if GPU:  # four bytes at once; the compiler would take them one by one
        b_low = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [b_code], dtype=tl.int8, is_pure=True, pack=4
        )
        b_high = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 4; and.b32 $0, $0, 0x0F0F0F0F;", "=r,r", [b_code], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        b_low, b_high = (b_code & 15).to(tl.int8), (b_code >> 4).to(tl.int8)
    return tl.reshape(tl.join(b_low, b_high), [ROWS, 2 * COLUMNS])


@triton.jit
def _matrix_score_kernel(
    p_q,
    p_codes,
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
    codes_slot,
    codes_head,
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
    BG: tl.constexpr,
    BW: tl.constexpr,
    BLOCKS: tl.constexpr,
    GPU: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of ``BLOCKS`` blocks of one row and KV head. A token's codes are ``WIDTH`` bytes, one after the other."""
    wait(PDL)
    i_row = tl.program_id(1)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)

    # The queries in the order of _digits: a byte's low digit, then the high one, a channel of the second half.
    o_c, o_g = tl.arange(0, 2 * BW), tl.arange(0, BG)
    m_c, m_g = o_c // 2 < WIDTH, (o_g < GROUP)[None, :]
    p_channel = p_channels + i_batch * channels_batch + i_head * channels_head
    b_channel = tl.load(p_channel + o_c // 2 + o_c % 2 * WIDTH, mask=m_c, other=0)  # [2 BW]
    p_query = p_q + i_batch * q_batch + b_channel * q_dim
    if MEAN:  # in every column
        b_mean = tl.zeros([2 * BW], tl.float32)
        for i in tl.static_range(0, GROUP):
            b_mean += tl.load(p_query + (i_head * GROUP + i) * q_head, mask=m_c, other=0.0).to(tl.float32)
        b_q = (b_mean / GROUP)[:, None] + tl.zeros([2 * BW, BG], tl.float32)
    else:
        p_query = p_query[:, None] + (i_head * GROUP + o_g)[None, :] * q_head
        b_q = tl.load(p_query, mask=m_c[:, None] & m_g, other=0.0).to(tl.float32)  # [2 BW, BG]
    b_total = known(tl.sum(b_q, 0))  # [BG]
    b_unit = tl.maximum(tl.max(tl.abs(b_q), 0), 1e-30) / LARGEST  # [BG]
    b_whole = tl.floor(b_q / b_unit[None, :] + 0.5)  # -16256 .. 16256
    b_upper = tl.floor(b_whole * 0.0078125 + 0.5)  # -127 .. 127
    b_lower = b_whole - 128.0 * b_upper  # -64 .. 63
    b_parts = tl.reshape(tl.join(b_upper.to(tl.int8), b_lower.to(tl.int8)), [2 * BW, 2 * BG])

    o_t, o_w = tl.arange(0, BLOCK_SIZE), tl.arange(0, BW)
    m_w = (o_w < WIDTH)[None, :]
    p_code = p_codes + i_head * codes_head + o_t[:, None] * WIDTH + o_w[None, :]
    p_pair = p_pairs + i_head * pairs_head + o_t
    p_slot = p_slots + i_batch * slots_batch
    p_block = p_blocks + i_batch * blocks_batch + i_head * blocks_head
    first = tl.program_id(0) * BLOCKS
    end = tl.minimum(first + BLOCKS, blocks)
    # The compiler keeps the next blocks' slots and codes on their way, in shared memory: in registers, carried over to
    # the next turn of the loop, bytes would be taken apart.
    for i in tl.range(first, end, num_stages=STAGES):
        slot = _slot(p_block, p_slot, i, end, HAS_BLOCKS)
        # Codes are read without waiting for the flags: the scores of tokens that cannot be selected, which may be
        # anything, are replaced.
        b_code = tl.load(p_code + slot * codes_slot, mask=(slot >= 0) & m_w, other=0)
        b_pair = tl.load(p_pair + slot * pairs_slot, mask=slot >= 0, other=0)
        b_flag = tl.load(p_flags + o_t + slot * flags_slot, mask=slot >= 0, other=0)
        b_scale = (b_pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # [BLOCK_SIZE]
        b_zero = (b_pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # [BLOCK_SIZE]
        b_both = tl.dot(_digits(b_code, BLOCK_SIZE, BW, GPU), b_parts)  # [BLOCK_SIZE, 2 BG]
        b_first, b_second = tl.split(tl.reshape(b_both, [BLOCK_SIZE, BG, 2]))
        b_all = (b_first * 128 + b_second).to(tl.float32)  # below 2 ** 24: exact
        # label = digit * scale + zero, so q . label = scale * (q . digits) + zero * sum(q)
        b_all = b_scale[:, None] * (b_all * b_unit[None, :]) + b_zero[:, None] * b_total[None, :]
        b_s = tl.max(tl.where(m_g, b_all, float("-inf")), 1)  # [BLOCK_SIZE]; NaN only if all are
        p_to = p_out + i_batch * out_batch + i_head * out_head + i * BLOCK_SIZE + o_t
        tl.store(p_to, tl.where((b_flag == SELECTABLE) & (b_s == b_s), b_s, float("-inf")))
    release(PDL)


def can_score_matrix(q: Tensor, codes: Tensor, qparams: Tensor, mean: bool) -> bool:
    """Whether the queries are of 16 bits and few enough, and a block's codes lie together, in whole words."""
    width = codes.shape[-1]
    vectors = 1 if mean else q.shape[1] // codes.shape[1]
    fits = vectors <= MOST_HEADS and 2 * width <= MOST_CHANNELS * (1 + (vectors <= FEW))
    # A scale and a zero point are read as one int32.
    pairs = (qparams.data_ptr(), *(2 * stride for stride in qparams.stride()[:-1]))
    places = (width, codes.data_ptr(), *codes.stride()[:-1], *pairs)
    whole = codes.stride(2) == width and qparams.stride(2) == 2 and all(place % 4 == 0 for place in places)
    return q.dtype in (torch.float16, torch.bfloat16) and fits and whole


def score_matrix(
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
    pairs = qparams.view(torch.int32)
    with torch.cuda.device_of(q):
        _matrix_score_kernel[(triton.cdiv(blocks, each), rows)](
            q,
            codes,
            pairs,
            channels,
            flags,
            slots,
            slots if block_ids is None else block_ids,  # not read without ids
            out,
            blocks,
            *q.stride(),
            *codes.stride()[:2],
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
            WIDTH=width,
            BG=FEW if mean else max(FEW, triton.next_power_of_2(q_heads // heads)),
            BW=max(16, triton.next_power_of_2(width)),
            BLOCKS=each,
            GPU=q.is_cuda,
            num_warps=1 if block_size <= 64 else 2,
            **overlap(q),
        )
