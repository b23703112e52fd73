"""Predict the next query from the last ones: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._operands import Rows, Tokens, batch_and_head, operand, padded, row_ptr
from ..._overlap import begin, launch
from .reference import TINY, check

# Dimensions that a warp holds at a time, by bytes of an element. Compiled for sm_90 nothing spills in bf16: 114
# registers for a window of 16, 168 for 32. Tensor cores do not take float32 products, which want shorter chunks.
CHUNK = {2: 128, 4: 32}


@triton.jit
def _sweep(b_a, b_b, W: tl.constexpr, BW: tl.constexpr):
    """Solve the leading ``k`` equations of ``a x = b`` for each ``k = 1 .. W``; column ``k - 1`` of the result.

    Gauss-Jordan without pivoting, which a positive definite matrix does not need. After ``k`` eliminations above and
    below, the first ``k`` entries of the right-hand side are the solution of the leading ``k`` equations. (The sweep
    operator of stepwise regression: Goodnight, The American Statistician 33, 1979.)
    """
    o_w = tl.arange(0, BW)
    b_all = tl.zeros([BW, BW], tl.float32)
    for k in range(W):
        b_row = tl.sum(tl.where(o_w[:, None] == k, b_a, 0.0), axis=0)  # [BW]
        b_column = tl.sum(tl.where(o_w[None, :] == k, b_a, 0.0), axis=1)  # [BW]
        right = tl.sum(tl.where(o_w == k, b_b, 0.0), axis=0)
        pivot = tl.sum(tl.where(o_w == k, b_column, 0.0), axis=0)
        b_factor = tl.where(o_w == k, pivot - 1.0, b_column) / pivot
        b_a -= b_factor[:, None] * b_row[None, :]
        b_b -= b_factor * right
        b_all = tl.where(o_w[None, :] == k, b_b[:, None], b_all)
    return b_all


@triton.jit
def query_predict_kernel(
    ring,
    p_position,
    p_count,
    out,
    epsilon,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    SMALLEST: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and head, by one warp."""
    begin(PDL)
    BW: tl.constexpr = padded(W)
    i_row = tl.program_id(0)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    p_ring, p_out = row_ptr(ring, i_batch, i_head), row_ptr(out, i_batch, i_head)
    position, count = tl.load(p_position + i_batch), tl.load(p_count + i_batch)
    n = tl.minimum(count - 1, W)
    newest = (position + (SLOTS - 1)) % SLOTS
    o_d = tl.arange(0, BD)
    dtype = p_out.dtype.element_ty

    o_w = tl.arange(0, BW)
    p_past = p_ring + ((newest + (2 * SLOTS - 1) - o_w) % SLOTS)[:, None] * ring.token + o_d[None, :]
    p_shifted = p_ring + ((newest + 2 * SLOTS - o_w) % SLOTS)[:, None] * ring.token + o_d[None, :]
    b_gram, b_right = tl.zeros([BW, BW], tl.float32), tl.zeros([BW], tl.float32)
    for i in tl.static_range(0, D, BD):
        m_d = i + o_d < D
        b_past = tl.load(p_past + i, mask=(o_w < n)[:, None] & m_d[None, :], other=0.0)  # [BW, BD]
        b_last = tl.load(p_ring + newest * ring.token + i + o_d, mask=m_d & (count > 0), other=0.0)  # [BD]
        b_gram = tl.dot(b_past, tl.trans(b_past), b_gram, input_precision="ieee")  # [BW, BW]
        b_right += tl.sum(b_past.to(tl.float32) * b_last.to(tl.float32)[None, :], axis=1)  # [BW]

    m_diagonal = o_w[:, None] == o_w[None, :]
    mean = tl.sum(tl.sum(tl.where(m_diagonal, b_gram, 0.0), axis=1), axis=0) / tl.maximum(n, 1).to(tl.float32)
    solvable = (mean > SMALLEST) & (mean < float("inf"))
    unit = tl.where(solvable, mean, 1.0)
    b_gram = tl.where(solvable, b_gram / unit, 0.0) + tl.where(m_diagonal, epsilon, 0.0)
    b_right = tl.where(solvable, b_right / unit, 0.0)
    b_weights = _sweep(b_gram, b_right, W, BW)  # [BW, BW]: entry, window

    m_own = o_w[:, None] <= o_w[None, :]
    b_weights = tl.where(m_own, b_weights, float("-inf"))
    b_weights = tl.exp(b_weights - tl.max(b_weights, axis=0)[None, :])
    b_weights = b_weights / tl.sum(b_weights, axis=0)[None, :]
    b_use = tl.sum(tl.where((o_w < n)[None, :], b_weights, 0.0), axis=1) / tl.maximum(n, 1).to(tl.float32)  # [BW]
    b_use = tl.where(solvable, b_use, tl.where(o_w == 0, 1.0, 0.0))
    m_w = (o_w < count) & (b_use != 0.0)  # queries of weight 0 may be infinite
    for i in tl.static_range(0, D, BD):
        m_d = i + o_d < D
        b_q = tl.load(p_shifted + i, mask=m_w[:, None] & m_d[None, :], other=0.0).to(tl.float32)  # [BW, BD]
        tl.store(p_out + i + o_d, tl.sum(b_use[:, None] * b_q, axis=0).to(dtype), mask=m_d)


def query_predict(ring, position, count, window, epsilon, out=None):
    """As ``reference.query_predict``, in one launch. The ring may be strided, a query's dimensions are contiguous."""
    check(ring, position, count, window, epsilon, out)
    batch, heads, slots, dim = ring.shape
    require_dense_rows(ring=ring, position=position, count=count, out=out)
    if out is None:
        out = ring.new_empty(batch, heads, dim)
    if out.numel():
        launch(
            query_predict_kernel,
            (batch * heads,),
            ring,
            operand(Tokens, ring),
            position,
            count,
            operand(Rows, out),
            epsilon,
            HEADS=heads,
            SLOTS=slots,
            D=dim,
            W=window,
            SMALLEST=TINY,
            BD=max(16, min(CHUNK[ring.element_size()], triton.next_power_of_2(dim))),
            num_warps=1,
        )
    return out
