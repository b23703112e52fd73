"""What blocks should hold, and the walk over what has been read where that tells what is left: the kernels.

One program a row and KV head walks. What its scores say about the blocks left is summed up from the back once a step,
so a verification reads what is known of the blocks read, and nothing of the others unless it has to go on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._overlap import begin
from ..sparse_decode.merge import LOG2E
from .reference import MOST
from .verify_kernel import NOWHERE

MOST = tl.constexpr(MOST)


@triton.jit
def _over_heads(b_log, SUM: tl.constexpr):
    """With ``SUM``: in each row of ``[BG, BN]`` the logarithm of the sum over all of them."""
    if SUM:
        b_top = tl.max(b_log, 0)
        b_top = tl.where(b_top == float("-inf"), 0.0, b_top)[None, :]
        b_log = tl.log2(tl.sum(tl.exp2(b_log - b_top), 0)[None, :]) + b_top + tl.zeros_like(b_log)
    return b_log


@triton.jit
def _finite(x):
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def expect_kernel(
    p_logits,
    p_ids,
    p_tokens,
    p_expected,
    p_left,
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
    p_left += i_row.to(tl.int64) * n * GROUP
    p_logits += i_batch * logits_batch + i_head * GROUP * logits_head
    b_top = tl.full([BG], float("-inf"), tl.float32)  # sums are relative to the largest so far
    b_sum = tl.zeros([BG], tl.float32)
    for i in range(0, tl.cdiv(n, BN)):
        o_i = (tl.cdiv(n, BN) - 1 - i) * BN + o_n
        b_id = tl.load(p_ids + o_i, mask=o_i < n, other=-1)  # [BN]
        b_tokens = tl.load(p_tokens + o_i, mask=o_i < n, other=0)  # [BN]
        m_b = m_g[:, None] & ((b_id >= 0) & (b_tokens > 0))[None, :]
        b_logit = tl.load(p_logits + o_g[:, None] * logits_head + b_id[None, :], mask=m_b, other=0.0)  # [BG, BN]
        b_log = tl.log2(tl.maximum(b_tokens, 1).to(tl.float32))
        b_e = tl.where(m_b, b_logit * (logit_scale * LOG2E) + b_log[None, :], float("-inf"))
        b_e = _over_heads(b_e, SUM)
        b_new = tl.maximum(b_top, tl.max(b_e, 1))
        b_base = _finite(b_new)
        b_sum *= tl.exp2(b_top - b_base)
        b_w = tl.exp2(b_e - b_base[:, None])
        b_all = tl.cumsum(b_w, 1, reverse=True) + b_sum[:, None]
        o_out = o_g[:, None] * n + o_i[None, :]
        m_out = m_g[:, None] & (o_i < n)[None, :]
        tl.store(p_expected + o_out, b_e, mask=m_out)
        tl.store(p_left + o_out, tl.log2(b_all) + b_base[:, None], mask=m_out)
        b_sum += tl.sum(b_w, 1)
        b_top = b_new


@triton.jit(do_not_specialize=["parts", "rows", "min_blocks", "max_blocks", "step", "number"])
def verify_expected_kernel(
    p_lse,
    p_tokens,
    p_limits,
    p_used,
    p_mass,
    p_sink,
    p_expected,
    p_left,
    p_done,
    n,
    parts,
    rows,
    threshold,
    min_blocks,
    max_blocks,
    step,
    number,
    LAST: tl.constexpr,
    SUM: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_DONE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BG: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    PDL: tl.constexpr,
):
    """See ``reference.verify``: with ``SCALED`` as ``"scores"``, else as ``"bound"``."""
    begin(PDL)
    i_row = tl.program_id(0)
    low, high = tl.load(p_limits + i_row), tl.load(p_limits + rows + i_row)
    p_tokens += i_row.to(tl.int64) * n
    p_lse += i_row.to(tl.int64) * (parts + n) * GROUP
    p_expected += i_row.to(tl.int64) * n * GROUP
    p_left += i_row.to(tl.int64) * n * GROUP
    stops = low >= high
    # On their way while the limits are; rounds with nothing to do wait for neither.
    o_g, o_n, o_p = tl.arange(0, BG), tl.arange(0, BN), tl.arange(0, BP)
    m_g = o_g < GROUP
    m_near = m_g[:, None] & (o_p < parts)[None, :]
    b_near = tl.load(p_lse + o_p[None, :] * GROUP + o_g[:, None], mask=m_near, other=float("-inf"))  # [BG, BP]
    if HAS_SINK:
        b_sink = tl.load(p_sink + (i_row % HEADS) * GROUP + o_g, mask=m_g, other=float("-inf")).to(tl.float32)
    if low < high:
        b_live = tl.zeros([BT], tl.int32)
        for i in range(0, n, BT):
            o_t = i + tl.arange(0, BT)
            b_live += (tl.load(p_tokens + o_t, mask=o_t < n, other=0) > 0).to(tl.int32)  # [BT]
        cap = tl.minimum(tl.sum(b_live, 0), max_blocks)
        high = tl.minimum(high, cap)
        b_near = _over_heads(b_near, SUM)
        b_base = tl.max(b_near, 1)  # [BG]: masses are relative to the largest so far
        b_seen = tl.sum(tl.exp2(b_near - _finite(b_base)[:, None]), 1)
        if HAS_SINK:
            b_own = tl.max(_over_heads(b_sink[:, None] * LOG2E, SUM), 1)
            b_new = tl.maximum(b_base, b_own)
            b_seen = b_seen * tl.exp2(b_base - _finite(b_new)) + tl.exp2(b_own - _finite(b_new))
            b_base = b_new
        b_most = tl.full([BG], float("-inf"), tl.float32)  # times what was expected that a block holds
        b_times = tl.zeros([BG], tl.float32)  # sum of these over what has been read, relative to the largest
        p_blocks = p_lse + parts * GROUP
        stop = high * 0 + NOWHERE
        found = tl.full([], 1.0, tl.float32)
        i = high * 0
        while (i < high) & (stop == NOWHERE):
            o_i = i + o_n
            o_in = o_g[:, None] * n + o_i[None, :]
            m_in = m_g[:, None] & (o_i < high)[None, :]
            b_l = tl.load(p_blocks + o_i[None, :] * GROUP + o_g[:, None], mask=m_in, other=float("-inf"))  # [BG, BN]
            m_behind = m_in & (o_i + 1 < n)[None, :]
            b_rest = tl.load(p_left + o_in + 1, mask=m_behind, other=float("-inf"))  # [BG, BN]
            b_l = _over_heads(b_l, SUM)
            b_new = tl.maximum(b_base, tl.max(b_l, 1))
            b_one = _finite(b_new)
            b_seen *= tl.exp2(b_base - b_one)
            b_w = tl.exp2(b_l - b_one[:, None])
            b_acc = b_seen[:, None] + tl.cumsum(b_w, 1)  # [BG, BN]
            if SCALED:
                b_e = tl.load(p_expected + o_in, mask=m_in, other=float("-inf"))  # [BG, BN]
                b_r = tl.where(b_e > float("-inf"), b_l - b_e, float("-inf"))
                b_high = tl.maximum(b_most, tl.max(b_r, 1))
                b_times *= tl.exp2(b_most - _finite(b_high))
                b_r = tl.exp2(b_r - _finite(b_high)[:, None])
                b_mean = (b_times[:, None] + tl.cumsum(b_r, 1)) / (o_i + 1).to(tl.float32)[None, :]
                b_rest += tl.log2(b_mean) + _finite(b_high)[:, None]
                b_times += tl.sum(b_r, 1)
                b_most = b_high
            b_whole = b_acc + tl.exp2(tl.minimum(b_rest - b_one[:, None], MOST))
            b_share = tl.where((b_whole > 0) & m_g[:, None], b_acc / b_whole, 1.0)
            b_worst = tl.min(b_share, 0)  # [BN]
            m_stop = (b_worst > threshold) & (o_i < high) & (o_i + 1 >= min_blocks)
            first = tl.min(tl.where(m_stop, o_i, NOWHERE), 0)
            stop = tl.where(first < NOWHERE, first + 1, stop)
            at = tl.minimum(first, high - 1)  # that of the last block read, if none is enough
            found = tl.where(at < i + BN, tl.sum(tl.where(o_i == at, b_worst, 0.0), 0), found)
            b_seen += tl.sum(b_w, 1)
            b_base = b_new
            i += BN

        reach = tl.minimum(stop, cap)
        stops = (reach <= high) | (high >= cap)
        if LAST:
            stops = stops | True
        onward = high
        if (reach > high) & (high < cap):
            # The first block behind which so little is left, if the others hold what is expected of them.
            b_limit = tl.log2(b_seen * (1.0 - threshold) / threshold) + _finite(b_base)  # [BG]
            if SCALED:
                b_behind = tl.load(p_left + o_g * n + high, mask=m_g, other=float("-inf"))
                b_scale = tl.log2(b_times / high.to(tl.float32)) + _finite(b_most)
                b_all = b_seen + tl.exp2(tl.minimum(b_behind + b_scale - _finite(b_base), MOST))
                b_limit = tl.log2(b_all * (1.0 - threshold)) + _finite(b_base) - b_scale
            b_short = tl.zeros([BN], tl.int32)
            for j in range(high, cap, BN):
                o_j = j + o_n
                m_j = m_g[:, None] & (o_j + 1 < n)[None, :]
                b_rest = tl.load(p_left + o_g[:, None] * n + o_j[None, :] + 1, mask=m_j, other=float("-inf"))
                m_more = (b_rest >= b_limit[:, None]) & m_g[:, None]
                m_more = (tl.max(m_more.to(tl.int32), 0) > 0) | (o_j + 1 < min_blocks)
                b_short += (m_more & (o_j < cap)).to(tl.int32)
            reach = tl.minimum(high + tl.sum(b_short, 0) + 1, cap)
            if SCALED:
                more = tl.where(step < 0, reach + (reach - high) // 4 + 8, tl.where(step > 0, high + step, cap))
            else:
                more = tl.where(step < 0, 2 * high + 16, tl.where(step > 0, high + step, cap))
                more = tl.minimum(more, reach + 2)
            onward = tl.minimum(more, cap)
        tl.store(p_limits + i_row, high)
        tl.store(p_limits + rows + i_row, tl.where(stops, high, onward))
        tl.store(p_used + i_row, tl.minimum(reach, high), mask=stops)
        tl.store(p_mass + i_row, found, mask=stops)
    if HAS_DONE:
        tl.store(p_done + i_row, tl.where(stops, -number, number))
