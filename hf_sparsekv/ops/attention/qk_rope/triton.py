"""RMS norm and rotary embedding of queries and keys: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._operands import Rows, Tokens, operand, padded, row_ptr
from ..._overlap import begin, launch

HEADS = 4  # heads a program, one warp each. Not measured yet.


@triton.jit(do_not_specialize=["tokens"])
def qk_rope_kernel(
    q,
    k,
    cos,
    sin,
    p_q_weight,
    p_k_weight,
    p_q_out,
    p_k_out,
    tokens,
    q_eps,
    k_eps,
    UNIT_OFFSET: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BH`` heads of one token: of its queries, or of its keys for the last programs of the second axis."""
    begin(PDL)
    BD: tl.constexpr = padded(D, 1)
    i_token = tl.program_id(0).to(tl.int64)
    i_batch, i_q = i_token // tokens, i_token % tokens
    i_tile = tl.program_id(1)
    q_tiles: tl.constexpr = (Q_HEADS + BH - 1) // BH
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    # Index of each rotated dimension's partner; the other dimensions are paired with themselves, times a sine of 0.
    o_pair = tl.where(o_d < R // 2, o_d + R // 2, tl.where(o_d < R, o_d - R // 2, o_d))
    m_r = o_d < R
    b_cos = tl.load(row_ptr(cos, i_batch, i_q) + o_d, mask=m_r, other=1.0).to(tl.float32)  # [BD]
    b_sin = tl.load(row_ptr(sin, i_batch, i_q) + o_d, mask=m_r, other=0.0).to(tl.float32)  # [BD]
    b_sin = tl.where(o_d < R // 2, -b_sin, b_sin)

    if i_tile < q_tiles:
        o_h = i_tile * BH + tl.arange(0, BH)
        m_h = o_h < Q_HEADS
        p_from = q.ptr + i_batch * q.batch + i_q * q.token + o_h.to(tl.int64)[:, None] * q.head
        p_to = p_q_out + (i_token * Q_HEADS + o_h[:, None]) * D
        if p_q_weight is not None:
            p_weight = p_q_weight
        eps = q_eps
    else:
        o_h = (i_tile - q_tiles) * BH + tl.arange(0, BH)
        m_h = o_h < K_HEADS
        p_from = k.ptr + i_batch * k.batch + i_q * k.token + o_h.to(tl.int64)[:, None] * k.head
        p_to = p_k_out + (i_token * K_HEADS + o_h[:, None]) * D
        if p_k_weight is not None:
            p_weight = p_k_weight
        eps = k_eps
    dtype = p_q_out.dtype.element_ty
    m_x = m_h[:, None] & m_d[None, :]
    b_x = tl.load(p_from + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)  # [BH, BD]
    b_pair = tl.load(p_from + o_pair[None, :], mask=m_x, other=0.0).to(tl.float32)  # [BH, BD]
    if p_q_weight is not None:
        b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]  # [1, BD]
        b_pair_weight = tl.load(p_weight + o_pair, mask=m_d, other=0.0).to(tl.float32)[None, :]  # [1, BD]
        b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / D + eps)[:, None]  # [BH, 1]
        # Rounded where the reference rounds.
        if UNIT_OFFSET:
            b_x = b_x * b_scale * (1.0 + b_weight)
            b_pair = b_pair * b_scale * (1.0 + b_pair_weight)
        else:
            b_x = (b_x * b_scale).to(dtype).to(tl.float32) * b_weight
            b_pair = (b_pair * b_scale).to(dtype).to(tl.float32) * b_pair_weight
        b_x = b_x.to(dtype).to(tl.float32)
        b_pair = b_pair.to(dtype).to(tl.float32)
    b_x = (b_x * b_cos[None, :]).to(dtype).to(tl.float32) + (b_pair * b_sin[None, :]).to(dtype).to(tl.float32)
    tl.store(p_to + o_d[None, :], b_x.to(dtype), mask=m_x)


def qk_rope(q, k, cos, sin, q_weight=None, k_weight=None, q_eps=0.0, k_eps=0.0, unit_offset=False):
    """As ``reference.qk_rope``. Heads may be strided in any way, the dimensions of each are contiguous."""
    batch, tokens, q_heads, dim = q.shape
    k_heads, width = k.shape[2], cos.shape[-1]
    require_dense_rows(q=q, k=k, cos=cos, sin=sin)
    if width % 2 or width > dim:
        raise ValueError(f"rotary width {width} must be even and at most the head dim {dim}")
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    if q.numel():
        launch(
            qk_rope_kernel,
            (batch * tokens, triton.cdiv(q_heads, HEADS) + triton.cdiv(k_heads, HEADS)),
            q,
            operand(Tokens, q.transpose(1, 2)),
            operand(Tokens, k.transpose(1, 2)),
            operand(Rows, cos.expand(batch, -1, -1)),
            operand(Rows, sin.expand(batch, -1, -1)),
            q_weight,
            k_weight,
            q_out,
            k_out,
            tokens,
            q_eps,
            k_eps,
            UNIT_OFFSET=unit_offset,
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            D=dim,
            R=width,
            BH=HEADS,
            num_warps=HEADS,
        )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
