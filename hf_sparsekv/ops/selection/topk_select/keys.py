"""Code that the selection kernels share: scores as ordered integers, and the positions of the chosen ids."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._paged import load_row

MINUS_INF = tl.constexpr(-2139095041)  # the ordered integer of -inf


@triton.jit
def ordered(b_s):
    """int32 keys that compare as the float32 scores do; NaN, whose bits are beyond both infinities, is ``-inf``."""
    b_bits = tl.where(b_s == b_s, b_s, float("-inf")).to(tl.int32, bitcast=True)
    b_bits = tl.where((b_bits & 0x7FFFFFFF) == 0, 0, b_bits)  # -0.0 ties with 0.0
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def readable(n, WHOLE: tl.constexpr):
    """Entries of a row of ``n`` that can be read: with ``WHOLE`` up to the next multiple of 16.

    The compiler would read a row that may end anywhere one entry at a time.
    """
    if WHOLE:
        n = tl.cdiv(n, 16) * 16
    return n


@triton.jit
def entries(rows, i_batch, n, TOKENS: tl.constexpr):
    """Number of a row's ``n`` entries, of ``TOKENS`` tokens each, that can be chosen: with ``rows`` the sealed ones."""
    if rows is not None:
        n = tl.minimum(n, tl.cdiv(load_row(rows, i_batch)[1], TOKENS))
    return n


@triton.jit
def load_keys(p_row, o_n, n, wide, rows, WHOLE: tl.constexpr):
    """Keys of the entries ``o_n`` of a row of ``n`` stored in ``wide``, see :func:`readable`; ``-inf`` after them."""
    if rows is None and not WHOLE:
        b_key = ordered(tl.load(p_row + o_n, mask=o_n < n, other=float("-inf")))
    else:
        m_read = (o_n < readable(wide, WHOLE)) & (o_n < tl.cdiv(n, 16) * 16)
        b_key = ordered(tl.load(p_row + o_n, mask=m_read, other=float("-inf")))
        b_key = tl.where(o_n < n, b_key, MINUS_INF)  # which may be anything
    return b_key


@triton.jit
def write(p_out, p_blocks, o_n, b_at, m_take, BLOCK_SIZE: tl.constexpr):
    """Store the ids of the taken entries ``o_n`` at ``b_at``; scores of given blocks become their columns."""
    b_id = o_n
    if BLOCK_SIZE > 0:
        b_block = tl.load(p_blocks + o_n // BLOCK_SIZE, mask=m_take, other=0)
        b_id = b_block * BLOCK_SIZE + o_n % BLOCK_SIZE
    tl.store(p_out + b_at, b_id, mask=m_take)


@triton.jit
def pad(p_out, total, k, TAIL: tl.constexpr):
    """Store -1 from ``total`` to ``k``."""
    for i in range(total, k, TAIL):
        o_k = i + tl.arange(0, TAIL)
        tl.store(p_out + o_k, tl.full([TAIL], -1, tl.int32), mask=o_k < k)


@triton.jit
def take(b_key, threshold, above, ties, need):
    """Mask of the entries that belong to the selection, and their positions in it.

    Before these entries come ``above`` entries over the threshold and ``ties`` equal to it; ``need`` ties are taken in
    all.
    """
    m_tie = (b_key == threshold) & (b_key > MINUS_INF)
    m_above = (b_key > threshold) & (b_key > MINUS_INF)
    # Both counts fit 16 bits, so one prefix sum serves both.
    b_both = tl.cumsum(m_above.to(tl.int32) + (m_tie.to(tl.int32) << 16), 0)
    b_above, b_ties = above + (b_both & 0xFFFF), ties + (b_both >> 16)
    m_take = m_above | (m_tie & (b_ties <= need))
    return m_take, b_above + tl.minimum(b_ties, need) - 1
