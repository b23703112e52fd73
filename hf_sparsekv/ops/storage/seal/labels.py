"""Labels of a block's tokens as codes, inside the kernels that seal blocks.

It is a file of its own because :mod:`.reference` defines labels separately, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._codes import ROUND, most
from .reference import MOST_HALF as _MOST_HALF
from .reference import MOST_SPREADS as _MOST_SPREADS

MOST_HALF, MOST_SPREADS = tl.constexpr(_MOST_HALF), tl.constexpr(_MOST_SPREADS)


@triton.jit
def least(a, b):
    """The smaller value; NaN if one is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def standardised(b_x, b_centre, b_spread):
    """Keys ``[tokens, channels]`` less the channels' centres, in units of their spreads, clipped to so many."""
    b_off = b_x.to(tl.float32) - b_centre[None, :]
    return least(most(tl.math.div_rn(b_off, b_spread[None, :] + tl.zeros_like(b_off)), -MOST_SPREADS), MOST_SPREADS)


@triton.jit
def codes_4(b_x, b_y, m_r):
    """Codes of 4 bits, uint8, of both halves of the labels: with scales and zero points, float16 ``[tokens]``."""
    b_x = least(most(b_x.to(tl.float32), -MOST_HALF), MOST_HALF)
    b_y = least(most(b_y.to(tl.float32), -MOST_HALF), MOST_HALF)
    b_low = tl.where(m_r[None, :], least(b_x, b_y), float("inf"))  # [tokens, channels]
    b_low = tl.reduce(b_low, 1, least)  # [tokens]
    b_high = tl.where(m_r[None, :], most(b_x, b_y), float("-inf"))
    b_high = tl.reduce(b_high, 1, most)
    b_span = b_high - b_low  # "/" on a GPU may be an ulp off, which float16 can round to another number
    b_scale, b_zero = tl.math.div_rn(b_span, 15.0 + tl.zeros_like(b_span)).to(tl.float16), b_low.to(tl.float16)
    b_step = b_scale.to(tl.float32)
    b_step = tl.where(b_step == 0.0, 1.0, b_step)[:, None]
    b_x = tl.math.div_rn(b_x - b_zero.to(tl.float32)[:, None], b_step + tl.zeros_like(b_x))
    b_y = tl.math.div_rn(b_y - b_zero.to(tl.float32)[:, None], b_step + tl.zeros_like(b_y))
    b_x = tl.minimum(tl.maximum((b_x + ROUND) - ROUND, 0.0), 15.0).to(tl.int32)
    b_y = tl.minimum(tl.maximum((b_y + ROUND) - ROUND, 0.0), 15.0).to(tl.int32)
    return (b_x | (b_y << 4)).to(tl.uint8), b_scale, b_zero


@triton.constexpr_function
def largest(dtype):
    """The largest finite number of the keys' dtype."""
    return {"fp16": 65504.0, "bf16": 255 * 2.0**120, "fp32": (2 - 2.0**-23) * 2.0**127}[dtype.name]
