"""The chosen experts of a mixture: the kernels. All that counts is to read the weights once, at the memory's speed."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .._dispatch import require_dense_rows
from .._operands import Rows, Table, operand, row_ptr
from .._overlap import begin, launch
from ..gated.reference import ACTIVATIONS
from ..gated.triton import gate_times_up
from .reference import MAX_TOKENS


class Weights(NamedTuple):
    """``[E, n, d]``."""

    ptr: Any
    expert: Any
    row: Any


# Outputs a program, inputs a step of its loop at most, warps: as `small_linear` has them for one row. Not measured yet.
UP = (4, 2048, 8)
DOWN = (4, 1024, 4)


@triton.jit
def experts_up_kernel(
    x,
    index,
    weight,
    p_out,
    n,
    d,
    K: tl.constexpr,
    SILU: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` values between the two products, of one token and expert. Neighbours share their expert's rows."""
    begin(PDL)
    i = tl.program_id(0)
    token, at = i // K, i % K
    expert = tl.load(row_ptr(index, token.to(tl.int64), at)).to(tl.int64)
    o_n, o_d = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BD)
    p_gate = weight.ptr + expert * weight.expert + o_n.to(tl.int64)[:, None] * weight.row
    p_up = weight.ptr + expert * weight.expert + (o_n + n).to(tl.int64)[:, None] * weight.row
    b_gate = tl.zeros([BN, BD], tl.float32)
    b_up = tl.zeros([BN, BD], tl.float32)
    for d_0 in range(0, d, BD):
        m_d = d_0 + o_d < d
        if EVEN:
            b_g = tl.load(p_gate + (d_0 + o_d)[None, :])  # [BN, BD]
            b_u = tl.load(p_up + (d_0 + o_d)[None, :])
        else:
            m_w = (o_n < n)[:, None] & m_d[None, :]
            b_g = tl.load(p_gate + (d_0 + o_d)[None, :], mask=m_w, other=0.0)  # [BN, BD]
            b_u = tl.load(p_up + (d_0 + o_d)[None, :], mask=m_w, other=0.0)
        b_x = tl.load(x.ptr + token.to(tl.int64) * x.row + d_0 + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_gate += b_g.to(tl.float32) * b_x
        b_up += b_u.to(tl.float32) * b_x
    dtype = p_out.dtype.element_ty
    gate, up = tl.sum(b_gate, 1).to(dtype), tl.sum(b_up, 1).to(dtype)  # [BN], rounded as the reference
    tl.store(p_out + i.to(tl.int64) * n + o_n, gate_times_up(gate, up, SILU), mask=o_n < n)


@triton.jit
def experts_down_kernel(
    p_x,
    index,
    share,
    weight,
    p_out,
    n,
    d,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` outputs of one token: the weighted sum over its experts."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    o_n, o_d = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BD)
    b_out = tl.zeros([BN], tl.float32)
    for at in tl.static_range(K):
        expert = tl.load(row_ptr(index, token, at)).to(tl.int64)
        factor = tl.load(row_ptr(share, token, at)).to(tl.float32)
        p_row = weight.ptr + expert * weight.expert + o_n.to(tl.int64)[:, None] * weight.row
        b_sum = tl.zeros([BN, BD], tl.float32)
        for d_0 in range(0, d, BD):
            m_d = d_0 + o_d < d
            if EVEN:
                b_w = tl.load(p_row + (d_0 + o_d)[None, :])  # [BN, BD]
            else:
                b_w = tl.load(p_row + (d_0 + o_d)[None, :], mask=(o_n < n)[:, None] & m_d[None, :], other=0.0)
            b_x = tl.load(p_x + (token * K + at) * d + d_0 + o_d, mask=m_d, other=0.0)  # [BD]
            b_sum += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
        b_out += tl.sum(b_sum, 1).to(p_out.dtype.element_ty).to(tl.float32) * factor
    tl.store(p_out + token * n + o_n, b_out.to(p_out.dtype.element_ty), mask=o_n < n)


def _width(d: int, most: int) -> int:
    """Inputs a step: the largest power of two that divides ``d``, unless that is less than a quarter of ``most``."""
    part = min(d & -d, most)
    return part if part >= most // 4 else min(most, triton.next_power_of_2(d))


def experts(x, index, weights, gate_up, down, activation):
    """As ``reference.experts``, of at most ``MAX_TOKENS`` tokens. The kernels read the weights where they are."""
    tokens, k = index.shape
    inner, width = down.shape[2], x.shape[1]
    if tokens > MAX_TOKENS:
        raise ValueError(f"at most {MAX_TOKENS} tokens, got {tokens}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    require_dense_rows(x=x, gate_up=gate_up, down=down)
    middle, out = x.new_empty(tokens * k, inner), x.new_empty(tokens, width)
    if not tokens:
        return out

    def fixed(n: int, d: int, tile: tuple[int, int, int]) -> dict:
        bn, most, warps = tile
        bd = _width(d, most)
        return {"K": k, "EVEN": n % bn == 0 and d % bd == 0, "BN": bn, "BD": bd, "num_warps": warps}

    chosen = operand(Rows, index)
    args = operand(Table, x), chosen, operand(Weights, gate_up), middle, inner, width
    grid, silu = (tokens * k, triton.cdiv(inner, UP[0])), activation == "silu"
    launch(experts_up_kernel, grid, x, *args, SILU=silu, **fixed(inner, width, UP))
    args = middle, chosen, operand(Rows, weights), operand(Weights, down), out, width, inner
    launch(experts_down_kernel, (tokens, triton.cdiv(width, DOWN[0])), x, *args, **fixed(width, inner, DOWN))
    return out
