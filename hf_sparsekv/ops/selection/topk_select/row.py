"""Selection from a row that one program holds in registers.

The threshold is searched among the ordered integers. A pass counts the entries above four values near the estimated
threshold. The first four come from the mean and the deviation of the scores, the next from a line through the counts.
Every fourth pass cuts the range into equal parts instead, which bounds the number of passes for any distribution. The
search ends as soon as exactly ``k`` entries are above a value. Without equal scores around rank ``k`` that is long
before the range is a single number. The path of the search never affects the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._overlap import release
from .keys import MINUS_INF, ordered, pad

TOP = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _as_float(key):
    """The score that :func:`ordered` made ``key`` from."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _join(n, low, high, total, square, n_2, low_2, high_2, total_2, square_2):
    return n + n_2, tl.minimum(low, low_2), tl.maximum(high, high_2), total + total_2, square + square_2


@triton.jit
def _add(a, b, a_2, b_2):
    return a + a_2, b + b_2


@triton.jit
def _deviate(p):
    """Approximate upper quantile ``p`` of a normal distribution: Tukey's lambda with 0.14."""
    return 4.91 * (tl.exp2(0.14 * tl.log2(1.0 - p)) - tl.exp2(0.14 * tl.log2(p)))


@triton.jit
def fifths(lo, hi):
    """Four values that cut ``lo .. hi`` into equal parts."""
    # The range may be wider than an int32 is; as an unsigned number it is right.
    step = (hi - lo).to(tl.uint32, bitcast=True) // 5
    step = step.to(tl.int32, bitcast=True)
    return lo + step, lo + 2 * step, lo + 3 * step, lo + 4 * step


@triton.jit
def inside(lo, hi, v_1, v_2, v_3, v_4):
    """The values within the range, in ascending order. (One that is no number has become the key of -inf.)"""
    first, last = lo + 1, hi - 1
    v_1 = tl.minimum(tl.maximum(v_1, first), last)
    v_2 = tl.minimum(tl.maximum(v_2, v_1), last)
    v_3 = tl.minimum(tl.maximum(v_3, v_2), last)
    v_4 = tl.minimum(tl.maximum(v_4, v_3), last)
    return v_1, v_2, v_3, v_4


@triton.jit
def narrow(lo, count, hi, over, v_1, v_2, v_3, v_4, n_1, n_2, n_3, n_4, k):
    """The range ``lo .. hi`` of the threshold, and the entries from either on, given those from four values on."""
    # The last value that has enough entries, and the first that has not.
    at_least = (n_1 >= k).to(tl.int32) + (n_2 >= k) + (n_3 >= k) + (n_4 >= k)
    new_lo = tl.where(at_least == 0, lo, tl.where(at_least == 1, v_1, tl.where(at_least == 2, v_2, v_3)))
    new_count = tl.where(at_least == 0, count, tl.where(at_least == 1, n_1, tl.where(at_least == 2, n_2, n_3)))
    new_hi = tl.where(at_least == 0, v_1, tl.where(at_least == 1, v_2, tl.where(at_least == 2, v_3, v_4)))
    new_over = tl.where(at_least == 0, n_1, tl.where(at_least == 1, n_2, tl.where(at_least == 2, n_3, n_4)))
    lo, count = tl.where(at_least == 4, v_4, new_lo), tl.where(at_least == 4, n_4, new_count)
    hi, over = tl.where(at_least == 4, hi, new_hi), tl.where(at_least == 4, over, new_over)
    return lo, count, hi, over


@triton.jit
def threshold(b_key, k):
    """The threshold of the ``k`` best entries; at most 65,535 entries.

    Returns ``lo``, ``count``, ``over`` and ``usable``: ``count`` entries are ``lo`` or more, and if these are more than
    ``k``, then all but ``over < k`` of them equal ``lo``. ``usable`` entries are not ``-inf``; ``lo`` never is.
    """
    m_usable = b_key > MINUS_INF
    b_s = tl.where(m_usable, _as_float(b_key), 0.0)
    usable, lo, hi, total, square = tl.reduce(
        (m_usable.to(tl.int32), tl.where(m_usable, b_key, TOP), b_key, b_s, b_s * b_s), 0, _join
    )
    hi += 1
    count, over = usable, usable * 0
    n = tl.maximum(usable, 1).to(tl.float32)
    middle = total / n
    spread = tl.sqrt(tl.maximum(square / n - middle * middle, 0.0))
    middle += spread * _deviate(tl.minimum(tl.maximum(k / n, 0.0001), 0.9999))
    near, far = 0.04 * spread, 0.4 * spread
    i = 0
    while (count > k) & (hi - lo != 1):
        if i > 0:
            low, high = _as_float(lo), _as_float(hi)
            between = (count - over).to(tl.float32)
            middle = low + (high - low) * ((count - k).to(tl.float32) + 0.5) / between
            # The standard error of a rank among as many that are spread evenly, at most.
            error = 0.5 * (high - low) / tl.sqrt(between)
            near, far = 0.5 * error, 2.0 * error
        v_1, v_2 = ordered(middle - far), ordered(middle - near)
        v_3, v_4 = ordered(middle + near), ordered(middle + far)
        if i % 4 == 3:
            v_1, v_2, v_3, v_4 = fifths(lo, hi)
        v_1, v_2, v_3, v_4 = inside(lo, hi, v_1, v_2, v_3, v_4)
        b_a = (b_key >= v_1).to(tl.int32) + tl.where(b_key >= v_2, 1 << 16, 0)
        b_b = (b_key >= v_3).to(tl.int32) + tl.where(b_key >= v_4, 1 << 16, 0)
        low_two, high_two = tl.reduce((b_a, b_b), 0, _add)
        n_1, n_2 = low_two & 0xFFFF, (low_two >> 16) & 0xFFFF
        n_3, n_4 = high_two & 0xFFFF, (high_two >> 16) & 0xFFFF
        lo, count, hi, over = narrow(lo, count, hi, over, v_1, v_2, v_3, v_4, n_1, n_2, n_3, n_4, k)
        i += 1
    return lo, count, over, usable


@triton.jit
def select_keys(p_out, b_key, b_id, k, TAIL: tl.constexpr, PDL: tl.constexpr):
    """Write the ids of the ``k`` best of the entries ``b_key``, whose ids are ``b_id``."""
    lo, count, over, usable = threshold(b_key, k)
    m_take = b_key >= lo
    if count > k:  # take the first entries that equal the threshold
        b_tie = tl.cumsum((b_key == lo).to(tl.int32), 0)
        m_take = m_take & ((b_key > lo) | (b_tie <= k - over))
    # Not earlier: the next kernel would run only on the SMs that these few programs leave free.
    release(PDL)
    b_at = tl.cumsum(m_take.to(tl.int32), 0) - 1
    tl.store(p_out + b_at, b_id, mask=m_take)
    pad(p_out, tl.minimum(usable, k), k, TAIL)


@triton.jit
def select_row(
    p_out, p_blocks, b_key, blocks, k, BLOCK_SIZE: tl.constexpr, N: tl.constexpr, TAIL: tl.constexpr, PDL: tl.constexpr
):
    """Write the ids of the ``k`` best of the ``N`` entries of one row, which are those of ``blocks`` blocks."""
    if BLOCK_SIZE > 0:  # loaded before the search, which it then does not wait for
        o_block = tl.arange(0, N // BLOCK_SIZE)
        b_block = tl.load(p_blocks + o_block, mask=o_block < blocks, other=0)  # [N / BLOCK_SIZE]
        b_id = tl.reshape(b_block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :], [N])
    else:
        b_id = tl.arange(0, N)
    select_keys(p_out, b_key, b_id, k, TAIL, PDL)
