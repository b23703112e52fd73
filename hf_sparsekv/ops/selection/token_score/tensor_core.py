"""Approximate score of tokens from packed labels by tensor cores, for queries of 16 bits.

A program scores block after block with the queries in registers. The queries of a group are the columns of one product
of 8-bit integers: digits 0 to 15 times queries in fixed point. A query has two columns, 128 a + b. Sums are exact, so
only the queries are rounded, to a 32,512th of their largest number. The mean over a group is one query.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._operands import batch_and_head, load_norms, padded, row_ptr
from ..._overlap import release, wait
from ..._paged import load_row

STAGES = tl.constexpr(3)
LARGEST = tl.constexpr(127 * 128.0)  # largest fixed-point number of a query
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # Triton's interpreter cannot run inline assembly


@triton.jit
def known(b_total):
    """Sums of queries, NaN where they are infinite: then all their scores are NaN, which counts as ``-inf``."""
    return tl.where(tl.abs(b_total) < float("inf"), b_total, float("nan"))


@triton.jit
def find_sealed(i, m, p_table, p_ids, blocks):
    """The ``i``-th block where ``m``, of the row or of a list, and its physical block.

    That is -1 where there is none among the row's ``blocks`` sealed ones.
    """
    block = i
    if p_ids is not None:
        block = tl.load(p_ids + i, mask=m, other=-1)
        m = block >= 0
    return block, tl.load(p_table + block, mask=m & (block < blocks), other=-1)


@triton.jit
def _digits(b_code, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Bytes ``[ROWS, COLUMNS]`` as int8 ``[ROWS, 2 COLUMNS]``: a byte's low digit, its high one, the next byte's."""
    if COMPILED:  # four bytes at once; the compiler would take them one by one
        b_low = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [b_code], dtype=tl.int8, is_pure=True, pack=4
        )
        b_high = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 4; and.b32 $0, $0, 0x0F0F0F0F;", "=r,r", [b_code], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        b_low, b_high = (b_code & 15).to(tl.int8), (b_code >> 4).to(tl.int8)
    return tl.reshape(tl.join(b_low, b_high), [ROWS, 2 * COLUMNS])


@triton.jit(do_not_specialize=["rows", "blocks"])
def token_score_tensor_core_kernel(
    q,
    codes,
    pairs,
    channels,
    rows,
    table,
    ids,
    out,
    blocks,
    sinks,
    MEAN: tl.constexpr,
    EACH: tl.constexpr,
    FILL: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BG: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of ``BLOCKS`` blocks of one row and KV head.

    A token's codes are ``WIDTH`` bytes, one after the other.
    """
    wait(PDL)
    BW: tl.constexpr = padded(WIDTH)
    i_row = tl.program_id(1)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    sealed = load_row(rows, i_batch)[1] // BLOCK_SIZE
    first = tl.program_id(0) * BLOCKS
    end = tl.minimum(first + BLOCKS, blocks)
    if not FILL:
        end = tl.minimum(end, sealed)
        if first >= end:
            return

    # The queries in the order of _digits: a byte's low digit, then the high one, a channel of the second half.
    o_c, o_g = tl.arange(0, 2 * BW), tl.arange(0, BG)
    m_c, m_g = o_c // 2 < WIDTH, (o_g < GROUP)[None, :]
    o_r = o_c // 2 + o_c % 2 * WIDTH
    b_channel = tl.load(row_ptr(channels, i_batch, i_head) + o_r, mask=m_c, other=0)  # [2 BW]
    p_query = q.ptr + i_batch * q.batch + b_channel * q.dim
    if MEAN:  # in every column
        b_mean = tl.zeros([2 * BW], tl.float32)
        for i in tl.static_range(0, GROUP):
            b_mean += tl.load(p_query + (i_head * GROUP + i) * q.head, mask=m_c, other=0.0).to(tl.float32)
        b_q = (b_mean / GROUP)[:, None] + tl.zeros([2 * BW, BG], tl.float32)
    else:
        p_query = p_query[:, None] + (i_head * GROUP + o_g)[None, :] * q.head
        b_q = tl.load(p_query, mask=m_c[:, None] & m_g, other=0.0).to(tl.float32)  # [2 BW, BG]
    b_centre, b_spread = load_norms(channels, i_batch, i_head, o_r, m_c, 2 * WIDTH)  # [2 BW]
    b_constant = tl.sum(b_q * b_centre[:, None], 0)  # [BG]
    b_q *= b_spread[:, None]
    b_total = known(tl.sum(b_q, 0))  # [BG]
    b_unit = tl.maximum(tl.max(tl.abs(b_q), 0), 1e-30) / LARGEST  # [BG]
    b_whole = tl.floor(b_q / b_unit[None, :] + 0.5)  # -16256 .. 16256
    b_upper = tl.floor(b_whole * 0.0078125 + 0.5)  # -127 .. 127
    b_lower = b_whole - 128.0 * b_upper  # -64 .. 63
    b_parts = tl.reshape(tl.join(b_upper.to(tl.int8), b_lower.to(tl.int8)), [2 * BW, 2 * BG])

    o_t, o_w = tl.arange(0, BLOCK_SIZE), tl.arange(0, BW)
    m_w = (o_w < WIDTH)[None, :]
    p_code = codes.ptr + i_head * codes.head + o_t[:, None] * WIDTH + o_w[None, :]
    p_pair = pairs.ptr + i_head * pairs.head + o_t
    p_table = table.ptr + i_batch * table.row
    p_ids = None
    if ids is not None:
        p_ids = row_ptr(ids, i_batch, i_head)
    # The compiler prefetches the next blocks' physical ids and codes to shared memory. If registers carried them to the
    # next iteration, packed bytes would be unpacked.
    for i in tl.range(first, end, num_stages=STAGES):
        block, physical_id = find_sealed(i, i < end, p_table, p_ids, sealed)
        physical_id = physical_id.to(tl.int64)
        # Sinks are read with the others: their scores, which may be anything, are replaced.
        b_code = tl.load(p_code + physical_id * codes.block, mask=(physical_id >= 0) & m_w, other=0)
        b_pair = tl.load(p_pair + physical_id * pairs.block, mask=physical_id >= 0, other=0)
        m_usable = (physical_id >= 0) & (o_t >= sinks - block * BLOCK_SIZE)  # [BLOCK_SIZE]
        b_scale = (b_pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # [BLOCK_SIZE]
        b_zero = (b_pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # [BLOCK_SIZE]
        b_both = tl.dot(_digits(b_code, BLOCK_SIZE, BW), b_parts)  # [BLOCK_SIZE, 2 BG]
        b_first, b_second = tl.split(tl.reshape(b_both, [BLOCK_SIZE, BG, 2]))
        b_all = (b_first * 128 + b_second).to(tl.float32)  # below 2 ** 24: exact
        # label = digit * scale + zero, so q . label = scale * (q . digits) + zero * sum(q)
        b_all = b_scale[:, None] * (b_all * b_unit[None, :]) + b_zero[:, None] * b_total[None, :]
        b_all += b_constant[None, :]
        if EACH:
            b_s = tl.where(m_usable[:, None] & (b_all == b_all), b_all, float("-inf"))  # [BLOCK_SIZE, BG]
            p_to = row_ptr(out, i_batch, i_head * GROUP + o_g)[None, :] + i * BLOCK_SIZE + o_t[:, None]
            tl.store(p_to, b_s, mask=m_g)
        else:
            b_s = tl.max(tl.where(m_g, b_all, float("-inf")), 1)  # [BLOCK_SIZE]; NaN only if all are
            b_s = tl.where(m_usable & (b_s == b_s), b_s, float("-inf"))
            tl.store(row_ptr(out, i_batch, i_head) + i * BLOCK_SIZE + o_t, b_s)
    release(PDL)
