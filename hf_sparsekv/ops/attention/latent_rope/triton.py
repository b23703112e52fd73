"""Queries, latents and rotary parts of MLA, ready for the cache: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._operands import Rows, Tokens, operand, padded, row_ptr
from ..._overlap import begin, launch

HEADS = 4  # query heads a program. Not measured yet.


@triton.jit
def _turned(p_x, o_r, m_x, b_cos, b_sin, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The rotary part at ``p_x`` (a column, or a scalar pointer), rotated; rounded as the reference."""
    o_i = tl.where(o_r < R // 2, o_r, o_r - R // 2)
    second = (o_r >= R // 2).to(tl.int32)
    if INTERLEAVED:
        o_a, o_b = 2 * o_i + second, 2 * o_i + 1 - second
    else:
        o_a, o_b = o_r, o_i + (1 - second) * (R // 2)
    dtype = p_x.dtype.element_ty
    b_a = tl.load(p_x + o_a, mask=m_x, other=0.0).to(tl.float32)
    b_b = tl.load(p_x + o_b, mask=m_x, other=0.0).to(tl.float32)
    b_a = (b_a * b_cos).to(dtype).to(tl.float32)
    b_b = (b_b * b_sin).to(dtype).to(tl.float32)
    return (b_a + tl.where(second == 1, b_b, -b_b)).to(dtype)


@triton.jit(do_not_specialize=["tokens"])
def latent_rope_kernel(
    q,
    compressed,
    cos,
    sin,
    p_weight,
    p_q_out,
    p_latent,
    p_rotary,
    tokens,
    eps,
    INTERLEAVED: tl.constexpr,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BH`` query heads of one token; the last program of a token its latent and rotary part."""
    begin(PDL)
    BN: tl.constexpr = padded(NOPE, 1)
    BR: tl.constexpr = padded(R, 1)
    BK: tl.constexpr = padded(RANK, 1)
    i_token = tl.program_id(0).to(tl.int64)
    i_batch, i_q, i_tile = i_token // tokens, i_token % tokens, tl.program_id(1)
    o_r = tl.arange(0, BR)
    m_r = o_r < R
    o_i = tl.where(o_r < R // 2, o_r, o_r - R // 2)
    b_cos = tl.load(row_ptr(cos, i_batch, i_q) + o_i, mask=m_r, other=0.0).to(tl.float32)  # [BR]
    b_sin = tl.load(row_ptr(sin, i_batch, i_q) + o_i, mask=m_r, other=0.0).to(tl.float32)
    if i_tile * BH < H:
        o_h, o_n = i_tile * BH + tl.arange(0, BH), tl.arange(0, BN)
        m_h = (o_h < H)[:, None]
        p_from = q.ptr + i_batch * q.batch + i_q * q.token + o_h.to(tl.int64)[:, None] * q.head
        p_to = p_q_out + (i_token * H + o_h[:, None]) * (NOPE + R)
        m_n = m_h & (o_n < NOPE)[None, :]
        tl.store(p_to + o_n[None, :], tl.load(p_from + o_n[None, :], mask=m_n, other=0.0), mask=m_n)
        m_x = m_h & m_r[None, :]
        b_x = _turned(p_from + NOPE, o_r[None, :], m_x, b_cos[None, :], b_sin[None, :], R, INTERLEAVED)
        tl.store(p_to + NOPE + o_r[None, :], b_x, mask=m_x)
    else:  # (separate names: a branch may not change the type of a name)
        o_k = tl.arange(0, BK)
        m_k = o_k < RANK
        p_row = row_ptr(compressed, i_batch, i_q)
        b_y = tl.load(p_row + o_k, mask=m_k, other=0.0).to(tl.float32)  # [BK]
        b_y = b_y * tl.rsqrt(tl.sum(b_y * b_y, 0) / RANK + eps)
        kind = p_latent.dtype.element_ty
        b_weight = tl.load(p_weight + o_k, mask=m_k, other=0.0).to(tl.float32)
        tl.store(p_latent + i_token * RANK + o_k, (b_y.to(kind).to(tl.float32) * b_weight).to(kind), mask=m_k)
        b_y = _turned(p_row + RANK, o_r, m_r, b_cos, b_sin, R, INTERLEAVED)
        tl.store(p_rotary + i_token * R + o_r, b_y, mask=m_r)


def latent_rope(q, compressed, cos, sin, weight, eps, interleaved):
    """As ``reference.latent_rope``. The last dimensions are contiguous, the others strided in any way."""
    batch, tokens, heads, dim = q.shape
    rope, rank = cos.shape[-1], weight.shape[0]
    require_dense_rows(q=q, compressed=compressed, cos=cos, sin=sin, weight=weight)
    if rope % 2 or rope > dim or compressed.shape[-1] != rank + rope:
        raise ValueError(f"rows of {compressed.shape[-1]} are no latents of {rank} with rotary parts of {rope}")
    q_out = q.new_empty(q.shape)
    latent, rotary = q.new_empty(batch, 1, tokens, rank), q.new_empty(batch, 1, tokens, rope)
    if q.numel():
        launch(
            latent_rope_kernel,
            (batch * tokens, triton.cdiv(heads, HEADS) + 1),
            q,
            operand(Tokens, q.transpose(1, 2)),
            operand(Rows, compressed),
            operand(Rows, cos.expand(batch, -1, -1)),
            operand(Rows, sin.expand(batch, -1, -1)),
            weight,
            q_out,
            latent,
            rotary,
            tokens,
            eps,
            INTERLEAVED=interleaved,
            H=heads,
            NOPE=dim - rope,
            R=rope,
            RANK=rank,
            BH=HEADS,
        )
    return q_out.transpose(1, 2), latent, rotary
