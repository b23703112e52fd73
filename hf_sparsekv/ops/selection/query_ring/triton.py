"""Keep the latest queries of each row: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dispatch import require_dense_rows, require_each_row
from ..._operands import AnyTokens, Tokens, in_each_row, operand, padded
from ..._overlap import begin, launch

HEADS = 8  # query heads a program. Not tuned yet.


@triton.jit(do_not_specialize=["p_valid", "valid_row", "p_past", "past_row", "n"])
def query_ring_push_kernel(
    q,
    p_valid,
    valid_row,
    p_past,
    past_row,
    ring,
    p_first,
    p_count,
    p_position,
    n,
    size,
    Q_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the queries of ``BH`` heads of one row, one token after the other."""
    begin(PDL)
    BD: tl.constexpr = padded(DIM)
    i_batch = tl.program_id(0).to(tl.int64)
    o_h, o_d = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BD)
    o_far = o_h.to(tl.int64)  # heads of a prompt's queries are far apart: 16 of a million tokens exceed 32 bits
    m_hd = (o_h < Q_HEADS)[:, None] & (o_d < DIM)[None, :]
    end = tl.load(p_past + i_batch * past_row)
    at = end % size
    if p_valid is not None:
        n = tl.where(tl.load(p_valid + i_batch * valid_row) != 0, n, 0)
    for i in range(0, n):
        p_from = q.ptr + i_batch * q.batch + o_far[:, None] * q.head + i * q.token + o_d[None, :] * q.dim
        b_q = tl.load(p_from, mask=m_hd, other=0.0)  # [BH, BD]
        p_to = ring.ptr + i_batch * ring.batch + o_far[:, None] * ring.head + (at + i) % size * ring.token
        tl.store(p_to + o_d[None, :], b_q.to(ring.ptr.dtype.element_ty), mask=m_hd)
    if tl.program_id(1) == 0:  # counts belong to the row
        first = tl.load(p_first + i_batch)
        tl.store(p_count + i_batch, tl.minimum(tl.maximum(end + n - first, 0), size))
        tl.store(p_position + i_batch, (at + n) % size)


def push(q, valid, past, ring, first, count, position):
    """As ``reference.push``. ``q`` may be strided in any way."""
    batch, heads, n, dim = q.shape
    require_each_row(batch, valid, past=past, first=first, count=count, position=position)
    require_dense_rows(ring=ring, first=first, count=count, position=position)
    launch(
        query_ring_push_kernel,
        (batch, triton.cdiv(heads, HEADS)),
        ring,
        operand(AnyTokens, q),
        *in_each_row(valid),
        *in_each_row(past),
        operand(Tokens, ring),
        first,
        count,
        position,
        n,
        ring.shape[2],
        Q_HEADS=heads,
        DIM=dim,
        BH=HEADS,
    )
