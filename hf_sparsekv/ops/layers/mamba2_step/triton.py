"""One token of each row through a Mamba 2 layer: the kernels.

``B`` and ``C`` are read by all heads of a group, and the norm needs all heads: so the convolution is a kernel before
the update of the states, and the norm one after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows, require_each_row
from ..._operands import Table, operand, padded
from ..._overlap import begin, launch
from .reference import check

CHANNELS = 128  # of a program of the convolution, one warp each. Not measured yet.
A_WARP = 2048  # entries of a head's state


@triton.jit
def mamba2_conv_kernel(
    mixed,
    conv,
    p_weight,
    p_bias,
    p_valid,
    p_out,
    channels,
    K: tl.constexpr,
    BC: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BC`` channels of one row after the convolution and SiLU; their new values enter the state."""
    begin(PDL)
    BK: tl.constexpr = padded(K, 1)
    i_row = tl.program_id(0).to(tl.int64)
    o_c, o_j = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BK)
    has_token = True
    if p_valid is not None:
        has_token = tl.load(p_valid + i_row) != 0
    m_c = (o_c < channels) & has_token
    m_cj = m_c[:, None] & (o_j < K)[None, :]
    b_new = tl.load(mixed.ptr + i_row * mixed.row + o_c, mask=m_c, other=0.0)
    o_at = o_c[:, None] * K + o_j[None, :]
    p_state = conv.ptr + i_row * conv.row + o_at
    b_old = tl.load(p_state + 1, mask=m_cj & (o_j + 1 < K)[None, :], other=0.0)
    b_window = tl.where((o_j == K - 1)[None, :], b_new[:, None], b_old)
    b_weight = tl.load(p_weight + o_at, mask=m_cj, other=0.0)
    b_sum = tl.sum(b_window.to(tl.float32) * b_weight.to(tl.float32), 1)
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.debug_barrier()  # a thread may write what another one has to read before
    tl.store(p_state, b_window, mask=m_cj)
    b_sum = b_sum.to(b_new.dtype).to(tl.float32)
    tl.store(p_out + i_row * channels + o_c, (b_sum * tl.sigmoid(b_sum)).to(b_new.dtype), mask=o_c < channels)


@triton.jit
def mamba2_state_kernel(
    p_mixed,
    gate,
    dt,
    state,
    p_a_log,
    p_d,
    p_dt_bias,
    p_valid,
    p_out,
    channels,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row: its output times the gate, float32."""
    begin(PDL)
    BP: tl.constexpr = padded(P, 1)
    BN: tl.constexpr = padded(N, 1)
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    has_token = True
    if p_valid is not None:
        has_token = tl.load(p_valid + i_row) != 0
    o_p, o_n = tl.arange(0, BP), tl.arange(0, BN)
    m_p, m_n = (o_p < P) & has_token, (o_n < N) & has_token
    p_row = p_mixed + i_row * channels
    group = i_head // (HEADS // GROUPS)
    b_x = tl.load(p_row + i_head * P + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_b = tl.load(p_row + HEADS * P + group * N + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_c = tl.load(p_row + HEADS * P + (GROUPS + group) * N + o_n, mask=m_n, other=0.0).to(tl.float32)
    step = tl.load(dt.ptr + i_row * dt.row + i_head).to(tl.float32) + tl.load(p_dt_bias + i_head).to(tl.float32)
    # As log(1 + exp(step)), which torch gives up for the step itself above 20.
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    decay = tl.exp(-step * tl.exp(tl.load(p_a_log + i_head).to(tl.float32)))
    p_state = state.ptr + i_row * state.row + i_head * (P * N) + o_p[:, None] * N + o_n[None, :]
    m_state = m_p[:, None] & m_n[None, :]
    b_state = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32) * decay + (step * b_x)[:, None] * b_b[None, :]
    tl.store(p_state, b_state.to(state.ptr.dtype.element_ty), mask=m_state)
    b_out = tl.sum(b_state * b_c[None, :], 1) + b_x * tl.load(p_d + i_head).to(tl.float32)
    b_gate = tl.load(gate.ptr + i_row * gate.row + i_head * P + o_p, mask=m_p, other=0.0).to(tl.float32)
    b_out = b_out.to(p_mixed.dtype.element_ty).to(tl.float32) * (b_gate * tl.sigmoid(b_gate))
    tl.store(p_out + (i_row * HEADS + i_head) * P + o_p, b_out, mask=o_p < P)


@triton.jit
def mamba2_norm_kernel(p_from, p_weight, p_out, eps, SIZE: tl.constexpr, PDL: tl.constexpr):
    """The RMS norm of one group of channels of one row."""
    begin(PDL)
    BS: tl.constexpr = padded(SIZE, 1)
    i_row, i_group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s = tl.arange(0, BS)
    m_s = o_s < SIZE
    o_at = (i_row * tl.num_programs(1) + i_group) * SIZE + o_s
    b_x = tl.load(p_from + o_at, mask=m_s, other=0.0)
    dtype = p_out.dtype.element_ty
    b_x = (b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / SIZE + eps)).to(dtype).to(tl.float32)
    b_weight = tl.load(p_weight + i_group * SIZE + o_s, mask=m_s, other=0.0).to(tl.float32)
    tl.store(p_out + o_at, (b_weight * b_x).to(dtype), mask=m_s)


def mamba2_step(
    mixed, gate, dt, conv_state, conv_weight, conv_bias, state, a_log, d, dt_bias, norm_weight, eps, norm_groups=1,
    valid=None,
):  # fmt: skip
    """As ``reference.mamba2_step``."""
    check(mixed, gate, conv_state, conv_weight, state, norm_groups)
    batch, heads, p, n = state.shape
    channels, kernel = conv_weight.shape
    require_dense_rows(mixed=mixed, gate=gate, dt=dt, norm_weight=norm_weight)
    require_each_row(batch, valid)
    if not conv_weight.is_contiguous():
        raise ValueError("conv_weight must be contiguous")
    out = torch.empty(batch, heads * p, dtype=mixed.dtype, device=mixed.device)
    if not batch:
        return out
    valid = None if valid is None else valid.view(torch.uint8)
    convolved = torch.empty(batch, channels, dtype=mixed.dtype, device=mixed.device)
    gated = torch.empty(batch, heads * p, dtype=torch.float32, device=mixed.device)
    given, states = (operand(Table, mixed), operand(Table, conv_state)), operand(Table, state)
    launch(
        mamba2_conv_kernel, (batch, triton.cdiv(channels, CHANNELS)), mixed, *given, conv_weight, conv_bias, valid,
        convolved, channels, K=kernel, BC=CHANNELS, num_warps=1,
    )  # fmt: skip
    fixed = {"HEADS": heads, "GROUPS": (channels - heads * p) // (2 * n), "P": p, "N": n}
    warps = min(16, max(1, triton.next_power_of_2(p) * triton.next_power_of_2(n) // A_WARP))
    gates = operand(Table, gate), operand(Table, dt)
    launch(
        mamba2_state_kernel, (batch, heads), mixed, convolved, *gates, states, a_log, d, dt_bias, valid, gated,
        channels, **fixed, num_warps=warps,
    )  # fmt: skip
    size = heads * p // norm_groups
    warps = min(16, max(1, size // 512))
    launch(
        mamba2_norm_kernel, (batch, norm_groups), mixed, gated, norm_weight, out, float(eps), SIZE=size,
        num_warps=triton.next_power_of_2(warps),
    )  # fmt: skip
    return out
