"""Routed experts for prompts: torch's grouped products, with kernels before, between and after."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._operands import Table, operand
from ..._overlap import begin, launch
from .gates import RAW, Gate
from .mxfp4 import Mxfp4
from .tiles import block_scale, e2m1, empty, form_of, gate_rows, gated_values
from .together import weighted_sum

VALUES = 512  # results of a program between the products
CODES = 1024  # bytes of a program that unpacks codes


@triton.jit
def unpack_kernel(p_codes, p_scales, p_out, total, CODES: tl.constexpr, PDL: tl.constexpr):
    """Weights of ``CODES`` bytes."""
    begin(PDL)
    o = tl.program_id(0).to(tl.int64) * CODES + tl.arange(0, CODES)
    b_codes = tl.load(p_codes + o, mask=o < total, other=0).to(tl.int32)
    b_scale = block_scale(tl.load(p_scales + o // 16, mask=o < total, other=0))
    b_low, b_high = e2m1(b_codes & 15).to(tl.float32) * b_scale, e2m1(b_codes >> 4).to(tl.float32) * b_scale
    b_both = tl.reshape(tl.join(b_low, b_high), [2 * CODES]).to(p_out.dtype.element_ty)
    o_out = tl.program_id(0).to(tl.int64) * 2 * CODES + tl.arange(0, 2 * CODES)
    tl.store(p_out + o_out, b_both, mask=o_out < 2 * total)


def unpack(weight: Mxfp4, like: Tensor) -> Tensor:
    """The weights ``[E, n, d]``, in the dtype of ``like``."""
    total = weight.codes.numel()
    out = empty(like, *weight.shape)
    launch(unpack_kernel, (triton.cdiv(total, CODES),), like, weight.codes, weight.scales, out, total, CODES=CODES)
    return out


@triton.jit
def between_kernel(values, p_expert, p_bias, p_out, n, FORM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    """``BN`` values between the products of one pair."""
    begin(PDL)
    pair = tl.program_id(0).to(tl.int64)
    o_row, m_row = gate_rows(tl.program_id(1), n, BN, FORM)
    b_values = tl.load(values.ptr + pair * values.row + o_row, mask=m_row, other=0.0)
    if p_bias is not None:
        expert = tl.load(p_expert + pair).to(tl.int64)
        gated: tl.constexpr = FORM[1]
        rows = n * 2 if gated else n
        b_bias = tl.load(p_bias + expert * rows + o_row, mask=m_row, other=0.0).to(tl.float32)
        b_values = (b_values.to(tl.float32) + b_bias).to(b_values.dtype)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    b_out = gated_values(b_values[None, :], 1, BN, FORM)
    tl.store((p_out + pair * n + o_n)[None, :], b_out, mask=(o_n < n)[None, :])


def between(values: Tensor, expert: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
    """``gate`` of ``values [pairs, n]`` plus the bias of each pair's expert."""
    pairs, n = values.shape
    n //= gate.rows
    out = empty(values, pairs, n)
    bn = min(VALUES, triton.next_power_of_2(n))
    args = operand(Table, values), expert, None if bias is None else bias.contiguous(), out, n
    launch(between_kernel, (pairs, triton.cdiv(n, bn)), values, *args, FORM=form_of(gate), BN=bn)
    return out


def serves(x: Tensor, gate_up: Tensor | Mxfp4, down: Tensor | Mxfp4) -> bool:
    """Whether torch's grouped products take these: bfloat16, rows of whole 16 bytes."""
    return x.dtype == torch.bfloat16 and all(size % 8 == 0 for w in (gate_up, down) for size in w.shape[1:])


def experts_grouped(x, index, weights, gate_up, down, gate, gate_up_bias=None, down_bias=None):
    """As ``reference.experts``, where :func:`serves`."""
    count, k = gate_up.shape[0], index.shape[1]
    flat = index.reshape(-1)
    expert, pair = torch.where((flat >= 0) & (flat < count), flat, count).sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(1, count + 1, device=x.device, dtype=expert.dtype), out_int32=True)
    place = torch.empty_like(pair, dtype=torch.int32)
    place[pair] = torch.arange(len(pair), dtype=torch.int32, device=x.device)
    held = expert.clamp(max=count - 1)

    def product(rows: Tensor, weight: Tensor | Mxfp4) -> Tensor:
        plain = unpack(weight, x) if isinstance(weight, Mxfp4) else weight
        return torch.nn.functional.grouped_mm(rows, plain.transpose(1, 2), offs=ends)

    values = product(x[pair // k], gate_up)
    if isinstance(gate, Gate):
        middle = between(values, held, gate_up_bias, gate)
    else:
        middle = gate(between(values, held, gate_up_bias, RAW)).contiguous()
    del values
    return weighted_sum(product(middle, down), index, weights, count, place, down_bias)
