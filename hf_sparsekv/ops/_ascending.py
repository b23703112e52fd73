"""Binary search in ascending lists."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find(p_list, b_id, n, steps):
    """Position of the first of ``n`` entries that is not below ``b_id`` in an ascending list, -1 at the end.

    ``steps``: the binary digits of ``n``, or more.
    """
    b_low = tl.zeros_like(b_id)
    b_high = b_low + n
    for _ in range(steps):
        b_middle = (b_low + b_high) // 2
        m_open = b_low < b_high
        b_entry = tl.load(p_list + b_middle, mask=m_open, other=0)
        b_below = m_open & (b_entry >= 0) & (b_entry < b_id)
        b_high = tl.where(m_open & (b_below == 0), b_middle, b_high)
        b_low = tl.where(b_below, b_middle + 1, b_low)
    return b_low
