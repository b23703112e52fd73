"""The product of a gated MLP: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._operands import Table, operand
from ..._overlap import begin, launch
from .reference import ACTIVATIONS

TILE = 1024  # values a program; a decode step of an 8B model has 12 tiles a row. Not measured yet.


@triton.jit
def gate_times_up(b_gate, b_up, SILU: tl.constexpr):
    """The activation of ``b_gate`` times ``b_up``, both in the result's dtype; rounded as the reference."""
    b_wide = b_gate.to(tl.float32)
    if SILU:
        b_arg = b_wide
    else:
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        b_arg = 1.5957691216057308 * (b_wide + 0.044715 * b_wide * b_wide * b_wide)
    b_active = (b_wide * tl.sigmoid(b_arg)).to(b_gate.dtype)
    return (b_active.to(tl.float32) * b_up.to(tl.float32)).to(b_gate.dtype)


@triton.jit
def gated_kernel(gate, up, p_out, n, SILU: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """``TILE`` values of one row."""
    begin(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_n = o_n < n
    b_gate = tl.load(gate.ptr + i_row * gate.row + o_n, mask=m_n, other=0.0)  # [TILE]
    b_up = tl.load(up.ptr + i_row * up.row + o_n, mask=m_n, other=0.0)  # [TILE]
    tl.store(p_out + i_row * n + o_n, gate_times_up(b_gate, b_up, SILU), mask=m_n)


def gated(gate, up, activation):
    """As ``reference.gated``. Rows may be parts of longer ones; the result is contiguous."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    n = gate.shape[-1]
    require_dense_rows(gate=gate, up=up)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if out.numel():
        rows = (operand(Table, t.reshape(-1, n)) for t in (gate, up))
        tile = min(TILE, triton.next_power_of_2(n))
        grid = out.numel() // n, triton.cdiv(n, tile)
        launch(gated_kernel, grid, out, *rows, out, n, SILU=activation == "silu", TILE=tile)
    return out
