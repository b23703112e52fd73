"""The routed experts of a mixture of experts: the kernels. Their time is that of reading the weights once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._operands import Rows, Table, operand, row_ptr
from ..._overlap import begin, launch, release, wait
from ..gated.reference import ACTIVATIONS
from ..gated.triton import gate_times_up
from .reference import MAX_TOKENS


class Weights(NamedTuple):
    """``[E, n, d]``."""

    ptr: Any
    expert: Any
    row: Any


class Tile(NamedTuple):
    """Outputs per program, inputs of each that it loads at once (in down projections those of all experts), warps.

    ``registers`` is a limit per thread; None for the compiler's choice.
    """

    rows: int
    inputs: int
    warps: int
    registers: int | None = None


# A layer of GLM-4.7-Flash, both kernels, H100, 1 / 6 / 16 tokens: 28.1 / 137 / 281 us. Its bytes at 3.08 TB/s take 24.6
# / 126 / 253 us (`benchmarks/operators/experts.py` of 9cce5c82). With one output of 6,144 inputs per program of the
# down projection it takes 29.2 / 164 / 344 us. Registers allow an SM five programs of the up projection, of 16 KB each,
# and eight of the down projection. Below 55 registers the up projection would spill with wider tokens.
UP = Tile(2, 2048, 8, 64)
DOWN = Tile(2, 4096, 2)
PART = tl.constexpr(8)  # inputs that a thread loads at once: 16 bytes of 2 each


@triton.jit
def partial_sums(
    p_row, m_row, p_x, m_x, d_0, d, EVEN: tl.constexpr, AHEAD: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr
):
    """Rows of weights times inputs, ``AHEAD * BD`` of ``d`` from ``d_0`` on: float32 ``[A, B, BD / PART]``.

    All loads of weights are in flight before the first product. The wait for the inputs, or a barrier, in between keeps
    the compiler from delaying loads to save registers.
    """
    ahead = ()
    for step in tl.static_range(AHEAD):
        o_d = d_0 + step * BD + tl.arange(0, BD)[None, None, :]
        if EVEN:
            b_w = tl.load(p_row + o_d)
        else:
            b_w = tl.load(p_row + o_d, mask=m_row & (o_d < d), other=0.0)
        ahead += (b_w,)
    if PDL:
        begin(PDL)
    else:
        tl.debug_barrier()
    b_sum = 0.0
    for step in tl.static_range(AHEAD):
        o_d = d_0 + step * BD + tl.arange(0, BD)[None, None, :]
        if EVEN:
            b_x = tl.load(p_x + o_d)
        else:
            b_x = tl.load(p_x + o_d, mask=m_x & (o_d < d), other=0.0)
        b_product = ahead[step].to(tl.float32) * b_x.to(tl.float32)
        # Sums within a thread, which then keeps one number a row instead of PART.
        b_sum += tl.sum(tl.reshape(b_product, [b_w.shape[0], b_w.shape[1], BD // PART, PART]), 3)
    return b_sum


@triton.jit
def row_sums(
    p_row,
    m_row,
    p_x,
    m_x,
    d,
    EVEN: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of ``d`` weights at ``p_row [A, B, 1]`` times inputs at ``p_x``, float32 ``[A, B]``.

    ``m_row``, ``m_x``: which there are; ``EVEN``: all. With ``PDL`` the inputs wait for the kernel before this one.
    """
    b_sum = partial_sums(p_row, m_row, p_x, m_x, 0, d, EVEN, AHEAD, BD, PDL)
    if STEPS > AHEAD:
        for d_0 in range(AHEAD * BD, d, AHEAD * BD):
            b_sum += partial_sums(p_row, m_row, p_x, m_x, d_0, d, EVEN, AHEAD, BD, False)
    return tl.sum(b_sum, 2)


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
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` values between the two products, of one token and expert. Neighbours share their expert's rows."""
    wait(PDL)
    release(PDL)  # not before: the next kernel reads `index` without waiting for this one's end
    i = tl.program_id(0)
    token, at = i // K, i % K
    expert = tl.load(row_ptr(index, token.to(tl.int64), at)).to(tl.int64)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_n = o_n < n
    o_row = o_n[:, None] + n * tl.arange(0, 2)[None, :]  # [BN, 2]: gate and up, side by side
    p_row = weight.ptr + expert * weight.expert + o_row.to(tl.int64)[:, :, None] * weight.row
    m_row = m_n[:, None, None]
    p_x = x.ptr + token.to(tl.int64) * x.row
    b_sum = row_sums(p_row, m_row, p_x, True, d, EVEN, STEPS, AHEAD, BD, False)  # [BN, 2]
    gate, up = tl.split(b_sum.to(p_out.dtype.element_ty))  # [BN], rounded as the reference
    tl.store(p_out + i.to(tl.int64) * n + o_n, gate_times_up(gate, up, SILU), mask=m_n)


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
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BN`` outputs of one token: the weighted sum over its experts, whose rows are all loaded at once."""
    token = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, triton.next_power_of_2(K))  # [k]
    m_k = o_k < K
    # The router has ended: the preceding kernel waited for it before it released this one. Weights are therefore
    # loaded while that kernel runs. Read from L2: an SM's L1 may hold older values until it waits.
    expert = tl.load(row_ptr(index, token, o_k), mask=m_k, other=0, cache_modifier=".cg").to(tl.int64)
    factor = tl.load(row_ptr(share, token, o_k), mask=m_k, other=0.0, cache_modifier=".cg").to(tl.float32)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m_n = o_n < n
    p_row = weight.ptr + (expert * weight.expert)[:, None, None] + (o_n.to(tl.int64) * weight.row)[None, :, None]
    m_x = m_k[:, None, None]
    m_row = m_x & m_n[None, :, None]
    p_x += ((token * K + o_k) * d)[:, None, None]
    b_sum = row_sums(p_row, m_row, p_x, m_x, d, EVEN, STEPS, AHEAD, BD, PDL)  # [k, BN]
    b_each = b_sum.to(p_out.dtype.element_ty).to(tl.float32)  # [k, BN], rounded as the reference
    b_out = tl.sum(b_each * factor[:, None], 0)
    tl.store(p_out + token * n + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)


def _fixed(tile: Tile, n: int, d: int, k: int, experts: int) -> dict:
    """Compile-time constants of a kernel for ``n`` outputs of ``d`` inputs, with ``experts`` experts per program."""
    held = triton.next_power_of_2(experts)
    bd = min(32 * PART.value * tile.warps, max(PART.value, triton.next_power_of_2(d)))
    steps = triton.cdiv(d, bd)
    ahead = min(steps, max(1, tile.inputs // (held * bd)))
    even = n % tile.rows == 0 and d % (ahead * bd) == 0 and held == experts
    fixed = {"K": k, "EVEN": even, "STEPS": steps, "AHEAD": ahead}
    fixed |= {"BN": tile.rows, "BD": bd, "num_warps": tile.warps}
    return fixed if tile.registers is None else {**fixed, "maxnreg": tile.registers}


def experts_up(x, index, gate_up, activation, tile=UP):
    """``activation(gate) * up`` of each token's experts, ``[tokens * k, I]``."""
    tokens, k = index.shape
    inner, width = gate_up.shape[1] // 2, x.shape[1]
    out = x.new_empty(tokens * k, inner)
    args = operand(Table, x), operand(Rows, index), operand(Weights, gate_up), out, inner, width
    grid = tokens * k, triton.cdiv(inner, tile.rows)
    launch(experts_up_kernel, grid, x, *args, SILU=activation == "silu", **_fixed(tile, inner, width, k, 1))
    return out


def experts_down(x, index, weights, down, tile=DOWN):
    """The weighted sum over each token's experts, ``[tokens, D]``, of the output of :func:`experts_up`.

    ``index`` and ``weights`` are read before the preceding kernel has ended. That kernel must not write them, and must
    release after its wait, as the kernel of `experts_up` does.
    """
    tokens, k = index.shape
    width, inner = down.shape[1:]
    out = x.new_empty(tokens, width)
    args = x, operand(Rows, index), operand(Rows, weights), operand(Weights, down), out, width, inner
    launch(experts_down_kernel, (tokens, triton.cdiv(width, tile.rows)), x, *args, **_fixed(tile, width, inner, k, k))
    return out


def experts(x, index, weights, gate_up, down, activation):
    """As ``reference.experts``, of at most ``MAX_TOKENS`` tokens. The kernels read the weights where they are."""
    if len(x) > MAX_TOKENS:
        raise ValueError(f"at most {MAX_TOKENS} tokens, got {len(x)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    require_dense_rows(x=x, gate_up=gate_up, down=down)
    if not len(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return experts_down(experts_up(x, index, gate_up, activation), index, weights, down)
