"""8-bit codes of keys and values, inside kernels: see :mod:`.storage.quantise.reference`."""

from __future__ import annotations

import triton
import triton.language as tl

from .storage.quantise.reference import MOST as _MOST
from .storage.quantise.reference import MOST_SCALE as _MOST_SCALE

MOST, MOST_SCALE = tl.constexpr(_MOST), tl.constexpr(_MOST_SCALE)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds a small float32 to an integer, half to even


@triton.jit
def _most(a, b):
    """The larger value; NaN if one is NaN, which a plain maximum would drop."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(b_x, m):
    """Scales float16 ``[tokens]`` of the entries of ``b_x [tokens, D]`` that ``m`` marks."""
    b_most = tl.reduce(tl.where(m, tl.abs(b_x.to(tl.float32)), 0.0), 1, _most)
    b_scale = tl.math.div_rn(b_most, tl.full(b_most.shape, MOST, tl.float32))
    b_end = tl.full(b_scale.shape, MOST_SCALE, tl.float32)
    return tl.minimum(b_scale, b_end, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def encode(b_x, b_scale):
    """Codes int8 of ``b_x``; ``b_scale`` float16, of its shape or ``[tokens, 1]``."""
    b_step = b_scale.to(tl.float32)
    b_step = tl.where(b_step == 0.0, 1.0, b_step)
    b_y = tl.math.div_rn(b_x.to(tl.float32), b_step + tl.zeros(b_x.shape, tl.float32))
    b_y = tl.where(b_y == b_y, b_y, 0.0)  # NaN
    b_y = tl.minimum(tl.maximum((b_y + ROUND) - ROUND, -1.0 * MOST), 1.0 * MOST)
    return b_y.to(tl.int8)


@triton.jit
def load_scales(p_scale, m_n, o_w, SPLIT: tl.constexpr):
    """Scales float32 ``[tokens, D]`` of entries ``o_w [D]`` of the tokens whose two scales are at ``p_scale``."""
    b_first = tl.load(p_scale, mask=m_n, other=0.0)
    b_second = tl.load(p_scale + 1, mask=m_n, other=0.0)
    return tl.where((o_w < SPLIT)[None, :], b_first[:, None], b_second[:, None]).to(tl.float32)


@triton.jit
def load_decoded(p_code, p_scale, m_n, o_w, WIDTH: tl.constexpr, SPLIT: tl.constexpr, dtype: tl.constexpr):
    """Entries ``o_w [D]`` of the tokens ``m_n`` whose codes are at ``p_code [tokens]``: in ``dtype``, else zeros."""
    b_code = tl.load(p_code[:, None] + o_w[None, :], mask=m_n[:, None] & (o_w < WIDTH)[None, :], other=0)
    return (b_code.to(tl.float32) * load_scales(p_scale, m_n, o_w, SPLIT)).to(dtype)
