"""A linear layer of a few rows: the kernels. All that counts is to read the weights at the memory's speed.

Tiles measured on an H200, bf16, projections of an 8B model (benchmarks/NOTES.md, "Linear layers of a few rows").
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _device
from .._dispatch import require_dense_rows
from .._operands import Table, operand
from .._overlap import begin, launch
from .reference import MAX_ROWS

# Outputs a program, inputs a step of its loop, steps in flight, warps.
ONE_ROW = (4, 2048, 1, 8)
ONE_ROW_SHORT = (4, 1024, 1, 4)
SHORT = 2048  # inputs; the short tiles below
ROWS = (32, 512, 4, 4)
ROWS_WIDE = (64, 128, 4, 4)
WIDE = 6144  # outputs; the wide tiles from here on


@triton.jit
def small_linear_one_row_kernel(
    p_x,
    weight,
    p_bias,
    p_out,
    n,
    k,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` outputs of one row of ``k`` inputs. ``EVEN``: ``n`` and ``k`` are multiples of the tile's sides."""
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_n = o_n < n
    m_k = o_k < k
    p_row = weight.ptr + o_n.to(tl.int64)[:, None] * weight.row
    # The first weights are on their way before the kernel that makes the input has ended.
    if EVEN:
        b_w = tl.load(p_row + o_k[None, :], eviction_policy="evict_first")  # [BN, BK]
    else:
        b_w = tl.load(p_row + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)  # [BN, BK]
    begin(PDL)
    b_x = tl.load(p_x + o_k, mask=m_k, other=0.0)  # [BK]
    b_sum = b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
    for k_0 in tl.range(BK, k, BK, num_stages=STAGES):
        if EVEN:
            b_w = tl.load(p_row + (k_0 + o_k)[None, :], eviction_policy="evict_first")  # [BN, BK]
            b_x = tl.load(p_x + k_0 + o_k)  # [BK]
        else:
            m_k = k_0 + o_k < k
            b_w = tl.load(p_row + (k_0 + o_k)[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)  # [BN, BK]
            b_x = tl.load(p_x + k_0 + o_k, mask=m_k, other=0.0)  # [BK]
        b_sum += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
    b_out = tl.sum(b_sum, axis=1)
    if p_bias is not None:
        b_out += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)


@triton.jit
def small_linear_rows_kernel(
    x,
    weight,
    p_bias,
    p_out,
    rows,
    n,
    k,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` outputs of all rows, on tensor cores. ``EVEN``: ``n`` and ``k`` are multiples of the tile's sides."""
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    o_m = tl.arange(0, ROWS)
    m_n, m_m = o_n < n, o_m < rows
    p_row = weight.ptr + o_n.to(tl.int64)[:, None] * weight.row
    b_sum = tl.zeros([BN, ROWS], tl.float32)
    begin(PDL)  # the loop's first loads are in flight together: a load before this point measured no better
    for k_0 in tl.range(0, k, BK, num_stages=STAGES):
        if EVEN:
            b_w = tl.load(p_row + (k_0 + o_k)[None, :], eviction_policy="evict_first")  # [BN, BK]
            m_x = m_m[None, :]
        else:
            m_k = k_0 + o_k < k
            b_w = tl.load(p_row + (k_0 + o_k)[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)  # [BN, BK]
            m_x = m_m[None, :] & m_k[:, None]
        b_x = tl.load(x.ptr + o_m[None, :] * x.row + (k_0 + o_k)[:, None], mask=m_x, other=0.0)  # [BK, ROWS]
        b_sum = tl.dot(b_w, b_x, b_sum)
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    m_out = m_n[:, None] & m_m[None, :]
    tl.store(p_out + o_m[None, :] * n + o_n[:, None], b_sum.to(p_out.dtype.element_ty), mask=m_out)


def _tile(x: Tensor, rows: int, n: int, k: int) -> tuple[int, int, int, int]:
    if rows == 1:
        return ONE_ROW if k >= SHORT else ONE_ROW_SHORT
    bn, bk, stages, warps = ROWS_WIDE if n >= WIDE else ROWS
    held = (bn + MAX_ROWS) * bk * x.element_size()  # fewer steps in flight where they would not fit
    stages = max(1, min(stages, _device.shared_memory(x) // held))
    return bn, bk, stages, warps


def small_linear(x, weight, bias=None):
    """As ``reference.small_linear``. Float32 only for a single row: tensor cores would round it."""
    n, k = weight.shape
    x_rows = x.reshape(-1, k)
    rows = x_rows.shape[0]
    if rows > MAX_ROWS or (rows > 1 and x.dtype == torch.float32):
        raise ValueError(f"at most {MAX_ROWS} rows, in float32 one; got {rows} of {x.dtype}")
    require_dense_rows(x=x_rows, weight=weight)
    out = x.new_empty(*x.shape[:-1], n)
    if not out.numel():
        return out
    bn, bk, stages, warps = _tile(x, rows, n, k)
    fixed = {"EVEN": n % bn == 0 and k % bk == 0, "BN": bn, "BK": bk, "STAGES": stages, "num_warps": warps}
    grid, operands = (triton.cdiv(n, bn),), (operand(Table, weight), bias, out)
    if rows == 1:
        launch(small_linear_one_row_kernel, grid, x, x_rows, *operands, n, k, **fixed)
    else:
        launch(small_linear_rows_kernel, grid, x, operand(Table, x_rows), *operands, rows, n, k, ROWS=MAX_ROWS, **fixed)
    return out
