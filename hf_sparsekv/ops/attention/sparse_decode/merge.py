"""Combine the parts of an attention that was split over several programs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..._operands import Rows, batch_and_head, operand, row_ptr
from ..._overlap import begin, launch

LOG2E = tl.constexpr(1.4426950408889634)


def tile(value_dim: int, each: int) -> tuple[int, int, int]:
    """Parts at a time, channels and warps of a program, where a row and KV head have some ``each`` parts.

    Few lists have many parts each (66 for one row of 8 KV heads). There 32 programs that take 16 parts at a time would
    wait for memory five times in sequence: 7.5 us, against 2.6 for 8 rows of 8 parts (H200). Such lists get more
    programs of fewer channels, and each reads all parts at once. They have eight warps: with four, a thread has eight
    loads, and the compiler waits for the first ones before it issues the others.
    """
    channels = max(16, triton.next_power_of_2(value_dim))
    if channels > 256:
        return 64, 64, 4
    if each > 32:  # a row may have two more, as each is of one kind
        return min(128, triton.next_power_of_2(each + 2)), min(channels, 32), 8
    return 16, channels, 4


@triton.jit
def sparse_decode_merge_kernel(
    parts,
    sink,
    attended,
    total_lse,
    out,
    HEADS: tl.constexpr,
    BESIDE: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine ``BV`` channels of the parts of one query head."""
    begin(PDL)
    i_row, i_g, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    i_query = i_head * GROUP + i_g
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < DV
    total = tl.full([], 0.0, tl.float32)
    best = tl.full([], float("-inf"), tl.float32)
    if sink is not None:  # a learned sink is weight without a value
        best = tl.load(sink + i_query).to(tl.float32) * LOG2E
        total = tl.where(best == float("-inf"), 0.0, 1.0)
    b_acc = tl.zeros([BV], tl.float32)
    b_count = tl.zeros([BS], tl.int32)
    p_range = parts.ranges + 2 * (i_row // BESIDE)
    first, n_parts = tl.load(p_range), tl.load(p_range + 1)
    m_first = (i_g == 0) & (i_v == 0)
    p_total, b_before = None, None
    if attended is not None:
        p_total = row_ptr(attended, i_batch, i_head)
        b_before = tl.load(p_total, mask=m_first, other=0)
    for i in range(0, n_parts, BS):
        o_s = i + tl.arange(0, BS)
        m_s = o_s < n_parts
        i_in = (first + o_s) * BESIDE + i_row % BESIDE
        o_in = i_in * GROUP + i_g
        p_part = parts.acc + o_in[:, None] * DV + o_v[None, :]
        b_part = tl.load(p_part, mask=m_s[:, None] & m_v[None, :], other=0.0)  # [BS, BV]
        if attended is not None:
            b_count += tl.load(parts.count + i_in, mask=m_s & m_first, other=0.0).to(tl.int32)  # [BS]
        b_lse = tl.load(parts.lse + o_in, mask=m_s, other=float("-inf"))  # [BS]
        new = tl.maximum(best, tl.max(b_lse, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        b_w = tl.exp2(b_lse - base)  # [BS]
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(b_w, 0)
        b_acc = b_acc * keep + tl.sum(b_w[:, None] * b_part, 0)
        best = new
    whole = tl.where(total > 0, total, 1.0)
    tl.store(row_ptr(out, i_batch, i_query) + o_v, (b_acc / whole).to(out.ptr.dtype.element_ty), mask=m_v)
    if total_lse is not None:
        b_lse = tl.where(total > 0, (best + tl.log2(whole)) / LOG2E, float("-inf"))
        tl.store(row_ptr(total_lse, i_batch, i_query), b_lse, mask=i_v == 0)
    if attended is not None:
        tl.store(p_total, b_before + tl.sum(b_count, 0), mask=m_first)


def merge(
    parts,
    sink: Tensor | None,
    attended: Tensor | None,
    lse: Tensor | None,
    out: Tensor,
    heads: int,
    beside: int,
    each: int,
) -> None:
    """Write the attention of all :class:`.split.Parts` of a row and KV head to ``out [batch, Hq, Dv]``.

    ``sink``, ``attended`` and ``lse``: as ``sparse_decode``'s, or None. ``heads``: KV heads, ``beside``: of these that
    have the same parts, all of them or one. ``each``: how many parts a row and KV head are meant to have; any number of
    them is merged.
    """
    batch, q_heads, value_dim = out.shape
    group = q_heads // heads
    some, channels, warps = tile(value_dim, each)
    launch(
        sparse_decode_merge_kernel,
        (batch * heads, group, triton.cdiv(value_dim, channels)),
        out,
        parts,
        sink,
        operand(Rows, attended),
        operand(Rows, lse),
        operand(Rows, out),
        HEADS=heads,
        BESIDE=beside,
        GROUP=group,
        DV=value_dim,
        BV=channels,
        BS=some,
        num_warps=warps,
    )
