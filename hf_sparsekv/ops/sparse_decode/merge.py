"""Combine the parts of an attention that was split over several programs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
TILE = 8192  # entries of the parts in registers at once. Not tuned yet.


@triton.jit
def merge_heads(
    p_acc,
    p_lse,
    p_count,
    p_sink,
    p_attended,
    p_out,
    i_row,
    first,
    parts,
    attended_batch,
    attended_head,
    out_batch,
    out_head,
    HAS_SINK: tl.constexpr,
    HAS_ATTENDED: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BG: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
):
    """Combine the parts of query heads ``first .. first + BG - 1`` of one row and KV head, ``BS`` parts at a time.

    Whoever does the first head adds up the attended tokens as well.
    """
    i_batch, i_head = (i_row // HEADS).to(tl.int64), (i_row % HEADS).to(tl.int64)
    o_g, o_v = first + tl.arange(0, BG), tl.arange(0, BV)
    m_g, m_v = o_g < GROUP, o_v < DV
    b_total = tl.zeros([BG], tl.float32)
    b_best = tl.full([BG], float("-inf"), tl.float32)
    if HAS_SINK:  # a learned sink is weight without a value
        b_best = tl.load(p_sink + i_head * GROUP + o_g, mask=m_g, other=float("-inf")).to(tl.float32) * LOG2E  # [BG]
        b_total = tl.where(b_best == float("-inf"), 0.0, 1.0)
    b_acc = tl.zeros([BG, BV], tl.float32)
    b_count = tl.zeros([BS], tl.int32)
    for i in range(0, parts, BS):
        o_s = i + tl.arange(0, BS)
        m_s = o_s < parts
        o_part = i_row.to(tl.int64) * parts + o_s
        o_in = o_part[:, None] * GROUP + o_g[None, :]
        m_in = m_s[:, None] & m_g[None, :]
        b_lse = tl.load(p_lse + o_in, mask=m_in, other=float("-inf"))  # [BS, BG]
        p_part = p_acc + o_in[:, :, None] * DV + o_v[None, None, :]
        b_part = tl.load(p_part, mask=m_in[:, :, None] & m_v[None, None, :], other=0.0)  # [BS, BG, BV]
        b_new = tl.maximum(b_best, tl.max(b_lse, 0))  # [BG]
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_w = tl.exp2(b_lse - b_base[None, :])  # [BS, BG]
        b_keep = tl.exp2(b_best - b_base)  # [BG]
        b_total = b_total * b_keep + tl.sum(b_w, 0)
        b_acc = b_acc * b_keep[:, None] + tl.sum(b_w[:, :, None] * b_part, 0)
        b_best = b_new
        if HAS_ATTENDED:
            b_count += tl.load(p_count + o_part, mask=m_s, other=0.0).to(tl.int32)  # [BS]
    b_out = b_acc / tl.where(b_total > 0, b_total, 1.0)[:, None]
    p_to = p_out + i_batch * out_batch + (i_head * GROUP + o_g[:, None]) * out_head + o_v[None, :]
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=m_g[:, None] & m_v[None, :])
    if HAS_ATTENDED and first == 0:
        p_total = p_attended + i_batch * attended_batch + i_head * attended_head
        tl.store(p_total, tl.load(p_total) + tl.sum(b_count, 0))


@triton.jit
def _merge_kernel(
    p_acc,
    p_lse,
    p_count,
    p_sink,
    p_attended,
    p_out,
    parts,
    attended_batch,
    attended_head,
    out_batch,
    out_head,
    HAS_SINK: tl.constexpr,
    HAS_ATTENDED: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
):
    """Combine the parts of one query head."""
    merge_heads(
        p_acc,
        p_lse,
        p_count,
        p_sink,
        p_attended,
        p_out,
        tl.program_id(0),
        tl.program_id(1),
        parts,
        attended_batch,
        attended_head,
        out_batch,
        out_head,
        HAS_SINK,
        HAS_ATTENDED,
        HEADS,
        GROUP,
        DV,
        1,
        BV,
        BS,
    )


def merge_tile(parts: int, wide: int) -> int:
    """Parts at a time, for ``wide`` entries in each."""
    return max(1, min(TILE // wide, triton.next_power_of_2(parts)))


def merge(
    acc: Tensor,
    lse: Tensor,
    count: Tensor,
    sink_logits: Tensor | None,
    attended: Tensor | None,
    out: Tensor,
    heads: int,
) -> None:
    """Write the attention of all parts to ``out``.

    Args:
        acc: ``[batch, H, parts, G, Dv]`` float32, flat: each part's attention, zeros where it has no token.
        lse: ``[batch, H, parts, G]`` float32, flat: logarithm to base 2 of each part's denominator.
        count: ``[batch, H, parts]`` float32, flat: tokens of each part.
        sink_logits: ``[Hq]``, or ``None``.
        attended: ``[batch, H]`` int64; the number of tokens is added to it. Or ``None``.
        out: ``[batch, Hq, Dv]``.
        heads: KV heads, ``H``.
    """
    batch, q_heads, value_dim = out.shape
    group = q_heads // heads
    rows, wide = batch * heads, max(16, triton.next_power_of_2(value_dim))
    parts = count.shape[0] // max(1, rows)
    _merge_kernel[(rows, group)](
        acc,
        lse,
        count,
        sink_logits,
        attended,
        out,
        parts,
        *((0, 0) if attended is None else attended.stride()),
        *out.stride()[:2],
        HAS_SINK=sink_logits is not None,
        HAS_ATTENDED=attended is not None,
        HEADS=heads,
        GROUP=group,
        DV=value_dim,
        BV=wide,
        BS=merge_tile(parts, wide),
    )
