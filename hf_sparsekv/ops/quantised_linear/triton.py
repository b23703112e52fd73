"""A linear layer of a few rows whose weights are kept in 8 bits: the kernels. (For 4 bits: :mod:`.codebook`.)

As those of :mod:`.small_linear`, all that counts is to read the weights at the memory's speed. A weight is a byte, so
tiles are twice as wide, and twice as much has to be computed in the time that its bytes take. Scales stay out of the
loop where one is of whole rows: they multiply the sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _device
from .._dispatch import require_dense_rows
from .._operands import Table, operand
from .._overlap import begin, launch
from . import has_fp8, lookup, reference
from .reference import FP8, LEAST, MAX_ROWS, QuantisedWeight, check


class Tile(NamedTuple):
    """Rows of the weight a program, inputs a step of its loop, steps in flight, warps.

    ``registers`` of a thread at most; None: as many as the compiler likes.
    """

    rows: int
    inputs: int
    stages: int
    warps: int
    registers: int | None = None


# Measured on an H200, int8, an 8B model's layers (`operator --sweep quantised_linear`): 4096 x 4096 5.9 us, 12288 x
# 4096 12.8, 4096 x 12288 13.6. Tiles of 4,096 inputs without a limit of registers take up to a third more.
ONE_ROW = Tile(4, 2048, 1, 4)
ONE_ROW_SHORT, SHORT = Tile(4, 1024, 1, 4), 2048  # inputs; short tiles below
ONE_ROW_LONG, LONG = Tile(4, 4096, 1, 8, 64), 8192  # long ones from here on
# More than one row, where lookup.cu does not serve.
ROWS = Tile(32, 512, 5, 4)
ROWS_WIDE, WIDE = Tile(64, 256, 6, 4), 6144  # rows of the weight; this tile from here on
# Scales of blocks: a step lies within one block of inputs, usually 128, so more of them are in flight.
ROWS_BLOCKS = Tile(32, 128, 12, 4)
ROWS_BLOCKS_WIDE = Tile(64, 128, 10, 4)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # Triton's interpreter cannot run inline assembly
FOLD = tl.constexpr(16)  # weights that a thread loads at once: 16 bytes


@triton.jit
def as_float(b_w):
    """Codes as float32, exactly.

    Integers: four bytes at once become the low bits of 2 ** 23 and more, from which a difference makes what they are.
    A conversion has a quarter of the rate of either.
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

    What a thread has loaded at once it sums at once: as many sums as products would take the registers that hold
    weights on their way. It reads ``FOLD`` inputs, which are twice as wide, in two halves, and scales the sum.
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
    # The first weights are on their way before the kernel that makes the input has ended.
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


@triton.jit(do_not_specialize=["rows"])
def quantised_rows_kernel(
    x,
    weight,
    scales,
    p_bias,
    p_out,
    rows,
    n,
    k,
    block_rows,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` rows of ``n`` times all rows of ``x``, on tensor cores. ``EVEN``: tiles are full.

    ``block_rows`` and ``GROUP`` inputs share a scale, all inputs if ``GROUP`` is 0. A step's lie within one block.
    """
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < n
    o_k = tl.arange(0, BK)
    o_m = tl.arange(0, ROWS)
    m_m = o_m < rows
    p_row = weight.ptr + o_n.to(tl.int64)[:, None] * weight.row
    p_scale = scales.ptr + tl.minimum(o_n, n - 1) // block_rows * scales.row
    b_sum = tl.zeros([BN, ROWS], tl.float32)
    begin(PDL)
    for k_0 in tl.range(0, k, BK, num_stages=STAGES):
        if EVEN:
            b_w = tl.load(p_row + (k_0 + o_k)[None, :], eviction_policy="evict_first")  # [BN, BK]
            m_x = m_m[None, :]
        else:
            m_k = k_0 + o_k < k
            b_w = tl.load(p_row + (k_0 + o_k)[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)  # [BN, BK]
            m_x = m_m[None, :] & m_k[:, None]
        b_x = tl.load(x.ptr + o_m[None, :] * x.row + (k_0 + o_k)[:, None], mask=m_x, other=0.0)  # [BK, ROWS]
        if b_w.dtype == tl.float8e4nv:  # at once to bfloat16 would be as exact, at a quarter of the rate
            b_w = b_w.to(tl.float16).to(tl.float32)
        b_w = b_w.to(b_x.dtype)
        if GROUP:
            b_sum += tl.dot(b_w, b_x) * tl.load(p_scale + k_0 // GROUP)[:, None]
        else:
            b_sum = tl.dot(b_w, b_x, b_sum)
    if not GROUP:
        b_sum *= tl.load(p_scale)[:, None]
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    b_out = b_sum.to(p_out.dtype.element_ty)
    tl.store(p_out + o_m[None, :] * n + o_n[:, None], b_out, mask=m_n[:, None] & m_m[None, :])


def tile(rows: int, weight: QuantisedWeight) -> Tile:
    """For ``rows`` of inputs."""
    n, k = weight.out_features, weight.in_features
    if rows == 1:
        return ONE_ROW_LONG if k >= LONG else ONE_ROW if k >= SHORT else ONE_ROW_SHORT
    if weight.scales.shape[1] > 1:
        return ROWS_BLOCKS_WIDE if n >= WIDE else ROWS_BLOCKS
    return ROWS_WIDE if n >= WIDE else ROWS


def _fitting(config: Tile, x: Tensor) -> Tile:
    """With fewer steps in flight where they would not fit."""
    held = config.inputs * (config.rows + MAX_ROWS * x.element_size())
    return config._replace(stages=max(1, min(config.stages, _device.shared_memory(x) // held)))


def step_within(group: int, most: int) -> int:
    """Inputs of a step, a power of two and ``most`` at most, that lie within one of the blocks of ``group``."""
    return min(most, group & -group)


def quantised_linear(x, weight, bias=None, config=None):
    """As ``reference.quantised_linear``. Float32 only for a single row: tensor cores would round it.

    More than one row, and codes that Triton does not know, by :func:`.lookup.multiply` where it serves. ``config``, a
    :class:`Tile`: by Triton, with that instead of the one for these shapes.
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
    by_triton = codebook is None and (codes.dtype != FP8 or has_fp8(x.get_device()))
    if config is None and (rows > 1 or not by_triton) and lookup.serves(x, weight):
        like_x = bias if bias is None else bias.to(x.dtype)
        if lookup.multiply(lookup.aligned(x_rows), weight, like_x, out.view(rows, n)):
            return out
    if not by_triton:
        return reference.quantised_linear(x, weight, bias)
    block_rows, group = weight.block if scales.shape[1] > 1 else (weight.block[0], 0)
    config = config or tile(rows, weight)
    if group % LEAST:
        raise ValueError(f"scales of {group} inputs each: the kernels need a multiple of {LEAST}")
    if rows > 1:
        config = _fitting(config._replace(inputs=step_within(group, config.inputs) if group else config.inputs), x)
    bn, bk, stages, warps, registers = config
    fixed = {"EVEN": n % bn == 0 and k % bk == 0, "BN": bn, "BK": bk, "STAGES": stages, "num_warps": warps}
    fixed |= {"GROUP": group} | ({} if registers is None else {"maxnreg": registers})
    operands = operand(Table, codes), operand(Table, scales), bias, out
    grid = (triton.cdiv(n, bn),)
    if rows == 1:
        launch(quantised_one_row_kernel, grid, x, x_rows, *operands, n, k, block_rows, **fixed)
    else:
        named = {"ROWS": MAX_ROWS, **fixed}
        launch(quantised_rows_kernel, grid, x, operand(Table, x_rows), *operands, rows, n, k, block_rows, **named)
    return out
