"""Routed experts for few tokens: the kernels. Their time is that of reading the chosen weights once.

Each token and expert has its programs, so a large batch reads an expert again for each token that chose it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..._operands import Rows, Table, operand, row_ptr
from ..._overlap import begin, launch, release, wait
from .gates import RAW, Gate
from .mxfp4 import BLOCK, Mxfp4
from .tiles import (
    CODES,
    COLUMNS,
    ROWS,
    block_scale,
    empty,
    form_of,
    gate_rows,
    gated_values,
    kind_of,
    two_values,
    weights_operand,
)


class Tile(NamedTuple):
    """Results per program, inputs of a load, inputs that are in flight at once, warps.

    In down projections the inputs in flight are those of all experts. ``registers`` is a limit per thread; None for the
    compiler's choice.
    """

    rows: int
    step: int
    inputs: int
    warps: int
    registers: int | None = None


# One H200, us of up and down projection at 1 / 8 tokens; in brackets the bytes of the chosen experts at 4.3 TB/s.
# Rows, Qwen3-30B-A3B: 13.7 + 7.7 (18) / 75 + 40 (113). Columns, gpt-oss-20b: 36 + 30 (46) / 219 + 116 (243).
# Codes, gpt-oss-20b: 25 + 14 (12) / 168 + 92 (65). What else was tried: `experts:few` in operator.csv.
UP = {
    ROWS.value: Tile(2, 1024, 1024, 2),
    COLUMNS.value: Tile(32, 64, 256, 4),
    CODES.value: Tile(8, 512, 1024, 4),
}
DOWN = {
    ROWS.value: Tile(8, 256, 2048, 8),
    COLUMNS.value: Tile(16, 128, 1024, 8),
    CODES.value: Tile(8, 512, 2048, 8),
}
WIDE_DOWN = Tile(64, 32, 256, 8)  # columns: from MANY tokens on there are programs enough
MANY = 4
PART = tl.constexpr(8)  # inputs that a thread loads at once: 16 bytes of 2 each


@triton.jit
def loaded(p, m, EVEN: tl.constexpr):
    """What is at ``p`` where ``m``, otherwise 0; ``EVEN``: everywhere."""
    if EVEN:
        return tl.load(p)
    else:
        return tl.load(p, mask=m, other=0)


@triton.jit
def code_products(b_words, b_scales, b_x):
    """Words of eight codes ``[A, B, W]`` times inputs ``[A or 1, 1, 8 W]``: float32 ``[A, B, W / 4]``."""
    W: tl.constexpr = b_words.shape[2]
    b_eight = tl.reshape(b_x.to(tl.float32), [b_x.shape[0], 1, W, 2, 2, 2])
    b_even, b_odd = tl.split(b_eight)
    b_04, b_26 = tl.split(b_even)
    b_15, b_37 = tl.split(b_odd)
    pairs = (tl.split(b_04), tl.split(b_15), tl.split(b_26), tl.split(b_37))
    b_sum = 0.0
    for i in tl.static_range(4):
        b_near, b_far = two_values(b_words, i)
        b_sum = b_far * pairs[i][1] + (b_near * pairs[i][0] + b_sum)  # two fused products
    b_blocks = tl.sum(tl.reshape(b_sum, [b_words.shape[0], b_words.shape[1], W // 4, 4]), 3)
    return b_blocks * block_scale(b_scales)


@triton.jit
def partial_sums(
    weight, p_row, p_scale, m_row, p_x, m_x, d_0, d, KIND: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
    BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of weights times inputs, ``AHEAD * BD`` of ``d`` from ``d_0`` on: float32 ``[A, B, parts]``.

    All loads of weights are in flight before the first product. The wait for the inputs, or a barrier, in between keeps
    the compiler from delaying loads to save registers.
    """
    ahead, scales = (), ()
    for step in tl.static_range(AHEAD):
        if KIND == CODES:
            o_w = (d_0 + step * BD) // 8 + tl.arange(0, BD // 8)[None, None, :]
            o_s = (d_0 + step * BD) // 32 + tl.arange(0, BD // 32)[None, None, :]
            ahead += (loaded(p_row + o_w, m_row & (o_w < d // 8), EVEN),)
            scales += (loaded(p_scale + o_s, m_row & (o_s < d // 32), EVEN),)
        else:
            o_d = d_0 + step * BD + tl.arange(0, BD)[None, None, :]
            ahead += (loaded(p_row + o_d * weight.col, m_row & (o_d < d), EVEN),)
    if PDL:
        begin(PDL)
    else:
        tl.debug_barrier()
    b_sum = 0.0
    for step in tl.static_range(AHEAD):
        o_d = d_0 + step * BD + tl.arange(0, BD)[None, None, :]
        b_x = loaded(p_x + o_d, m_x & (o_d < d), EVEN)
        if KIND == CODES:
            b_sum += code_products(ahead[step], scales[step], b_x)
        else:
            b_product = ahead[step].to(tl.float32) * b_x.to(tl.float32)
            if KIND == ROWS:
                # Sums within a thread, which then keeps one number a row instead of PART.
                b_product = tl.sum(tl.reshape(b_product, [b_product.shape[0], b_product.shape[1], BD // PART, PART]), 3)
            b_sum += b_product
    return b_sum


@triton.jit
def row_sums(
    weight, expert, o_row, m_row, p_x, m_x, d, KIND: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr,
    AHEAD: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows ``o_row [1, B, 1]`` of the experts ``[A, 1, 1]`` times ``d`` inputs at ``p_x``, float32 ``[A, B]``.

    ``m_row``, ``m_x``: which there are; ``EVEN``: all. With ``PDL`` the inputs wait for the kernel before this one.
    """
    p_row = weight.ptr + expert * weight.expert + o_row.to(tl.int64) * weight.row
    p_scale = p_row
    if KIND == CODES:
        p_scale = weight.scales + expert * weight.scales_expert + o_row.to(tl.int64) * weight.scales_row
    b_sum = partial_sums(weight, p_row, p_scale, m_row, p_x, m_x, 0, d, KIND, EVEN, AHEAD, BD, PDL)
    if STEPS > AHEAD:
        for d_0 in range(AHEAD * BD, d, AHEAD * BD):
            b_sum += partial_sums(weight, p_row, p_scale, m_row, p_x, m_x, d_0, d, KIND, EVEN, AHEAD, BD, False)
    return tl.sum(b_sum, 2)


@triton.jit
def experts_up_kernel(
    x, index, weight, p_out, n, d, count, K: tl.constexpr, FORM: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``BN`` values between the two products, of one token and expert. Neighbours share their expert's rows."""
    wait(PDL)
    release(PDL)  # not before: the next kernel reads `index` without waiting for this one's end
    i = tl.program_id(0)
    token, at = i // K, i % K
    expert = tl.load(row_ptr(index, token.to(tl.int64), at)).to(tl.int64)
    if (expert >= 0) & (expert < count):
        o_row, m_row = gate_rows(tl.program_id(1), n, BN, FORM)
        p_x = x.ptr + token.to(tl.int64) * x.row
        b_sum = row_sums(
            weight, expert, o_row[None, :, None], m_row[None, :, None], p_x, True, d, KIND, EVEN, STEPS, AHEAD, BD,
            False,
        )  # fmt: skip
        b_values = b_sum.to(p_out.dtype.element_ty)  # [1, BN or 2 BN], rounded as the reference
        if weight.bias is not None:
            p_bias = weight.bias + expert * weight.bias_expert + o_row
            b_bias = tl.load(p_bias, mask=m_row, other=0.0).to(tl.float32)[None, :]
            b_values = (b_values.to(tl.float32) + b_bias).to(b_values.dtype)
        o_n = tl.program_id(1) * BN + tl.arange(0, BN)
        p_n = (p_out + i.to(tl.int64) * n + o_n)[None, :]
        tl.store(p_n, gated_values(b_values, 1, BN, FORM), mask=(o_n < n)[None, :])


@triton.jit
def experts_down_kernel(
    p_x, index, share, weight, p_out, n, d, count, K: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``BN`` outputs of one token: the weighted sum over its experts, whose rows are all loaded at once."""
    token = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, triton.next_power_of_2(K))  # [k]
    m_k = o_k < K
    # The router has ended: the preceding kernel waited for it before it released this one. Weights are therefore
    # loaded while that kernel runs. Read from L2: an SM's L1 may hold older values until it waits.
    expert = tl.load(row_ptr(index, token, o_k), mask=m_k, other=-1, cache_modifier=".cg").to(tl.int64)
    m_k = (expert >= 0) & (expert < count)
    factor = tl.load(row_ptr(share, token, o_k), mask=m_k, other=0.0, cache_modifier=".cg").to(tl.float32)
    expert = tl.where(m_k, expert, 0)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_n = o_n < n
    m_x = m_k[:, None, None]
    m_row = m_x & m_n[None, :, None]
    p_x += ((token * K + o_k) * d)[:, None, None]
    b_sum = row_sums(
        weight, expert[:, None, None], o_n[None, :, None], m_row, p_x, m_x, d, KIND, EVEN, STEPS, AHEAD, BD, PDL
    )  # [k, BN]
    b_each = b_sum.to(p_out.dtype.element_ty).to(tl.float32)  # [k, BN], rounded as the reference
    if weight.bias is not None:
        p_bias = weight.bias + (expert * weight.bias_expert)[:, None] + o_n[None, :]
        b_each += tl.load(p_bias, mask=m_k[:, None] & m_n[None, :], other=0.0).to(tl.float32)
        b_each = b_each.to(p_out.dtype.element_ty).to(tl.float32)
    b_out = tl.sum(tl.where(m_k[:, None], b_each, 0.0) * factor[:, None], 0)
    tl.store(p_out + token * n + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)


def _fixed(tile: Tile, kind: int, n: int, d: int, k: int, held: int) -> dict:
    """Compile-time constants of a kernel for ``n`` results of ``d`` inputs, with ``held`` experts per program."""
    whole, held = held == triton.next_power_of_2(held), triton.next_power_of_2(held)
    least = {ROWS.value: PART.value, COLUMNS.value: 1, CODES.value: BLOCK}[kind]
    bd = min(tile.step, max(least, triton.next_power_of_2(d)))
    steps = triton.cdiv(d, bd)
    ahead = min(steps, max(1, tile.inputs // (held * bd)))
    even = n % tile.rows == 0 and d % (ahead * bd) == 0 and whole
    fixed = {"K": k, "KIND": kind, "EVEN": even, "STEPS": steps, "AHEAD": ahead}
    fixed |= {"BN": tile.rows, "BD": bd, "num_warps": tile.warps}
    return fixed if tile.registers is None else {**fixed, "maxnreg": tile.registers}


def experts_up(
    x: Tensor, index: Tensor, weight: Tensor | Mxfp4, gate: Gate, bias: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """What stands between the products of each token's experts, ``[tokens * k, I]``; undefined for no expert."""
    tokens, k = index.shape
    count, n, width = weight.shape
    n, kind = n // gate.rows, kind_of(weight)
    tile = tile or UP[kind]
    out = empty(x, tokens * k, n)
    args = operand(Table, x), operand(Rows, index), weights_operand(weight, bias), out, n, width, count
    grid = tokens * k, triton.cdiv(n, tile.rows)
    launch(experts_up_kernel, grid, x, *args, FORM=form_of(gate), **_fixed(tile, kind, n, width, k, 1))
    return out


def experts_down(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    weight: Tensor | Mxfp4,
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The weighted sum over each token's experts, ``[tokens, D]``, of the output of :func:`experts_up`.

    ``index`` and ``weights`` are read before the preceding kernel has ended. That kernel must not write them, and must
    release after its wait, as the kernel of `experts_up` does.
    """
    tokens, k = index.shape
    count, n, inner = weight.shape
    kind = kind_of(weight)
    if tile is None:
        tile = WIDE_DOWN if kind == COLUMNS.value and tokens >= MANY else DOWN[kind]
    out = empty(x, tokens, n)
    args = x, operand(Rows, index), operand(Rows, weights), weights_operand(weight, bias), out, n, inner, count
    grid = tokens, triton.cdiv(n, tile.rows)
    launch(experts_down_kernel, grid, x, *args, **_fixed(tile, kind, n, inner, k, k))
    return out


def experts_few(x, index, weights, gate_up, down, gate, gate_up_bias=None, down_bias=None):
    """As ``reference.experts``, for at least one token."""
    if isinstance(gate, Gate):
        middle = experts_up(x, index, gate_up, gate, gate_up_bias)
    else:
        middle = gate(experts_up(x, index, gate_up, RAW, gate_up_bias)).contiguous()
    return experts_down(middle, index, weights, down, down_bias)
