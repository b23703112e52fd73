"""What blocks should hold, and the walk over what has been read where that tells what is left: the kernels.

One program a row and KV head walks. What its scores say about the blocks left is summed up from the back once a step,
so a verification reads what is known of the blocks read, and nothing of the others unless it has to go on. Kernels wait
for it, so what counts there is the longest chain of what waits for each other: all of the first tile is asked for
before it is known how much of it counts, near parts are ranks before the first, a thread has all heads of a block, and
masses and ratios go through the same reduction and the same scan.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._overlap import begin, release, wait
from ..sparse_decode.merge import LOG2E
from .reference import LARGEST as _LARGEST
from .reference import MOST

EXP2_MOST = tl.constexpr(2.0**MOST)
MOST = tl.constexpr(MOST)
LARGEST = tl.constexpr(_LARGEST)
NOWHERE = tl.constexpr(1 << 30)  # a rank that no block has
HALF = tl.constexpr(126.0)  # its square times any mean that is not zero is more than 2 ** MOST


@triton.jit
def _finite(x):
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _over_heads(b_log, SUM: tl.constexpr):
    """With ``SUM``: in each column of ``[BN, BG]`` the logarithm of the sum over all of them."""
    if SUM:
        b_top = _finite(tl.max(b_log, 1))[:, None]
        b_log = tl.log2(tl.sum(tl.exp2(b_log - b_top), 1)[:, None]) + b_top + tl.zeros_like(b_log)
    return b_log


@triton.jit
def _ordered(x):
    """Integers in the order of floats, or such integers' bits: a warp finds its largest integer in one instruction."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _largest(x):
    """Along the first dimension."""
    return _ordered(tl.max(_ordered(x.to(tl.int32, bitcast=True)), 0)).to(tl.float32, bitcast=True)


@triton.jit
def expect_kernel(
    p_logits,
    p_ids,
    p_tokens,
    p_expected,
    p_behind,
    p_live,
    n,
    logit_scale,
    logits_batch,
    logits_head,
    SUM: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BG: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BG`` query heads of a row and KV head, from the last block to the first; see ``reference.expect``."""
    begin(PDL)
    i_row = tl.program_id(0)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    o_g, o_n = tl.program_id(1) * BG + tl.arange(0, BG), tl.arange(0, BN)
    m_g = o_g < GROUP
    p_ids += i_row.to(tl.int64) * n
    p_tokens += i_row.to(tl.int64) * n
    p_expected += i_row.to(tl.int64) * n * GROUP
    p_behind += i_row.to(tl.int64) * n * GROUP
    p_logits += i_batch * logits_batch + i_head * GROUP * logits_head
    b_top = tl.full([BG], float("-inf"), tl.float32)  # sums are relative to the largest so far
    b_sum = tl.zeros([BG], tl.float32)
    b_live = tl.zeros([BN], tl.int32)
    for i in range(0, tl.cdiv(n, BN)):
        o_i = (tl.cdiv(n, BN) - 1 - i) * BN + o_n
        b_id = tl.load(p_ids + o_i, mask=o_i < n, other=-1)  # [BN]
        b_tokens = tl.load(p_tokens + o_i, mask=o_i < n, other=0)  # [BN]
        b_live += (b_tokens > 0).to(tl.int32)
        m_b = ((b_id >= 0) & (b_tokens > 0))[:, None] & m_g[None, :]
        b_logit = tl.load(p_logits + o_g[None, :] * logits_head + b_id[:, None], mask=m_b, other=0.0)  # [BN, BG]
        b_log = tl.log2(tl.maximum(b_tokens, 1).to(tl.float32))
        b_e = b_logit * (logit_scale * LOG2E) + b_log[:, None]
        b_e = tl.where(m_b & (b_e == b_e), tl.minimum(b_e, LARGEST), float("-inf"))
        b_e = _over_heads(b_e, SUM)
        b_new = tl.maximum(b_top, tl.max(b_e, 0))
        b_base = _finite(b_new)
        b_sum *= tl.exp2(b_top - b_base)
        b_w = tl.exp2(b_e - b_base[None, :])
        b_all = tl.cumsum(b_w, 0, reverse=True) + b_sum[None, :]
        o_out = o_i[:, None] * GROUP + o_g[None, :]
        tl.store(p_expected + o_out, b_e, mask=(o_i < n)[:, None] & m_g[None, :])
        # What is left with a block is behind the one before it.
        m_out = ((o_i > 0) & (o_i < n))[:, None] & m_g[None, :]
        tl.store(p_behind + o_out - GROUP, tl.log2(b_all) + b_base[None, :], mask=m_out)
        b_sum += tl.sum(b_w, 0)
        b_top = b_new
    tl.store(p_behind + (n - 1) * GROUP + o_g, tl.full([BG], float("-inf"), tl.float32), mask=m_g)
    tl.store(p_live + i_row, tl.sum(b_live, 0), mask=tl.program_id(1) == 0)


@triton.jit
def _take(
    p_lse,
    p_expected,
    p_behind,
    o_i,
    n,
    GROUP: tl.constexpr,
    BG: tl.constexpr,
    NOW: tl.constexpr,
):
    """What is known of the parts and blocks of these ranks, each ``[BN, BG]``: held, expected, expected behind.

    ``NOW``: the compiler may not move these reads to where it is known whether they are needed (hence volatile).
    """
    o_g = tl.arange(0, BG)
    o_in = o_i[:, None] * GROUP + o_g[None, :]
    m_l = (o_i < n)[:, None] & (o_g < GROUP)[None, :]
    m_b = ((o_i >= 0) & (o_i < n))[:, None] & (o_g < GROUP)[None, :]
    b_l = tl.load(p_lse + o_in, mask=m_l, other=float("-inf"), volatile=NOW)
    b_rest = tl.load(p_behind + o_in, mask=m_b, other=float("-inf"), volatile=NOW)
    b_e = tl.load(p_expected + o_in, mask=m_b, other=float("-inf"), volatile=NOW)
    return b_l, b_e, b_rest


@triton.jit
def _walk(
    b_l,
    b_e,
    b_rest,
    b_top,
    b_sum,
    o_i,
    high,
    threshold,
    min_blocks,
    FIRST: tl.constexpr,
    SUM: tl.constexpr,
    GROUP: tl.constexpr,
    BG: tl.constexpr,
):
    """Walk over one tile, of which the ranks below ``high`` have been read.

    Masses, and beside them their ratios to what was expected, are relative to the largest so far.

    Args:
        b_l, b_e, b_rest: of :func:`_take`.
        b_top, b_sum: ``[BG, 2]``: largest logarithms of the tiles before, and sums; not used if ``FIRST``.

    Returns:
        2 * rank of the first block that is enough; else 2 * rank + 1 of the last block read; else ``NOWHERE``. Then the
        share after each block (the least of the heads'), masses and ratios, and ``b_top`` and ``b_sum`` relative to it.
    """
    m_g = tl.arange(0, BG) < GROUP
    b_x = _over_heads(tl.where((o_i < high)[:, None] & m_g[None, :], b_l, float("-inf")), SUM)
    b_x = tl.join(b_x, tl.where(b_e > float("-inf"), b_x - b_e, float("-inf")))  # [BN, BG, 2]
    b_new = _largest(b_x)
    if FIRST:
        b_sum = tl.zeros_like(b_new)
    else:
        b_new = tl.maximum(b_top, b_new)
        b_sum *= tl.exp2(b_top - _finite(b_new))
    b_one = tl.broadcast_to(_finite(b_new)[None], b_x.shape)
    b_x = tl.exp2(b_x - b_one)
    b_acc = tl.cumsum(b_x, 0)
    if not FIRST:
        b_acc += b_sum[None]
    b_acc, b_times = tl.split(b_acc)  # [BN, BG] each
    b_one, b_most = tl.split(b_one)
    # Mean ratio times what was expected, without logarithms: in two halves, since by itself the second factor may be
    # more than a float holds where the first one is next to nothing.
    b_mean = b_times * (1.0 / tl.maximum(o_i + 1, 1).to(tl.float32))[:, None]
    b_half = tl.exp2(tl.minimum((b_rest + b_most - b_one) * 0.5, HALF))
    b_after = tl.minimum(b_half * b_mean * b_half, EXP2_MOST)
    b_whole = b_acc + b_after
    b_share = tl.where((b_whole > 0) & m_g[None, :], b_acc / b_whole, 1.0)
    b_worst = tl.min(b_share, 1)  # [BN]
    m_stop = (b_worst > threshold) & (o_i >= 0) & (o_i < high) & (o_i + 1 >= min_blocks)
    m_last = (o_i >= 0) & (o_i + 1 == high)
    key = tl.min(tl.where(m_stop, 2 * o_i, tl.where(m_last, 2 * o_i + 1, NOWHERE)), 0)
    return key, b_worst, b_x, b_new, b_sum


@triton.jit(do_not_specialize=["parts", "rows", "min_blocks", "max_blocks"])
def verify_expected_kernel(
    p_lse,
    p_limits,
    p_used,
    p_mass,
    p_sink,
    p_expected,
    p_behind,
    p_live,
    n,
    parts,
    rows,
    threshold,
    min_blocks,
    max_blocks,
    LAST: tl.constexpr,
    CERTAIN: tl.constexpr,
    SUM: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BG: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """See ``reference.verify``: ``"scores"``."""
    release(PDL)
    i_row = tl.program_id(0)
    o_g, o_n = tl.arange(0, BG), tl.arange(0, BN)
    m_g = o_g < GROUP
    p_lse += (i_row.to(tl.int64) * (parts + n) + parts) * GROUP  # of the first block: the parts have ranks below 0
    p_expected += i_row.to(tl.int64) * n * GROUP
    p_behind += i_row.to(tl.int64) * n * GROUP
    wait(PDL)
    b_l, b_e, b_rest = _take(p_lse, p_expected, p_behind, o_n - parts, n, GROUP, BG, True)
    cap = tl.minimum(tl.load(p_live + i_row, volatile=True), max_blocks)
    low, high = tl.load(p_limits + i_row), tl.load(p_limits + rows + i_row)
    b_top = tl.full([BG], float("-inf"), tl.float32)
    if HAS_SINK:
        b_top = tl.load(p_sink + (i_row % HEADS) * GROUP + o_g, mask=m_g, other=float("-inf")).to(tl.float32) * LOG2E
        if SUM:
            top = _finite(tl.max(b_top, 0))
            b_top = tl.zeros([BG], tl.float32) + tl.log2(tl.sum(tl.exp2(b_top - top), 0)) + top
    b_sum = tl.full([BG], 1.0, tl.float32)
    b_top = tl.join(b_top, tl.full([BG], float("-inf"), tl.float32))  # [BG, 2]
    b_sum = tl.join(b_sum, tl.zeros([BG], tl.float32))
    if low < high:
        high = tl.minimum(high, cap)
        i = -parts
        key, b_worst, b_x, b_top, b_sum = _walk(
            b_l, b_e, b_rest, b_top, b_sum, i + o_n, high, threshold, min_blocks, not HAS_SINK, SUM, GROUP, BG
        )
        while (key == NOWHERE) & (i + BN < high):
            b_sum += tl.sum(b_x, 0)
            i += BN
            b_l, b_e, b_rest = _take(p_lse, p_expected, p_behind, i + o_n, n, GROUP, BG, False)
            key, b_worst, b_x, b_top, b_sum = _walk(
                b_l, b_e, b_rest, b_top, b_sum, i + o_n, high, threshold, min_blocks, False, SUM, GROUP, BG
            )
        at = key >> 1
        stop = tl.where(((key & 1) == 0) & (key < NOWHERE), at + 1, NOWHERE)
        reach = tl.minimum(stop, cap)
        stops = (reach <= high) | (high >= cap)
        onward = high
        if LAST:
            stops = stops | True
        else:
            if (reach > high) & (high < cap):
                # The first block behind which so little is left, if the others hold what is expected of them.
                b_sum += tl.sum(b_x, 0)
                b_seen, b_times = tl.split(b_sum)
                b_base, b_most = tl.split(_finite(b_top))
                b_behind = tl.load(p_behind + (high - 1) * GROUP + o_g, mask=m_g, other=float("-inf"))
                b_scale = tl.log2(b_times / high.to(tl.float32)) + b_most
                b_all = b_seen + tl.exp2(tl.minimum(b_behind + b_scale - b_base, MOST))
                b_limit = tl.log2(b_all * (1.0 - threshold)) + b_base - b_scale  # [BG]
                b_short = tl.zeros([BN], tl.int32)
                for j in range(high, cap, BN):
                    o_j = j + o_n
                    m_j = (o_j < n)[:, None] & m_g[None, :]
                    b_left = tl.load(p_behind + o_j[:, None] * GROUP + o_g[None, :], mask=m_j, other=float("-inf"))
                    m_more = (b_left >= b_limit[None, :]) & m_g[None, :]
                    m_more = (tl.max(m_more.to(tl.int32), 1) > 0) | (o_j + 1 < min_blocks)
                    b_short += (m_more & (o_j < cap)).to(tl.int32)
                reach = tl.minimum(high + tl.sum(b_short, 0) + 1, cap)
                onward = cap if CERTAIN else tl.minimum(reach + (reach - high) // 4 + 8, cap)
        # By the thread that has it, instead of a reduction; a row without blocks has seen all of its mass.
        tl.store(p_mass + i_row + o_n * 0, b_worst, mask=(i + o_n == at) & stops)
        tl.store(p_mass + i_row, 1.0, mask=high == 0)
        tl.store(p_limits + i_row, high)
        tl.store(p_limits + rows + i_row, tl.where(stops, high, onward))
        tl.store(p_used + i_row, tl.minimum(reach, high), mask=stops)
