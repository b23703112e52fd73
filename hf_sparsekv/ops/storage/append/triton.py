"""Write new tokens into the ring of recent tokens: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dispatch import require_dense_rows, require_each_row
from ..._operands import AnyTokens, Tokens, batch_and_head, in_each_row, operand, padded, row_ptr
from ..._overlap import begin, launch

TILE = 16  # new tokens a program; a decode step has one. Not tuned yet.


@triton.jit(do_not_specialize=["p_valid", "valid_row", "p_past", "past_row", "q"])
def append_kernel(
    k,
    v,
    p_valid,
    valid_row,
    recent,
    p_past,
    past_row,
    q,
    ring,
    sinks,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BQ: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy ``BQ`` new tokens of one row and KV head to their positions in the ring."""
    begin(PDL)
    BK: tl.constexpr = padded(DK, 1)
    BV: tl.constexpr = padded(DV, 1)
    i_row = tl.program_id(0)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    o_q = tl.program_id(1) * BQ + tl.arange(0, BQ)
    m_q = o_q < q
    if p_valid is not None:
        m_q = m_q & (tl.load(p_valid + i_batch * valid_row) != 0)
    # Both terms are reduced first so that the sum cannot overflow; wrapped once because q <= ring.
    o_ring = tl.load(p_past + i_batch * past_row) % ring + o_q
    o_recent = sinks + tl.where(o_ring >= ring, o_ring - ring, o_ring)

    o_q = o_q.to(tl.int64)
    p_to = row_ptr(recent, i_batch, i_head) + o_recent.to(tl.int64)[:, None] * recent.token
    o_k = tl.arange(0, BK)
    m_k = m_q[:, None] & (o_k < DK)[None, :]
    p_from = row_ptr(k, i_batch, i_head)
    b_k = tl.load(p_from + o_q[:, None] * k.token + o_k[None, :] * k.dim, mask=m_k, other=0.0)  # [BQ, BK]
    tl.store(p_to + o_k[None, :], b_k.to(recent.ptr.dtype.element_ty), mask=m_k)

    o_v = tl.arange(0, BV)
    m_v = m_q[:, None] & (o_v < DV)[None, :]
    p_from = row_ptr(v, i_batch, i_head)
    b_v = tl.load(p_from + o_q[:, None] * v.token + o_v[None, :] * v.dim, mask=m_v, other=0.0)  # [BQ, BV]
    tl.store(p_to + DK + o_v[None, :], b_v.to(recent.ptr.dtype.element_ty), mask=m_v)


def append(k, v, valid, recent_kv, past, sinks):
    """As ``reference.append``. ``k`` and ``v`` may be strided in any way."""
    batch, heads, q, dk = k.shape
    require_each_row(batch, valid, past=past)
    if not q:
        return
    require_dense_rows(recent_kv=recent_kv)
    tile = 1 if q == 1 else TILE  # only two variants, because the number of drafts changes
    launch(
        append_kernel,
        (batch * heads, triton.cdiv(q, tile)),
        recent_kv,
        operand(AnyTokens, k),
        operand(AnyTokens, v),
        *in_each_row(valid),
        operand(Tokens, recent_kv),
        *in_each_row(past),
        q,
        recent_kv.shape[2] - sinks,
        sinks,
        HEADS=heads,
        DK=dk,
        DV=v.shape[-1],
        BQ=tile,
    )
