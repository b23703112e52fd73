"""The sum of the used blocks, and what the next step needs to know: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from .._overlap import begin
from ..sparse_decode.merge import LOG2E


@triton.jit
def _count(
    p_ids,
    p_tokens,
    p_near_valid,
    p_limits,
    p_mass,
    p_totals,
    p_chosen,
    p_attended,
    i_row,
    used,
    n,
    near,
    rows,
    room,
    threshold,
    max_blocks,
    near_valid_batch,
    attended_batch,
    attended_head,
    HAS_ATTENDED: tl.constexpr,
    HAS_CHOSEN: tl.constexpr,
    MASS_ONE: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    BINS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """What is counted of one row and KV head, and what its next step begins with."""
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    o_t = tl.arange(0, 512)
    p_ids += i_row.to(tl.int64) * n
    p_tokens += i_row.to(tl.int64) * n
    read, mass = tl.load(p_limits + rows + i_row), tl.load(p_mass + i_row)
    b_count, b_live = tl.zeros([512], tl.int32), tl.zeros([512], tl.int32)
    for i in range(0, n, 512):
        b_tokens = tl.load(p_tokens + i + o_t, mask=i + o_t < n, other=0)  # [512]
        b_live += (b_tokens > 0).to(tl.int32)
        b_count += tl.where(i + o_t < used, b_tokens, 0)
    if HAS_ATTENDED:
        for i in range(0, near, 512):
            b_valid = tl.load(p_near_valid + i_batch * near_valid_batch + i + o_t, mask=i + o_t < near, other=0)
            b_count += (b_valid != 0).to(tl.int32)
        p_mine = p_attended + i_batch * attended_batch + i_head * attended_head
        tl.store(p_mine, tl.load(p_mine) + tl.sum(b_count, 0))
    capped = (tl.sum(b_live, 0) > used) & (mass <= threshold) & (used == max_blocks)
    gap = ((1.0 - mass) * MASS_ONE).to(tl.int64)
    one = (used * 0 + 1).to(tl.int64)
    tl.atomic_add(p_totals, one, sem="relaxed")
    tl.atomic_add(p_totals + 1, used.to(tl.int64), sem="relaxed")
    tl.atomic_add(p_totals + 2, read.to(tl.int64), sem="relaxed")
    tl.atomic_add(p_totals + 3, capped.to(tl.int64), sem="relaxed")
    tl.atomic_add(p_totals + 4, one * MASS_ONE - gap, sem="relaxed")
    tl.atomic_max(p_totals + 5, gap, sem="relaxed")
    o_bin = tl.arange(0, 32)
    b_power = tl.full([32], 1, tl.int32) << tl.minimum(o_bin, 30)
    at = tl.sum(((o_bin < BINS - 1) & (b_power <= used - 1)).to(tl.int32), 0)
    tl.atomic_add(p_totals + FIRST_BIN + at, one, sem="relaxed")
    ahead = tl.minimum(used + used // 8 + 8, max_blocks)
    tl.store(p_limits + i_row, 0)
    tl.store(p_limits + rows + i_row, ahead)
    if HAS_CHOSEN:
        for i in range(0, room, 512):
            b_id = tl.load(p_ids + i + o_t, mask=i + o_t < tl.minimum(ahead, n), other=-1)
            tl.store(p_chosen + i_row.to(tl.int64) * room + i + o_t, b_id, mask=i + o_t < room)


@triton.jit(do_not_specialize=["parts", "near", "rows", "room", "max_blocks"])
def merge_kernel(
    p_acc,
    p_lse,
    p_ids,
    p_tokens,
    p_near_valid,
    p_limits,
    p_used,
    p_mass,
    p_totals,
    p_chosen,
    p_sink,
    p_attended,
    p_out,
    n,
    parts,
    near,
    rows,
    room,
    threshold,
    max_blocks,
    near_valid_batch,
    attended_batch,
    attended_head,
    out_batch,
    out_head,
    HAS_ACC: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_ATTENDED: tl.constexpr,
    HAS_CHOSEN: tl.constexpr,
    MASS_ONE: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    BINS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some channels of one query head; the first program of a row and KV head counts as well, or alone."""
    begin(PDL)
    i_row, i_g, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    used = tl.load(p_used + i_row)
    if HAS_ACC:
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = o_v < DV
        total = tl.full([], 0.0, tl.float32)
        best = tl.full([], float("-inf"), tl.float32)
        if HAS_SINK:  # a learned sink is weight without a value
            best = tl.load(p_sink + i_head * GROUP + i_g).to(tl.float32) * LOG2E
            total = tl.where(best == float("-inf"), 0.0, 1.0)
        b_acc = tl.zeros([BV], tl.float32)
        taken = parts + used
        for i in tl.range(0, taken, BS, num_stages=STAGES):
            o_s = i + tl.arange(0, BS)
            o_in = (i_row.to(tl.int64) * (parts + n) + o_s) * GROUP + i_g
            b_lse = tl.load(p_lse + o_in, mask=o_s < taken, other=float("-inf"))  # [BS]
            b_part = tl.load(
                p_acc + o_in[:, None] * DV + o_v[None, :], mask=(o_s < taken)[:, None] & m_v[None, :], other=0.0
            )  # [BS, BV]
            new = tl.maximum(best, tl.max(b_lse, 0))
            base = tl.where(new == float("-inf"), 0.0, new)
            b_w = tl.exp2(b_lse - base)  # [BS]
            keep = tl.exp2(best - base)
            total = total * keep + tl.sum(b_w, 0)
            b_acc = b_acc * keep + tl.sum(b_w[:, None] * b_part, 0)
            best = new
        b_out = b_acc / tl.where(total > 0, total, 1.0)
        p_to = p_out + i_batch * out_batch + (i_head * GROUP + i_g) * out_head + o_v
        tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=m_v)
    if (i_g == 0) & (i_v == 0):
        _count(
            p_ids,
            p_tokens,
            p_near_valid,
            p_limits,
            p_mass,
            p_totals,
            p_chosen,
            p_attended,
            i_row,
            used,
            n,
            near,
            rows,
            room,
            threshold,
            max_blocks,
            near_valid_batch,
            attended_batch,
            attended_head,
            HAS_ATTENDED,
            HAS_CHOSEN,
            MASS_ONE,
            FIRST_BIN,
            BINS,
            HEADS,
        )
