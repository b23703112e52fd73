"""8-bit codes of keys and values, inside kernels: see :mod:`.storage.quantise.reference`."""

from __future__ import annotations

import triton
import triton.language as tl

from .storage.quantise.reference import MOST as _MOST
from .storage.quantise.reference import MOST_SCALE as _MOST_SCALE

MOST, MOST_SCALE = tl.constexpr(_MOST), tl.constexpr(_MOST_SCALE)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds a small float32 to an integer, half to even


@triton.jit
def most(a, b):
    """The larger value; NaN if one is NaN, which a plain maximum would drop."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _within(b_x, END: tl.constexpr):
    return tl.minimum(tl.maximum(b_x, -1.0 * END), 1.0 * END)


@triton.jit
def _over_most(b_most):
    b_scale = tl.math.div_rn(b_most, tl.full(b_most.shape, MOST, tl.float32))
    b_end = tl.full(b_scale.shape, MOST_SCALE, tl.float32)
    return tl.minimum(b_scale, b_end, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def range_of(b_x, m, b_high, b_low):
    """Update the largest and least entries ``[D]`` of channels by ``b_x [tokens, D]`` where ``m``, NaN left out."""
    b_x, m = b_x.to(tl.float32), m & (b_x == b_x)
    b_high = tl.maximum(b_high, tl.max(tl.where(m, b_x, float("-inf")), 0))
    return b_high, tl.minimum(b_low, tl.min(tl.where(m, b_x, float("inf")), 0))


@triton.jit
def norms_of(b_high, b_low):
    """Centres and steps, float16, of channels whose largest and least entries are ``b_high``, ``b_low``."""
    b_high, b_low = _within(b_high, MOST * MOST_SCALE), _within(b_low, MOST * MOST_SCALE)
    b_centre = _within((b_high + b_low) * 0.5, MOST_SCALE).to(tl.float16)
    b_middle = b_centre.to(tl.float32)
    return b_centre, _over_most(tl.maximum(tl.maximum(b_high - b_middle, b_middle - b_low), 0.0))


@triton.jit
def store_norms(p_key, token, p_scale, o_k, m_k, SPLIT: tl.constexpr, SIZE: tl.constexpr, BT: tl.constexpr):
    """Store the centres and steps of a block's key channels ``o_k [D]`` where ``m_k``, and return them.

    ``p_key``: the first of ``SIZE`` tokens, ``token`` entries apart. ``p_scale``: the block's scales.
    """
    b_high = tl.full(o_k.shape, float("-inf"), tl.float32)
    b_low = tl.full(o_k.shape, float("inf"), tl.float32)
    for i in range(0, SIZE, BT):
        o_t = i + tl.arange(0, BT)
        m = (o_t < SIZE)[:, None] & m_k[None, :]
        b_x = tl.load(p_key + o_t[:, None].to(tl.int64) * token + o_k[None, :], mask=m, other=0.0)  # [BT, D]
        b_high, b_low = range_of(b_x, m, b_high, b_low)
    b_centre, b_step = norms_of(tl.where(m_k, b_high, 0.0), tl.where(m_k, b_low, 0.0))
    tl.store(p_scale + o_k, b_centre, mask=m_k)
    tl.store(p_scale + SPLIT + o_k, b_step, mask=m_k)
    return b_centre, b_step


@triton.jit
def scale_of(b_v, m_v, b_k, m_k):
    """Scales float16 ``[tokens]`` of the values ``b_v [tokens, D]`` where ``m_v``; NaN if the key has NaN."""
    b_most = tl.reduce(tl.where(m_v, tl.abs(b_v.to(tl.float32)), 0.0), 1, most)
    b_unknown = tl.max((m_k & (b_k != b_k)).to(tl.int32), 1)
    return _over_most(tl.where(b_unknown > 0, float("nan"), b_most))


@triton.jit
def encode(b_x, b_scale):
    """Codes int8 of ``b_x``, keys less their centres; ``b_scale`` float16, of its shape or of one that it fits."""
    b_step = b_scale.to(tl.float32)
    b_step = tl.where(b_step == 0.0, 1.0, b_step)
    b_y = tl.math.div_rn(b_x.to(tl.float32), b_step + tl.zeros(b_x.shape, tl.float32))
    b_y = tl.where(b_y == b_y, b_y, 0.0)  # NaN
    b_y = tl.minimum(tl.maximum((b_y + ROUND) - ROUND, -1.0 * MOST), 1.0 * MOST)
    return b_y.to(tl.int8)


@triton.jit
def encode_tokens(b_k, b_v, m_k, m_v, norms, p_scale):
    """Codes of keys ``b_k`` and values ``b_v``, ``[tokens, D]`` each; stores the values' scales at ``p_scale``.

    ``norms``: centres and steps of the keys' channels.
    """
    b_scale = scale_of(b_v, m_v[None, :], b_k, m_k[None, :])
    tl.store(p_scale, b_scale)
    b_key = encode(b_k.to(tl.float32) - norms[0].to(tl.float32)[None, :], norms[1][None, :])
    return b_key, encode(b_v, b_scale[:, None])


@triton.jit
def load_decoded(p_code, p_scale, o_in, m_n, o_w, WIDTH: tl.constexpr, SPLIT: tl.constexpr, dtype: tl.constexpr):
    """Entries ``o_w [D]`` of the tokens ``m_n`` whose codes are at ``p_code [tokens]``: in ``dtype``, else zeros.

    ``p_scale``: the scales of their blocks, ``[tokens]``, or ``[1]`` for tokens of one block. ``o_in [tokens]``: their
    positions in the blocks.
    """
    m = m_n[:, None] & (o_w < WIDTH)[None, :]
    m_key = (o_w < SPLIT)[None, :]
    p_norm = p_scale[:, None] + o_w[None, :]
    b_code = tl.load(p_code[:, None] + o_w[None, :], mask=m, other=0).to(tl.float32)
    b_centre = tl.load(p_norm, mask=m_key, other=0.0).to(tl.float32)  # [tokens, D] or [1, D]
    b_step = tl.load(p_norm + SPLIT, mask=m_key, other=0.0).to(tl.float32)
    b_value = tl.load(p_scale + 2 * SPLIT + o_in, mask=m_n, other=0.0).to(tl.float32)
    b_x = b_centre + b_code * tl.where(m_key, b_step, b_value[:, None])
    return tl.where(m, b_x, 0.0).to(dtype)
