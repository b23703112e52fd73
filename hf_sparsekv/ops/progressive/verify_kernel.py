"""The walk over what has been read, with PSA's estimate of what is left: the kernel.

One program a row and KV head, chunk by chunk of its ranked blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._overlap import begin
from ..sparse_decode.merge import LOG2E

NOWHERE = tl.constexpr(1 << 30)  # a rank that no block has


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _mass(b_log, b_base, SUM: tl.constexpr, BG: tl.constexpr):
    """``[BN, BG]`` masses; with ``SUM`` each column holds their sum."""
    b_m = tl.exp2(b_log - b_base[None, :])
    if SUM:
        b_m = tl.sum(b_m, 1)[:, None] + tl.zeros_like(b_m)
    return b_m


@triton.jit(do_not_specialize=["parts", "rows", "min_blocks", "max_blocks", "step", "number"])
def verify_kernel(
    p_lse,
    p_tokens,
    p_limits,
    p_used,
    p_mass,
    p_sink,
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
    """See ``reference.verify``: ``"as_min"``."""
    begin(PDL)
    i_row = tl.program_id(0)
    low, high = tl.load(p_limits + i_row), tl.load(p_limits + rows + i_row)
    p_tokens += i_row.to(tl.int64) * n
    p_lse += i_row.to(tl.int64) * (parts + n) * GROUP
    stops = low >= high
    if low < high:
        o_g, o_n, o_p = tl.arange(0, BG), tl.arange(0, BN), tl.arange(0, BP)
        m_g = o_g < GROUP
        # How many blocks there are, and their tokens.
        b_live, b_total = tl.zeros([BT], tl.int32), tl.zeros([BT], tl.int32)
        for i in range(0, n, BT):
            o_t = i + tl.arange(0, BT)
            b_t = tl.load(p_tokens + o_t, mask=o_t < n, other=0)  # [BT]
            b_live += (b_t > 0).to(tl.int32)
            b_total += b_t
        cap = tl.minimum(tl.sum(b_live, 0), max_blocks)
        total = tl.sum(b_total, 0).to(tl.float32)
        high = tl.minimum(high, cap)

        # All masses are relative to the largest one.
        b_near = tl.load(
            p_lse + o_p[:, None] * GROUP + o_g[None, :], mask=(o_p < parts)[:, None] & m_g[None, :], other=float("-inf")
        )  # [BP, BG]
        b_base = tl.max(b_near, 0)  # [BG]
        if HAS_SINK:
            b_sink = (
                tl.load(p_sink + (i_row % HEADS) * GROUP + o_g, mask=m_g, other=float("-inf")).to(tl.float32) * LOG2E
            )
            b_base = tl.maximum(b_base, b_sink)
        p_blocks = p_lse + parts * GROUP
        for i in range(0, high, BN):
            m_l = (i + o_n < high)[:, None] & m_g[None, :]
            b_l = tl.load(p_blocks + (i + o_n)[:, None] * GROUP + o_g[None, :], mask=m_l, other=float("-inf"))
            b_base = tl.maximum(b_base, tl.max(b_l, 0))
        if SUM:
            b_base = tl.max(b_base, 0) + tl.zeros_like(b_base)
        b_base = tl.where(b_base == float("-inf"), 0.0, b_base)
        b_seen = tl.sum(_mass(b_near, b_base, SUM, BG), 0)  # [BG]
        if HAS_SINK:
            b_own = tl.exp2(b_sink - b_base)
            b_seen += tl.sum(b_own, 0) if SUM else b_own

        b_min = tl.full([BG], float("inf"), tl.float32)
        taken = total * 0.0
        stop = high * 0 + NOWHERE
        found, at_high = total * 0.0 + 1.0, total * 0.0 + 1.0
        i = high * 0
        while (i < cap) & (stop == NOWHERE):
            o_i = i + o_n
            m_known = o_i < high
            b_t = tl.load(p_tokens + o_i, mask=o_i < cap, other=0).to(tl.float32)  # [BN]
            b_l = tl.load(
                p_blocks + o_i[:, None] * GROUP + o_g[None, :],
                mask=m_known[:, None] & m_g[None, :],
                other=float("-inf"),
            )  # [BN, BG]
            b_w = _mass(b_l, b_base, SUM, BG)
            b_density = tl.where(m_known[:, None], b_w / tl.maximum(b_t, 1.0)[:, None], float("inf"))
            b_all = tl.minimum(b_min, tl.min(b_density, 0))  # [BG]: of all that has been read
            b_w = tl.where(m_known[:, None], b_w, b_all[None, :] * b_t[:, None])
            b_run = tl.minimum(tl.associative_scan(b_density, 0, _least), b_min[None, :])  # [BN, BG]
            b_left = total - taken - tl.cumsum(b_t, 0)  # [BN]
            b_rest = b_run * b_left[:, None]
            b_min = b_all
            b_acc = b_seen[None, :] + tl.cumsum(b_w, 0)  # [BN, BG]
            b_whole = b_acc + b_rest
            b_share = tl.where((b_whole > 0) & m_g[None, :], b_acc / b_whole, 1.0)
            b_worst = tl.min(b_share, 1)  # [BN]
            m_stop = (b_worst > threshold) & (o_i < cap) & (o_i + 1 >= min_blocks)
            first = tl.min(tl.where(m_stop, o_i, NOWHERE), 0)
            stop = tl.where(first < NOWHERE, first + 1, stop)
            found = tl.where(first < NOWHERE, tl.sum(tl.where(o_i == first, b_worst, 0.0), 0), found)
            inside = (high > i) & (high <= i + BN)
            at_high = tl.where(inside, tl.sum(tl.where(o_i == high - 1, b_worst, 0.0), 0), at_high)
            b_seen += tl.sum(b_w, 0)
            taken += tl.sum(b_t, 0)
            i += BN

        reach = tl.minimum(stop, cap)
        stops = (reach <= high) | (high >= cap)
        if LAST:
            stops = stops | True
        more = tl.where(step < 0, 2 * high + 16, tl.where(step > 0, high + step, cap))
        onward = tl.minimum(tl.minimum(more, reach + 2), cap)
        tl.store(p_limits + i_row, high)
        tl.store(p_limits + rows + i_row, tl.where(stops, high, onward))
        tl.store(p_used + i_row, tl.minimum(reach, high), mask=stops)
        tl.store(p_mass + i_row, tl.where(stop <= high, found, at_high), mask=stops)
    if HAS_DONE:
        tl.store(p_done + i_row, tl.where(stops, -number, number))
