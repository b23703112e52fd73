"""What the kernels of experts share: weights as operands, and what stands between the products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._dispatch import require_dense_rows
from .gates import Gate
from .mxfp4 import Mxfp4

ROWS, COLUMNS, CODES = (
    tl.constexpr(kind) for kind in range(3)
)  # weights: inputs contiguous, outputs contiguous, MXFP4


class Weights(NamedTuple):
    """``[E, n, d]``, or words of codes int32 ``[E, n, d / 8]`` and scales ``[E, n, d / 32]``; biases ``[E, n]``."""

    ptr: Any
    expert: Any
    row: Any
    col: Any
    scales: Any
    scales_expert: Any
    scales_row: Any
    bias: Any
    bias_expert: Any


def weights_operand(weight: Tensor | Mxfp4, bias: Tensor | None) -> Weights:
    """Both as one operand.

    Raises:
        ValueError: the weights are not dense in one of the last two dimensions.
    """
    require_dense_rows(bias=bias)
    biased = (None, 0) if bias is None else (bias, bias.stride(0))
    if isinstance(weight, Mxfp4):
        words = weight.codes.view(torch.int32)
        return Weights(words, *words.stride()[:3], weight.scales, *weight.scales.stride()[:2], *biased)  # type: ignore[call-arg]
    if weight.numel() and 1 not in weight.stride()[1:]:
        raise ValueError(f"one of the last two dimensions of weights must be contiguous, got strides {weight.stride()}")
    return Weights(weight, *weight.stride(), None, 0, 0, *biased)  # type: ignore[call-arg]


def kind_of(weight: Tensor | Mxfp4) -> int:
    """How the weights lie in memory."""
    if isinstance(weight, Mxfp4):
        return CODES.value
    return ROWS.value if weight.stride(2) == 1 else COLUMNS.value


def form_of(gate: Gate) -> tuple:
    """The gate as compile-time constants."""
    gate.check()
    limit = gate.limit if gate.limit < float("inf") else None
    return gate.activation, gate.gated, gate.interleaved, gate.alpha, limit, gate.offset, gate.limits_active


@triton.jit
def e2m1(code):
    """Values of codes, each divided by ``2 ** 14``, as float16: its exponent's lowest bits are the code's."""
    return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def low_half(bits):
    """The float16 in the lower half of each word, as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def two_values(words, AT: tl.constexpr):
    """Values of codes ``AT`` and ``AT + 4`` of each word, divided by ``2 ** 14``.

    They become the halves of a word at once: their exponents, and their signs, each by one shift.
    """
    b_bits = ((words << (9 - 4 * AT)) if AT < 3 else (words >> 3)) & 0x0E000E00
    b_bits |= (words << (12 - 4 * AT)) & -0x7FFF8000
    return low_half(b_bits), low_half(b_bits >> 16)


@triton.jit
def block_scale(scale):
    """``2 ** (scale - 127 + 14)``, float32."""
    return ((scale.to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def most(b, limit):
    """The lesser of both; NaN stays."""
    return tl.where(b > limit, limit, b)


@triton.jit
def activated(b, FORM: tl.constexpr):
    """The activation of float32 values."""
    act: tl.constexpr = FORM[0]
    alpha: tl.constexpr = FORM[3]
    b_out = b
    if act == "silu":
        b_out = b * tl.sigmoid(alpha * b)
    elif act == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        b_out = b * tl.sigmoid(1.5957691216057308 * (b + 0.044715 * b * b * b))
    elif act == "gelu":
        b_out = 0.5 * b * (1.0 + tl.erf(b * 0.7071067811865476))
    elif act == "relu":
        b_out = tl.where(b < 0.0, 0.0, b)
    elif act == "relu2":
        b_out = tl.where(b < 0.0, 0.0, b)
        b_out = b_out * b_out
    return b_out


@triton.jit
def gate_rows(i_n, n, BN: tl.constexpr, FORM: tl.constexpr):
    """Rows of the first product for results ``i_n * BN ...`` of ``n``, and which there are, ``[BN]`` or ``[2 * BN]``.

    Pairs are neighbours where they are in the weights; elsewhere ``BN`` gates come before ``BN`` ups.
    """
    gated: tl.constexpr = FORM[1]
    interleaved: tl.constexpr = FORM[2]
    if gated:
        o = tl.arange(0, 2 * BN)
        if interleaved:
            o_row, o_n = 2 * i_n * BN + o, i_n * BN + o // 2
        else:
            o_n = i_n * BN + o % BN
            o_row = o_n + (o // BN) * n
    else:
        o_n = i_n * BN + tl.arange(0, BN)
        o_row = o_n
    return o_row, o_n < n


@triton.jit
def gated_values(b_values, BM: tl.constexpr, BN: tl.constexpr, FORM: tl.constexpr):
    """``[BM, BN]`` of values in the rows of :func:`gate_rows`, ``[BM, BN]`` or ``[BM, 2 * BN]``: as the definition."""
    gated: tl.constexpr = FORM[1]
    interleaved: tl.constexpr = FORM[2]
    limit: tl.constexpr = FORM[4]
    offset: tl.constexpr = FORM[5]
    limits_active: tl.constexpr = FORM[6]
    if gated:
        if interleaved:
            b_first, b_up = tl.split(tl.reshape(b_values, [BM, BN, 2]))
        else:
            b_first, b_up = tl.split(tl.permute(tl.reshape(b_values, [BM, 2, BN]), [0, 2, 1]))
        b_wide, b_other = b_first.to(tl.float32), b_up.to(tl.float32)
        if limit is not None:
            if not limits_active:
                b_wide = most(b_wide, limit)
            b_other = -most(-most(b_other, limit), limit)
        b_active = activated(b_wide, FORM)
        if limits_active:
            b_active = most(b_active, limit)
        b_active = b_active.to(b_values.dtype).to(tl.float32)
        b_out = (b_active * (b_other + offset)).to(b_values.dtype)
    else:
        b_out = activated(b_values.to(tl.float32), FORM).to(b_values.dtype)
    return b_out


def empty(x: Tensor, *shape: int) -> Tensor:
    """A new tensor of the dtype and on the device of ``x``."""
    return torch.empty(shape, dtype=x.dtype, device=x.device)
