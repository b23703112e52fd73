"""Combine the parts of an attention that was split over several programs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._overlap import begin, overlap

LOG2E = tl.constexpr(1.4426950408889634)
TILE = 16  # parts at a time. Not tuned yet.
WIDE_TILE, CHANNELS = 64, 64  # of values wider than 256: parts and channels of a program. Not tuned yet.


@triton.jit
def _merge_kernel(
    p_acc,
    p_lse,
    p_count,
    p_sink,
    p_attended,
    p_total_lse,
    p_out,
    parts,
    attended_batch,
    attended_head,
    total_lse_batch,
    total_lse_head,
    out_batch,
    out_head,
    HAS_SINK: tl.constexpr,
    HAS_ATTENDED: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine ``BV`` channels of the parts of one query head."""
    begin(PDL)
    i_row, i_g, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < DV
    total = tl.full([], 0.0, tl.float32)
    best = tl.full([], float("-inf"), tl.float32)
    if HAS_SINK:  # a learned sink is weight without a value
        best = tl.load(p_sink + i_head * GROUP + i_g).to(tl.float32) * LOG2E
        total = tl.where(best == float("-inf"), 0.0, 1.0)
    b_acc = tl.zeros([BV], tl.float32)
    b_count = tl.zeros([BS], tl.int32)
    for i in range(0, parts, BS):
        o_s = i + tl.arange(0, BS)
        m_s = o_s < parts
        i_in = i_row.to(tl.int64) * parts + o_s
        o_in = i_in * GROUP + i_g
        b_lse = tl.load(p_lse + o_in, mask=m_s, other=float("-inf"))  # [BS]
        b_part = tl.load(
            p_acc + o_in[:, None] * DV + o_v[None, :], mask=m_s[:, None] & m_v[None, :], other=0.0
        )  # [BS, BV]
        new = tl.maximum(best, tl.max(b_lse, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        b_w = tl.exp2(b_lse - base)  # [BS]
        keep = tl.exp2(best - base)
        total = total * keep + tl.sum(b_w, 0)
        b_acc = b_acc * keep + tl.sum(b_w[:, None] * b_part, 0)
        best = new
        if HAS_ATTENDED:
            b_count += tl.load(p_count + i_in, mask=m_s, other=0.0).to(tl.int32)  # [BS]
    b_out = b_acc / tl.where(total > 0, total, 1.0)
    p_to = p_out + i_batch * out_batch + (i_head * GROUP + i_g) * out_head + o_v
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=m_v)
    if HAS_LSE:
        p_to = p_total_lse + i_batch * total_lse_batch + (i_head * GROUP + i_g) * total_lse_head
        b_lse = tl.where(total > 0, (best + tl.log2(tl.where(total > 0, total, 1.0))) / LOG2E, float("-inf"))
        tl.store(p_to, b_lse, mask=i_v == 0)
    if HAS_ATTENDED:
        m_first = (i_g == 0) & (i_v == 0)
        p_total = p_attended + i_batch * attended_batch + i_head * attended_head
        tl.store(p_total, tl.load(p_total, mask=m_first, other=0) + tl.sum(b_count, 0), mask=m_first)


def merge(
    acc: Tensor,
    lse: Tensor,
    count: Tensor,
    sink_logits: Tensor | None,
    attended: Tensor | None,
    total_lse: Tensor | None,
    out: Tensor,
    heads: int,
    tile: tuple[int, int] | None = None,
) -> None:
    """Write the attention of all parts to ``out``.

    Args:
        acc: ``[batch, H, parts, G, Dv]`` float32, flat: each part's attention, zeros where it has no token.
        lse: ``[batch, H, parts, G]`` float32, flat: logarithm to base 2 of each part's denominator.
        count: ``[batch, H, parts]`` float32, flat: tokens of each part.
        sink_logits: ``[Hq]``, or ``None``.
        attended: ``[batch, H]`` int64; the number of tokens is added to it. Or ``None``.
        total_lse: ``[batch, Hq]`` float32, receives the natural logarithm of the denominator. Or ``None``.
        out: ``[batch, Hq, Dv]``.
        heads: KV heads, ``H``.
        tile: parts at a time and channels of a program, instead of the constants.
    """
    batch, q_heads, value_dim = out.shape
    group = q_heads // heads
    rows = batch * heads
    channels = max(16, triton.next_power_of_2(value_dim))
    some, channels = tile or ((WIDE_TILE, CHANNELS) if channels > 256 else (TILE, channels))
    _merge_kernel[(rows, group, triton.cdiv(value_dim, channels))](
        acc,
        lse,
        count,
        sink_logits,
        attended,
        total_lse,
        out,
        count.shape[0] // max(1, rows),
        *((0, 0) if attended is None else attended.stride()),
        *((0, 0) if total_lse is None else total_lse.stride()),
        *out.stride()[:2],
        HAS_SINK=sink_logits is not None,
        HAS_ATTENDED=attended is not None,
        HAS_LSE=total_lse is not None,
        HEADS=heads,
        GROUP=group,
        DV=value_dim,
        BV=channels,
        BS=some,
        **overlap(out),
    )
