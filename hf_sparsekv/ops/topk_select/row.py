"""Selection from a row that one program holds in registers.

The threshold is searched in the ordered integers: each pass counts the entries over ``WAYS - 1`` values that cut what
is left of the range into equal parts. It ends as soon as exactly ``k`` entries lie over it, which without equal scores
around rank ``k`` is long before the range is down to one number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .keys import MINUS_INF, pad

TOP = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _count(b_key, value, step, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Entries of at least ``value + FIRST * step`` and, in the high 16 bits, of ``value + LAST * step``."""
    b_word = (b_key >= value + FIRST * step).to(tl.int32)
    if LAST > FIRST:
        b_word += tl.where(b_key >= value + LAST * step, 1 << 16, 0)
    return b_word


@triton.jit
def _counts(b_key, value, step, WAYS: tl.constexpr):
    """Four words of two counts, for the values ``value + step``, ``value + 2 * step`` and so on; zeros at the end."""
    first, second, third, fourth = 0, 0, 0, 0
    b_first = _count(b_key, value, step, 1, 2 if WAYS > 2 else 1)
    if WAYS <= 3:
        first = tl.sum(b_first, 0)
    else:
        # Words side by side share one reduction.
        b_second = _count(b_key, value, step, 3, 4 if WAYS > 4 else 3)
        if WAYS <= 5:
            first, second = tl.split(tl.sum(tl.join(b_first, b_second), 0))
        else:
            b_third = _count(b_key, value, step, 5, 6)
            b_fourth = _count(b_key, value, step, 7, 7)
            b_even, b_odd = tl.join(b_first, b_third), tl.join(b_second, b_fourth)
            b_even, b_odd = tl.split(tl.sum(tl.join(b_even, b_odd), 0))  # [2]
            first, third = tl.split(b_even)
            second, fourth = tl.split(b_odd)
    return first, second, third, fourth


@triton.jit
def threshold(b_key, k, WAYS: tl.constexpr):
    """Where the ``k`` best entries begin. ``WAYS`` from 2 to 5 or 8; at most 32,767 entries.

    Returns ``lo``, ``count``, ``over`` and ``usable``: ``count`` entries are ``lo`` or more, and if these are more than
    ``k``, then all but ``over < k`` of them equal ``lo``. ``usable`` entries are not ``-inf``; ``lo`` never is.
    """
    m_usable = b_key > MINUS_INF
    usable = tl.sum(m_usable.to(tl.int32), 0)
    lo = tl.min(tl.where(m_usable, b_key, TOP), 0)
    hi = tl.max(b_key, 0) + 1
    count, over = usable, usable * 0
    while (count > k) & (hi - lo != 1):
        # The range may be wider than an int32 is; as an unsigned number it is right.
        step = (hi - lo).to(tl.uint32, bitcast=True) // WAYS
        step = tl.maximum(step, 1).to(tl.int32, bitcast=True)
        words = _counts(b_key, lo, step, WAYS)
        start = lo
        for i in tl.static_range(1, WAYS):
            found = (words[(i - 1) // 2] >> (16 * ((i - 1) % 2))) & 0xFFFF
            value = start + i * step
            # In ascending order: the last that has enough, the first that has not. Where the range is narrower than
            # the values, one beyond its end says nothing new.
            enough, first = found >= k, (found < k) & (value < hi)
            lo = tl.where(enough, value, lo)
            count = tl.where(enough, found, count)
            hi = tl.where(first, value, hi)
            over = tl.where(first, found, over)
    return lo, count, over, usable


@triton.jit
def select_row(
    p_out, p_blocks, b_key, blocks, k, BLOCK_SIZE: tl.constexpr, N: tl.constexpr, TAIL: tl.constexpr, WAYS: tl.constexpr
):
    """Write the ids of the ``k`` best of the ``N`` entries of one row, which are those of ``blocks`` blocks."""
    if BLOCK_SIZE > 0:  # loaded before the search, which it then does not wait for
        o_block = tl.arange(0, N // BLOCK_SIZE)
        b_block = tl.load(p_blocks + o_block, mask=o_block < blocks, other=0)  # [N / BLOCK_SIZE]
        b_id = tl.reshape(b_block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :], [N])
    else:
        b_id = tl.arange(0, N)
    lo, count, over, usable = threshold(b_key, k, WAYS)
    m_take = b_key >= lo
    if count > k:  # the first of those that equal it
        b_tie = tl.cumsum((b_key == lo).to(tl.int32), 0)
        m_take = m_take & ((b_key > lo) | (b_tie <= k - over))
    b_at = tl.cumsum(m_take.to(tl.int32), 0) - 1
    tl.store(p_out + b_at, b_id, mask=m_take)
    pad(p_out, tl.minimum(usable, k), k, TAIL)
