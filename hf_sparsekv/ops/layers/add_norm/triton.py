"""Add the residual stream and normalise the sum: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._operands import Table, operand
from ..._overlap import begin, launch
from .reference import MAX_WIDTH


@triton.jit
def _rms_norm(b_x, b_weight, n, eps, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr, ROUNDS_ONCE: tl.constexpr):
    """``b_x`` and ``b_weight`` ``[N]`` float32, zero beyond ``n``; rounded where the reference rounds."""
    b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / n + eps)
    if UNIT_OFFSET:
        b_x = b_x * (1.0 + b_weight)
    elif ROUNDS_ONCE:
        b_x = b_x * b_weight
    else:
        b_x = b_x.to(dtype).to(tl.float32) * b_weight
    return b_x.to(dtype)


@triton.jit
def add_norm_kernel(
    x,
    residual,
    p_weight,
    p_post,
    p_sum,
    p_out,
    n,
    eps,
    post_eps,
    UNIT_OFFSET: tl.constexpr,
    ROUNDS_ONCE: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of ``n`` values."""
    begin(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, N)
    m_n = o_n < n
    dtype = p_out.dtype.element_ty
    # All loads first: in a decode step their latency is most of the kernel's time.
    b_x = tl.load(x.ptr + i_row * x.row + o_n, mask=m_n, other=0.0).to(tl.float32)  # [N]
    b_weight = tl.load(p_weight + o_n, mask=m_n, other=0.0).to(tl.float32)  # [N]
    if residual is not None:
        b_residual = tl.load(residual.ptr + i_row * residual.row + o_n, mask=m_n, other=0.0).to(tl.float32)  # [N]
    if p_post is not None:
        b_post = tl.load(p_post + o_n, mask=m_n, other=0.0).to(tl.float32)  # [N]
        b_x = _rms_norm(b_x, b_post, n, post_eps, dtype, UNIT_OFFSET, ROUNDS_ONCE).to(tl.float32)
    if residual is not None:
        b_sum = (b_residual + b_x).to(dtype)
        tl.store(p_sum + i_row * n + o_n, b_sum, mask=m_n)
        b_x = b_sum.to(tl.float32)
    tl.store(p_out + i_row * n + o_n, _rms_norm(b_x, b_weight, n, eps, dtype, UNIT_OFFSET, ROUNDS_ONCE), mask=m_n)


def _rows(x: Tensor) -> Table:
    """Rows of ``x``. Each row is contiguous, but may be part of a longer one."""
    x = x.reshape(-1, x.shape[-1])
    return operand(Table, x if x.stride(1) == 1 else x.contiguous())


def add_norm(x, residual, weight, eps, unit_offset=False, post_weight=None, post_eps=0.0, rounds_once=False):
    """As ``reference.add_norm``. The results are contiguous."""
    n = x.shape[-1]
    if n > MAX_WIDTH:
        raise ValueError(f"rows of {n} values are too wide: at most {MAX_WIDTH}")
    if post_weight is not None and residual is None:
        raise ValueError("post_weight is for what is added to a residual")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(out)
    if not out.numel():
        return total, out
    width = triton.next_power_of_2(n)
    args = _rows(x), None if residual is None else _rows(residual), weight, post_weight, total, out, n, eps, post_eps
    # Eight values a thread: one 16-byte load of each operand. Not measured yet.
    warps = min(max(width // 256, 1), 16)
    fixed = {"UNIT_OFFSET": unit_offset, "ROUNDS_ONCE": rounds_once, "N": width}
    launch(add_norm_kernel, (out.numel() // n,), x, *args, **fixed, num_warps=warps)
    return total, out
