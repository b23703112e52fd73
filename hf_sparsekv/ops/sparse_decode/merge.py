"""Combine the parts of an attention that was split over several programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .._operands import Rows, Table, batch_and_head, operand, row_ptr
from .._overlap import begin, launch

LOG2E = tl.constexpr(1.4426950408889634)


class Merged(NamedTuple):
    """Where the programs of the parts merge these themselves: tickets and what comes out, see :func:`merge`."""

    tickets: Any
    sink: Any
    attended: Any
    lse: Any
    out: Any


def merged(tickets: Tensor, sink: Tensor | None, attended: Tensor | None, lse: Tensor | None, out: Tensor) -> Merged:
    """The tensors as the kernel takes them."""
    return Merged(operand(Table, tickets), sink, operand(Rows, attended), operand(Rows, lse), operand(Rows, out))


@triton.constexpr_function
def heads_at_once(group, channels):
    """Query heads that a program of parts merges at once: 128 numbers of 16 parts for each of its 64 threads."""
    return max(1, min(triton.next_power_of_2(group), 8192 // (AT_ONCE.value * channels)))


AT_ONCE = tl.constexpr(16)  # parts
WIDEST = 256  # channels that are merged at once


def tile(value_dim: int) -> tuple[int, int]:
    """Parts at a time and channels of a program. Not tuned yet."""
    channels = max(16, triton.next_power_of_2(value_dim))
    return (64, 64) if channels > WIDEST else (AT_ONCE.value, channels)


@triton.jit
def merge_heads(
    parts,
    sink,
    attended,
    total_lse,
    out,
    first,
    n_parts,
    i_batch,
    i_head,
    heads,
    o_g,
    o_v,
    m_first,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BS: tl.constexpr,
):
    """Combine channels ``o_v`` of the query heads ``o_g [BH]`` of a row's KV head, which has ``n_parts`` from ``first``
    on; ``BS`` of them at a time. ``m_first``: count their tokens.
    """
    BH: tl.constexpr = o_g.shape[0]
    m_g, m_v = o_g < GROUP, o_v < DV
    i_query = i_head * GROUP + o_g
    b_total = tl.zeros([BH], tl.float32)
    b_best = tl.full([BH], float("-inf"), tl.float32)
    if sink is not None:  # a learned sink is weight without a value
        b_best = tl.load(sink + i_query, mask=m_g, other=0.0).to(tl.float32) * LOG2E
        b_total = tl.where(b_best == float("-inf"), 0.0, 1.0)
    b_acc = tl.zeros([BH, o_v.shape[0]], tl.float32)
    b_count = tl.zeros([BS], tl.int32)
    for i in range(0, n_parts, BS):
        o_s = i + tl.arange(0, BS)
        m_s = o_s < n_parts
        i_in = (first + o_s) * heads + i_head  # [BS]
        o_in = i_in[:, None] * GROUP + o_g[None, :]  # [BS, BH]
        m_in = m_s[:, None] & m_g[None, :]
        b_lse = tl.load(parts.lse + o_in, mask=m_in, other=float("-inf"))  # [BS, BH]
        p_part = parts.acc + o_in[:, :, None] * DV + o_v[None, None, :]
        b_part = tl.load(p_part, mask=m_in[:, :, None] & m_v[None, None, :], other=0.0)  # [BS, BH, BV]
        b_new = tl.maximum(b_best, tl.max(b_lse, 0))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_w = tl.exp2(b_lse - b_base[None, :])  # [BS, BH]
        b_keep = tl.exp2(b_best - b_base)
        b_total = b_total * b_keep + tl.sum(b_w, 0)
        b_acc = b_acc * b_keep[:, None] + tl.sum(b_w[:, :, None] * b_part, 0)
        b_best = b_new
        if attended is not None:
            b_count += tl.load(parts.count + i_in, mask=m_s, other=0.0).to(tl.int32)  # [BS]
    b_whole = tl.where(b_total > 0, b_total, 1.0)
    p_out = row_ptr(out, i_batch, i_query)[:, None] + o_v[None, :]
    tl.store(p_out, (b_acc / b_whole[:, None]).to(out.ptr.dtype.element_ty), mask=m_g[:, None] & m_v[None, :])
    if total_lse is not None:
        b_lse = tl.where(b_total > 0, (b_best + tl.log2(b_whole)) / LOG2E, float("-inf"))
        m_lse = m_g & (tl.min(o_v, 0) == 0)  # whoever has the first channels
        tl.store(row_ptr(total_lse, i_batch, i_query), b_lse, mask=m_lse)
    if attended is not None:
        p_total = row_ptr(attended, i_batch, i_head)
        tl.store(p_total, tl.load(p_total, mask=m_first, other=0) + tl.sum(b_count, 0), mask=m_first)


@triton.jit
def merge_if_last(parts, i, i_part, n_parts, i_batch, i_head, GROUP: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr):
    """The last program of a row and KV head to come here merges its parts, in their order, whoever that is."""
    to, heads = parts.merged, tl.num_programs(1)
    tl.debug_barrier()  # all threads have stored before one says so
    p_ticket = to.tickets.ptr + i_batch * to.tickets.row + i_head
    if tl.atomic_add(p_ticket, 1, sem="acq_rel") == n_parts - 1:
        tl.store(p_ticket, 0)  # as the next launch wants it
        BH: tl.constexpr = heads_at_once(GROUP, BV)
        for i_g in tl.static_range(0, GROUP, BH):
            o_g = i_g + tl.arange(0, BH)
            merge_heads(
                parts,
                to.sink,
                to.attended,
                to.lse,
                to.out,
                i - i_part,
                n_parts,
                i_batch,
                i_head,
                heads,
                o_g,
                tl.arange(0, BV),
                i_g == 0,
                GROUP,
                DV,
                AT_ONCE,
            )


@triton.jit
def sparse_decode_merge_kernel(
    parts,
    sink,
    attended,
    total_lse,
    out,
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
    i_batch, i_head = batch_and_head(i_row, HEADS)
    p_range = parts.ranges + 2 * i_batch
    first, n_parts = tl.load(p_range), tl.load(p_range + 1)
    o_g, o_v = i_g + tl.arange(0, 1), i_v * BV + tl.arange(0, BV)
    m_first = (i_g == 0) & (i_v == 0)
    merge_heads(
        parts, sink, attended, total_lse, out, first, n_parts, i_batch, i_head, HEADS, o_g, o_v, m_first, GROUP, DV, BS
    )


def merge(parts, sink: Tensor | None, attended: Tensor | None, lse: Tensor | None, out: Tensor, heads: int) -> None:
    """Write the attention of all :class:`.split.Parts` of a row and KV head to ``out [batch, Hq, Dv]``.

    ``sink``, ``attended`` and ``lse``: as ``sparse_decode``'s, or None. ``heads``: KV heads.
    """
    batch, q_heads, value_dim = out.shape
    group = q_heads // heads
    some, channels = tile(value_dim)
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
        GROUP=group,
        DV=value_dim,
        BV=channels,
        BS=some,
    )
