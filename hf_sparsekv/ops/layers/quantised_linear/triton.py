"""A linear layer of one row of inputs and weights in 8 bits. (4 bits, and more than one row: :mod:`.lookup`.)

As in :mod:`.small_linear`, the aim is to read the weights at the memory's bandwidth. A weight is one byte, so there is
twice as much computation per byte as with 16 bits. Scales of whole rows stay out of the loop and multiply the sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._operands import Table, operand
from ..._overlap import begin, launch
from ..small_linear.triton import Tile
from . import has_fp8, lookup, reference
from .reference import FP8, LEAST, MAX_ROWS, check

# Measured on an H200, int8, an 8B model's layers (benchmarks/NOTES.md): 4096 x 4096 5.9 us, 12288 x
# 4096 12.8, 4096 x 12288 13.6. Tiles of 4,096 inputs without a limit of registers take up to a third more.
ONE_ROW = Tile(4, 2048, 1, 4)
ONE_ROW_SHORT, SHORT = Tile(4, 1024, 1, 4), 2048  # inputs; short tiles below
ONE_ROW_LONG, LONG = Tile(4, 4096, 1, 8, 64), 8192  # long ones from here on
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # Triton's interpreter cannot run inline assembly
FOLD = tl.constexpr(16)  # weights that a thread loads at once: 16 bytes


@triton.jit
def as_float(b_w):
    """Codes as float32, exactly.

    Integers: four bytes at once become the low bits of floats from 2 ** 23 on, and a subtraction gives their values.
    A conversion instruction has a quarter of the rate of either.
    """
    if COMPILED and b_w.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 u, a<4>;
            xor.b32 u, $4, 0x80808080;
            prmt.b32 a0, u, 0x4B000000, 0x7440;
            prmt.b32 a1, u, 0x4B000000, 0x7441;
            prmt.b32 a2, u, 0x4B000000, 0x7442;
            prmt.b32 a3, u, 0x4B000000, 0x7443;
            sub.f32 $0, a0, 0f4B000080;
            sub.f32 $1, a1, 0f4B000080;
            sub.f32 $2, a2, 0f4B000080;
            sub.f32 $3, a3, 0f4B000080;
            }""",
            "=f,=f,=f,=f,r",
            [b_w],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    return b_w.to(tl.float32)


@triton.jit
def one_step(
    b_w,
    p_x,
    p_scale,
    k_0,
    k,
    m_n,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Products of the weights ``[BN, BK]`` from input ``k_0`` on, neighbours summed: ``[BN, BK / FOLD]``, float32.

    A thread sums the products of one load at once. One sum per product would take the registers of weights in flight.
    It reads ``FOLD`` inputs, which are twice as wide, in two halves, and scales the sum.
    """
    o_fold = tl.arange(0, BK // FOLD)
    o_x = k_0 + o_fold[:, None] * FOLD + tl.arange(0, FOLD // 2)[None, :]  # [BK / FOLD, FOLD / 2]
    if EVEN:
        b_low = tl.load(p_x + o_x)
        b_high = tl.load(p_x + o_x + FOLD // 2)
    else:
        b_low = tl.load(p_x + o_x, mask=o_x < k, other=0.0)
        b_high = tl.load(p_x + o_x + FOLD // 2, mask=o_x + FOLD // 2 < k, other=0.0)
    b_w = tl.permute(tl.reshape(as_float(b_w), [BN, BK // FOLD, 2, FOLD // 2]), (0, 1, 3, 2))
    b_w_low, b_w_high = tl.split(b_w)  # [BN, BK / FOLD, FOLD / 2]
    b_sum = b_w_low * b_low.to(tl.float32)[None, :, :]
    b_sum += b_w_high * b_high.to(tl.float32)[None, :, :]
    b_sum = tl.sum(b_sum, axis=2)
    if GROUP:
        o_group = k_0 + o_fold * FOLD
        m_scale = m_n[:, None] & (o_group < k)[None, :]
        b_sum *= tl.load(p_scale[:, None] + (o_group // GROUP)[None, :], mask=m_scale, other=0.0)
    return b_sum


@triton.jit
def quantised_one_row_kernel(
    p_x,
    weight,
    scales,
    p_bias,
    p_out,
    n,
    k,
    block_rows,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` rows of ``n`` times one row of ``k`` inputs. ``EVEN``: tiles are full.

    ``block_rows`` and ``GROUP`` inputs share a scale, all inputs if ``GROUP`` is 0.
    """
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < n
    o_k = tl.arange(0, BK)
    p_row = weight.ptr + o_n.to(tl.int64)[:, None] * weight.row
    p_scale = scales.ptr + o_n // block_rows * scales.row
    # The first weights are in flight before the kernel that computes the input has ended.
    if EVEN:
        b_w = tl.load(p_row + o_k[None, :], eviction_policy="evict_first")  # [BN, BK]
    else:
        b_w = tl.load(p_row + o_k[None, :], mask=m_n[:, None] & (o_k < k)[None, :], other=0.0)  # [BN, BK]
    begin(PDL)
    b_sum = one_step(b_w, p_x, p_scale, 0, k, m_n, GROUP, EVEN, BN, BK)
    for k_0 in tl.range(BK, k, BK, num_stages=STAGES):
        if EVEN:
            b_w = tl.load(p_row + (k_0 + o_k)[None, :], eviction_policy="evict_first")  # [BN, BK]
        else:
            b_w = tl.load(p_row + (k_0 + o_k)[None, :], mask=m_n[:, None] & (k_0 + o_k < k)[None, :], other=0.0)
        b_sum += one_step(b_w, p_x, p_scale, k_0, k, m_n, GROUP, EVEN, BN, BK)
    b_out = tl.sum(b_sum, axis=1)
    if not GROUP:
        b_out *= tl.load(p_scale, mask=m_n, other=0.0)
    if p_bias is not None:
        b_out += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)


def tile(inputs: int) -> Tile:
    """The tile for one row of ``inputs`` inputs."""
    return ONE_ROW_LONG if inputs >= LONG else ONE_ROW if inputs >= SHORT else ONE_ROW_SHORT


def quantised_linear(x, weight, bias=None, config=None):
    """As ``reference.quantised_linear``. Float32 only for a single row: tensor cores would round it.

    Several rows, and codes that Triton does not support, go to :func:`.lookup.multiply`, or to the reference if that
    does not support them. ``config``, a :class:`Tile`, replaces the default for these shapes.
    """
    codes, scales, codebook = check(weight)
    n, k = weight.out_features, weight.in_features
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} inputs, the weight {k}")
    x_rows = x.reshape(-1, k)
    rows = x_rows.shape[0]
    if rows > MAX_ROWS or (rows > 1 and x.dtype == torch.float32):
        raise ValueError(f"at most {MAX_ROWS} rows, in float32 one; got {rows} of {x.dtype}")
    require_dense_rows(x=x_rows, codes=codes, scales=scales)
    out = x.new_empty(*x.shape[:-1], n)
    if not out.numel():
        return out
    if rows > 1 or codebook is not None or (codes.dtype == FP8 and not has_fp8(x.get_device())):
        like_x = bias if bias is None else bias.to(x.dtype)
        served = lookup.multiply(lookup.aligned(x_rows), weight, like_x, out.view(rows, n))
        return out if served else reference.quantised_linear(x, weight, bias)
    block_rows, group = weight.block if scales.shape[1] > 1 else (weight.block[0], 0)
    if group % LEAST:
        raise ValueError(f"scales of {group} inputs each: the kernel needs a multiple of {LEAST}")
    bn, bk, stages, warps, registers = config or tile(k)
    fixed = {"EVEN": n % bn == 0 and k % bk == 0, "BN": bn, "BK": bk, "STAGES": stages, "num_warps": warps}
    fixed |= {"GROUP": group} | ({} if registers is None else {"maxnreg": registers})
    operands = operand(Table, codes), operand(Table, scales), bias, out
    grid = (triton.cdiv(n, bn),)
    launch(quantised_one_row_kernel, grid, x, x_rows, *operands, n, k, block_rows, **fixed)
    return out
