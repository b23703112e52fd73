"""A linear layer for a few rows: the kernels. The aim is to read the weights at the memory's bandwidth.

Tiles measured on an H200, bf16, projections of 8B and 32B models (benchmarks/NOTES.md, "Linear layers of a few rows").
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import _device
from ..._dispatch import require_dense_rows
from ..._operands import Table, operand
from ..._overlap import begin, launch
from ..gated.triton import gate_times_up
from .reference import MAX_ROWS, check


class Tile(NamedTuple):
    """Rows of the weight per program, inputs per step of its loop, steps in flight, warps.

    ``registers`` is a limit per thread; None for the compiler's choice.
    """

    rows: int
    inputs: int
    stages: int
    warps: int
    registers: int | None = None


ONE_ROW = Tile(4, 2048, 1, 8)
ONE_ROW_UNEVEN = Tile(4, 1024, 1, 8)  # where longer steps would leave a part of one over: 5,120 inputs
ONE_ROW_SHORT = Tile(4, 1024, 1, 4)
SHORT = 2048  # inputs; the short tiles up to here
ROWS = Tile(32, 256, 6, 4)
# More in flight where there are fewer programs than SMs; less where an SM runs several in sequence. One turn of
# 132 SMs rather than a second one of a few programs: 32 rows each are that for 4,224 rows, 64 for 8,448.
ROWS_MIDDLE, MIDDLE = Tile(64, 256, 4, 4), 4225  # rows of the weight; this tile from here on
ROWS_WIDE, WIDE = Tile(64, 128, 6, 4), 6144
ROWS_WIDER, WIDER = Tile(128, 128, 4, 4), 8449
ROWS_WIDEST, WIDEST = Tile(64, 128, 4, 4), 12288
# Gate and up projection, half of a program's rows each. The compiler would take 66 registers for one row, with which an
# SM holds three programs instead of four. With 64 nothing spills on any architecture.
GATED_ONE_ROW = ONE_ROW._replace(registers=64)
GATED_ONE_ROW_SHORT = ONE_ROW_SHORT._replace(registers=64)
GATED_ROWS = ROWS
GATED_ROWS_WIDE = ROWS_WIDEST


@triton.jit
def find_rows(n, GATED: tl.constexpr, BN: tl.constexpr):
    """This program's rows of the weight and the mask of those that exist, ``[BN]``; then its outputs, of ``n`` in all.

    If gated, output ``i`` needs rows ``i`` and ``n + i``, which are adjacent in the tile.
    """
    o_row = tl.program_id(0) * BN + tl.arange(0, BN)
    if GATED:
        o_out = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        o_row = o_row // 2 + (o_row % 2) * n
        m_row = tl.program_id(0) * (BN // 2) + tl.arange(0, BN) // 2 < n
    else:
        o_out = o_row
        m_row = o_row < n
    return o_row, m_row, o_out, o_out < n


@triton.jit
def small_linear_one_row_kernel(
    p_x,
    weight,
    p_bias,
    p_out,
    n,
    k,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` rows of the weight times one row of ``k`` inputs. ``n``: outputs. ``EVEN``: tiles are full."""
    o_n, m_n, o_out, m_out = find_rows(n, ACTIVATION is not None, BN)
    o_k = tl.arange(0, BK)
    m_k = o_k < k
    p_row = weight.ptr + o_n.to(tl.int64)[:, None] * weight.row
    # The first weights are in flight before the kernel that computes the input has ended.
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
    b_out = b_out.to(p_out.dtype.element_ty)
    if ACTIVATION is not None:
        b_gate, b_up = tl.split(tl.reshape(b_out, [BN // 2, 2]))
        b_out = gate_times_up(b_gate, b_up, ACTIVATION == "silu")
    tl.store(p_out + o_out, b_out, mask=m_out)


@triton.jit
def small_linear_rows_kernel(
    x,
    weight,
    p_bias,
    p_out,
    rows,
    n,
    k,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` rows of the weight times all rows of ``x``, on tensor cores. ``n``: outputs. ``EVEN``: tiles are full."""
    o_n, m_n, o_out, m_out = find_rows(n, ACTIVATION is not None, BN)
    o_k = tl.arange(0, BK)
    o_m = tl.arange(0, ROWS)
    m_m = o_m < rows
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
    b_out = b_sum.to(p_out.dtype.element_ty)
    if ACTIVATION is not None:
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_out, [BN // 2, 2, ROWS]), (0, 2, 1)))
        b_out = gate_times_up(b_gate, b_up, ACTIVATION == "silu")
    tl.store(p_out + o_m[None, :] * n + o_out[:, None], b_out, mask=m_out[:, None] & m_m[None, :])


def tile(rows: int, n: int, k: int, is_gated: bool) -> Tile:
    """The tile for ``rows`` rows of ``k`` inputs and ``n`` rows of the weight."""
    is_even = k % ONE_ROW.inputs == 0
    if rows == 1 and is_gated:
        return GATED_ONE_ROW if is_even else GATED_ONE_ROW_SHORT
    if rows == 1:
        return ONE_ROW_SHORT if k <= SHORT else ONE_ROW if is_even else ONE_ROW_UNEVEN
    if is_gated:
        return GATED_ROWS_WIDE if n >= WIDE else GATED_ROWS
    wide = ((WIDEST, ROWS_WIDEST), (WIDER, ROWS_WIDER), (WIDE, ROWS_WIDE), (MIDDLE, ROWS_MIDDLE))
    return next((chosen for least, chosen in wide if n >= least), ROWS)


def _fitting(config: Tile, x: Tensor) -> Tile:
    """``config`` with as many steps in flight as fit shared memory."""
    held = (config.rows + MAX_ROWS) * config.inputs * x.element_size()
    return config._replace(stages=max(1, min(config.stages, _device.shared_memory(x) // held)))


def small_linear(x, weight, bias=None, activation=None, config=None):
    """As ``reference.small_linear``. Float32 only for a single row: tensor cores would round it.

    ``config``, a :class:`Tile`, replaces the default for these shapes.
    """
    n, k = weight.shape
    x_rows = x.reshape(-1, k)
    rows = x_rows.shape[0]
    if rows > MAX_ROWS or (rows > 1 and x.dtype == torch.float32):
        raise ValueError(f"at most {MAX_ROWS} rows, in float32 one; got {rows} of {x.dtype}")
    check(weight, activation)
    require_dense_rows(x=x_rows, weight=weight)
    outputs = n if activation is None else n // 2
    out = x.new_empty(*x.shape[:-1], outputs)
    if not out.numel():
        return out
    config = config or tile(rows, n, k, activation is not None)
    bn, bk, stages, warps, registers = config if rows == 1 else _fitting(config, x)
    fixed = {"EVEN": n % bn == 0 and k % bk == 0, "BN": bn, "BK": bk, "STAGES": stages, "num_warps": warps}
    fixed |= {"ACTIVATION": activation} | ({} if registers is None else {"maxnreg": registers})
    grid, operands = (triton.cdiv(n, bn),), (operand(Table, weight), bias, out)
    if rows == 1:
        launch(small_linear_one_row_kernel, grid, x, x_rows, *operands, outputs, k, **fixed)
    else:
        named = {"ROWS": MAX_ROWS, **fixed}
        launch(small_linear_rows_kernel, grid, x, operand(Table, x_rows), *operands, rows, outputs, k, **named)
    return out
