"""One token of each row through a gated delta rule layer: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows, require_each_row
from ..._operands import Rows, Table, operand, padded
from ..._overlap import begin, launch
from .reference import L2_EPS as _L2_EPS
from .reference import check

L2_EPS = tl.constexpr(_L2_EPS)
A_WARP = 2048  # entries of a head's state, 64 registers of a thread; at most MAX_WARPS. Not measured yet.
MAX_WARPS = 16


@triton.jit
def convolved(p_new, p_state, p_weight, channel, o_c, m_c, K: tl.constexpr):
    """Channels ``channel + o_c`` after the convolution and SiLU, float32; their new values enter the state."""
    BK: tl.constexpr = padded(K, 1)
    o_j = tl.arange(0, BK)
    m_j = o_j < K
    m_cj = m_c[:, None] & m_j[None, :]
    b_new = tl.load(p_new + o_c, mask=m_c, other=0.0)
    o_at = (channel + o_c)[:, None] * K + o_j[None, :]
    b_old = tl.load(p_state + o_at + 1, mask=m_cj & (o_j + 1 < K)[None, :], other=0.0)
    b_window = tl.where((o_j == K - 1)[None, :], b_new[:, None], b_old)
    b_weight = tl.load(p_weight + o_at, mask=m_cj, other=0.0)
    b_sum = tl.sum(b_window.to(tl.float32) * b_weight.to(tl.float32), 1).to(b_new.dtype).to(tl.float32)
    tl.debug_barrier()  # a thread may write what another one has to read before
    tl.store(p_state + o_at, b_window, mask=m_cj)
    return (b_sum * tl.sigmoid(b_sum)).to(b_new.dtype).to(tl.float32)


@triton.jit
def gated_delta_step_kernel(
    q,
    k,
    v,
    z,
    a,
    b,
    conv,
    p_conv_weight,
    state,
    p_a_log,
    p_dt_bias,
    p_norm,
    p_valid,
    p_out,
    eps,
    beta_scale,
    KEY_HEADS: tl.constexpr,
    R: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A key head of one row, with its value heads: programs share no channel of the convolution."""
    begin(PDL)
    BK: tl.constexpr = padded(DK, 1)
    BV: tl.constexpr = padded(DV, 1)
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    has_token = True
    if p_valid is not None:
        has_token = tl.load(p_valid + i_row) != 0
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = (o_k < DK) & has_token, (o_v < DV) & has_token
    p_conv = conv.ptr + i_row * conv.row
    dtype = q.ptr.dtype.element_ty
    p_q, p_k = q.ptr + i_row * q.batch + i_head * q.head, k.ptr + i_row * k.batch + i_head * k.head
    m_state = m_k[:, None] & m_v[None, :]
    p_state = state.ptr + i_row * state.row + i_head * (R * DK * DV) + o_k[:, None] * DV + o_v[None, :]
    b_next = tl.load(p_state, mask=m_state, other=0.0)  # [BK, BV], before what it takes to compute with it
    b_q = convolved(p_q, p_conv, p_conv_weight, i_head * DK, o_k, m_k, K)
    b_k = convolved(p_k, p_conv, p_conv_weight, (KEY_HEADS + i_head) * DK, o_k, m_k, K)
    b_q = b_q * tl.rsqrt(tl.sum(b_q * b_q, 0) + L2_EPS) * (DK**-0.5)
    b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + L2_EPS)
    b_norm = tl.load(p_norm + o_v, mask=o_v < DV, other=0.0)
    for r in tl.static_range(R):
        b_state = b_next
        if r + 1 < R:
            b_next = tl.load(p_state + (r + 1) * DK * DV, mask=m_state, other=0.0)
        i_value = i_head * R + r
        p_v = v.ptr + i_row * v.batch + i_head * v.head + r * DV
        b_v = convolved(p_v, p_conv, p_conv_weight, 2 * KEY_HEADS * DK + i_value * DV, o_v, m_v, K)
        b_a = tl.load(a.ptr + i_row * a.batch + i_head * a.head + r).to(tl.float32)
        b_b = tl.load(b.ptr + i_row * b.batch + i_head * b.head + r).to(tl.float32)
        b_a += tl.load(p_dt_bias + i_value).to(tl.float32)
        # As log(1 + exp(a)), which torch gives up for a itself above 20.
        b_a = tl.where(b_a > 20.0, b_a, tl.log(1.0 + tl.exp(tl.minimum(b_a, 20.0))))
        decay = tl.exp(-tl.exp(tl.load(p_a_log + i_value).to(tl.float32)) * b_a)
        beta = tl.sigmoid(b_b).to(dtype).to(tl.float32) * beta_scale
        b_state *= decay
        b_delta = (b_v - tl.sum(b_state * b_k[:, None], 0)) * beta
        b_state += b_k[:, None] * b_delta[None, :]
        tl.store(p_state + r * DK * DV, b_state, mask=m_state)
        b_out = tl.sum(b_state * b_q[:, None], 0).to(dtype).to(tl.float32)  # [BV]
        b_out = (b_out * tl.rsqrt(tl.sum(b_out * b_out, 0) / DV + eps)).to(dtype)
        b_out = (b_norm.to(tl.float32) * b_out.to(tl.float32)).to(dtype).to(tl.float32)
        b_z = tl.load(z.ptr + i_row * z.batch + i_head * z.head + r * DV + o_v, mask=m_v, other=0.0).to(tl.float32)
        p_to = p_out + (i_row * KEY_HEADS * R + i_value) * DV + o_v
        tl.store(p_to, (b_out * (b_z * tl.sigmoid(b_z))).to(dtype), mask=o_v < DV)


def gated_delta_step(
    q, k, v, z, a, b, conv_state, conv_weight, state, a_log, dt_bias, norm_weight, eps, beta_scale=1.0, valid=None
):
    """As ``reference.gated_delta_step``."""
    check(q, k, v, conv_state, conv_weight, state)
    batch, key_heads, dk = q.shape
    heads, dv = state.shape[1], state.shape[3]
    require_dense_rows(q=q, k=k, v=v, z=z, a=a, b=b, norm_weight=norm_weight)
    require_each_row(batch, valid)
    if not conv_weight.is_contiguous():
        raise ValueError("conv_weight must be contiguous")
    out = torch.empty(batch, heads * dv, dtype=q.dtype, device=q.device)
    if batch:
        given = [operand(Rows, t) for t in (q, k, v, z, a, b)]
        states = operand(Table, conv_state), conv_weight, operand(Table, state)
        valid = None if valid is None else valid.view(torch.uint8)
        weights = a_log, dt_bias, norm_weight, valid, out, float(eps), float(beta_scale)
        fixed = {"KEY_HEADS": key_heads, "R": heads // key_heads, "DK": dk, "DV": dv, "K": conv_weight.shape[1]}
        tile = triton.next_power_of_2(dk) * triton.next_power_of_2(dv)
        warps = min(MAX_WARPS, max(1, tile // A_WARP))
        launch(gated_delta_step_kernel, (batch, key_heads), q, *given, *states, *weights, **fixed, num_warps=warps)
    return out
