"""A tile of latents in a running softmax: what the kernels over blocks and over tokens share.

A token is one row: ``Dv`` numbers of latent, which are its value as well, then the rotated rotary part (DeepSeek-V2,
section 2.1, with the up-projections absorbed). It is read once, for the scores and for the sum of the values.

The sum of a head is 512 wide. With 20 heads in a tile of 32 it takes 64 KB of float32, with 64 heads 128 KB, half of a
processor's registers; so one program runs on each processor, and its reads must hide behind its own products.
Attention is computed heads first, ``q @ rows^T`` and ``p @ rows``. Scores alone, for the masses of a progressive round,
are ``TOKENS_FIRST``, ``rows @ q``: tokens, of which there are many, take the side of the product that Hopper's tensor
cores want 64 wide, heads the side that may be narrow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .merge import LOG2E


@triton.jit
def load_rows(p_row, m_n, DK: tl.constexpr, DV: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr):
    """Latents ``[BN, BC]`` and rotary parts ``[BN, BR]`` of the rows at ``p_row [BN]`` that ``m_n [BN]`` marks."""
    o_c, o_r = tl.arange(0, BC), tl.arange(0, BR)
    # What is not attended may hold anything, NaN included, and is not read.
    b_c = tl.load(p_row[:, None] + o_c[None, :], mask=m_n[:, None] & (o_c < DV)[None, :], other=0.0)  # [BN, BC]
    b_r = tl.load(p_row[:, None] + DV + o_r[None, :], mask=m_n[:, None] & (o_r < DK - DV)[None, :], other=0.0)
    return b_c, b_r


@triton.jit
def score_rows(
    b_qc,
    b_qr,
    b_c,
    b_r,
    m_n,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
):
    """Logits to base 2 of the rows that ``m_n [BN]`` marks: ``[BN, BH]`` tokens first, ``[BH, BN]`` otherwise."""
    if not NATIVE:
        b_c, b_r = b_c.to(tl.float32), b_r.to(tl.float32)
    if TOKENS_FIRST:
        b_s = tl.dot(b_c, b_qc, input_precision="ieee")  # [BN, BH]
        b_s = tl.dot(b_r, b_qr, b_s, input_precision="ieee")
        m_s = m_n[:, None]
    else:
        b_s = tl.dot(b_qc, tl.trans(b_c), input_precision="ieee")  # [BH, BN]
        b_s = tl.dot(b_qr, tl.trans(b_r), b_s, input_precision="ieee")
        m_s = m_n[None, :]
    if SOFTCAP:
        b_s = b_s * (scale / softcap)
        b_s = softcap * (2.0 * tl.sigmoid(2.0 * b_s) - 1.0)  # tanh
        b_s = b_s * LOG2E
    else:
        b_s = b_s * (scale * LOG2E)
    return tl.where(m_s, b_s, float("-inf"))


@triton.jit
def take_rows(
    b_qc,
    b_qr,
    b_max,
    b_sum,
    b_acc,
    b_c,
    b_r,
    m_n,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Take a tile of rows into the running softmax of queries ``[BH, BC]`` and ``[BH, BR]``.

    ``b_max`` and ``b_sum`` are ``[BH]``, ``b_acc`` is ``[BH, BC]``.
    """
    b_s = score_rows(b_qc, b_qr, b_c, b_r, m_n, scale, softcap, SOFTCAP, NATIVE, False)  # [BH, BN]
    if not NATIVE:
        b_c = b_c.to(tl.float32)
    b_new = tl.maximum(b_max, tl.max(b_s, 1))  # [BH]
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # nothing attended yet: -inf - -inf is no number
    b_p = tl.exp2(b_s - b_base[:, None])  # [BH, BN]
    b_keep = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_keep + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_c.dtype), b_c, b_acc * b_keep[:, None], input_precision="ieee")
    return b_new, b_sum, b_acc


@triton.jit
def load_queries(
    p_row,
    i_first,
    q_head,
    q_dim,
    NATIVE: tl.constexpr,
    TOKENS_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BH: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
):
    """Latent and rotary part of ``BH`` query heads from ``i_first`` on, as :func:`score_rows` wants them."""
    o_h, o_c, o_r = i_first + tl.arange(0, BH), tl.arange(0, BC), tl.arange(0, BR)
    if TOKENS_FIRST:
        o_h, o_c, o_r = o_h[None, :], o_c[:, None], o_r[:, None]
    else:
        o_h, o_c, o_r = o_h[:, None], o_c[None, :], o_r[None, :]
    p_head = p_row + o_h.to(tl.int64) * q_head  # heads of a prompt's last query lie as far apart as the prompt is long
    b_qc = tl.load(p_head + o_c * q_dim, mask=(o_h < GROUP) & (o_c < DV), other=0.0)
    b_qr = tl.load(p_head + (DV + o_r) * q_dim, mask=(o_h < GROUP) & (o_r < DK - DV), other=0.0)
    if not NATIVE:
        b_qc, b_qr = b_qc.to(tl.float32), b_qr.to(tl.float32)
    return b_qc, b_qr


@triton.jit
def no_rows(BH: tl.constexpr, BC: tl.constexpr):
    """The running softmax before the first tile."""
    b_max = tl.full([BH], float("-inf"), tl.float32)
    return b_max, tl.zeros([BH], tl.float32), tl.zeros([BH, BC], tl.float32)


@triton.jit
def store_part(
    p_acc,
    p_lse,
    i_first,
    b_max,
    b_sum,
    b_acc,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BH: tl.constexpr,
    BC: tl.constexpr,
):
    """The attention within one part, to ``[G, Dv]`` and ``[G]``; zeros of no weight if it is empty."""
    o_h, o_c = i_first + tl.arange(0, BH), tl.arange(0, BC)
    b_any = b_sum > 0
    b_lse = tl.where(b_any, b_max + tl.log2(tl.where(b_any, b_sum, 1.0)), float("-inf"))
    b_weight = 1.0 / tl.where(b_any, b_sum, 1.0)
    tl.store(p_lse + o_h, b_lse, mask=o_h < GROUP)
    o_h, o_c = o_h[:, None], o_c[None, :]
    tl.store(p_acc + o_h * DV + o_c, b_acc * b_weight[:, None], mask=(o_h < GROUP) & (o_c < DV))
