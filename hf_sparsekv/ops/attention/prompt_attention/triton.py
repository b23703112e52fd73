"""Exact attention of a prompt, or of a piece of it: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..._dispatch import require_dense_rows
from ..._operands import Tokens, describable, in_each_row, operand, padded
from ..._overlap import begin, launch
from ..._tiles import beginning, capped, factors, rescale, rows_of
from .config import config as default


@triton.jit
def _lowest(at, first, window, chunk, origin):
    """The lowest column that queries at columns ``at`` see."""
    low = tl.maximum(at * 0, first)
    if window is not None:
        low = tl.maximum(low, at - window + 1)
    if chunk is not None:
        low = tl.maximum(low, at - tl.maximum(at - origin, 0) % chunk)
    return low


@triton.jit
def _attend(b_q, k, v, p_columns, i_batch, i_kv, row, n, o_at, low, slope, top, b_max, b_sum, b_acc,
            DK: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, CAPPED: tl.constexpr, DESCRIPTORS: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """Maximum, sum and values with ``BN`` more keys. ``MASKED``: some of the queries do not see some of them."""
    b_k = rows_of(k, i_batch, i_kv, row, n, DK, BN, DESCRIPTORS, MASKED)
    b_s = capped(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), slope, CAPPED)  # [BM, BN]
    if MASKED:
        o_n = row + tl.arange(0, BN)
        seen = (o_n[None, :] <= o_at[:, None]) & (o_n[None, :] >= low[:, None])
        if p_columns is not None:
            seen &= (tl.load(p_columns + o_n, mask=o_n < n, other=0) != 0)[None, :]
        b_s = tl.where(seen, b_s, float("-inf"))
    b_max, b_safe, b_sum, b_acc = rescale(tl.max(b_s, 1) * top, b_max, b_sum, b_acc)
    b_p = tl.exp2(b_s * top - b_safe[:, None])
    b_sum += tl.sum(b_p, 1)
    b_v = rows_of(v, i_batch, i_kv, row, n, DV, BN, DESCRIPTORS, MASKED)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    return b_max, b_sum, b_acc


@triton.jit(do_not_specialize=["columns", "columns_row", "runs", "origin", "sinks", "past", "n", "window", "chunk"])
def prompt_attention_kernel(
    q,
    k,
    v,
    columns,
    columns_row,
    runs,
    origin,
    sinks,
    out,
    past,
    n,
    window,
    chunk,
    slope,
    top,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CAPPED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BM`` queries of a head: keys that only some of them see first, then those that all see."""
    begin(PDL)
    o_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # later ones have more to do
    i_batch, i_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_kv = i_head // GROUP
    o_first = past + o_m
    o_end = tl.minimum(o_first + BM, n)
    o_m += tl.arange(0, BM)
    o_at = past + o_m
    o_k, o_v = tl.arange(0, padded(DK)), tl.arange(0, padded(DV))
    p_q = q.ptr + i_batch * q.batch + i_head * q.head + o_m.to(tl.int64)[:, None] * q.token + o_k[None, :]
    b_q = tl.load(p_q, mask=(o_at < n)[:, None] & (o_k < DK)[None, :], other=0.0)

    begins, hidden, at_origin = 0, n, 0
    p_columns = None
    if columns is not None:  # the first token, and the first column after it that is none
        p_columns = columns + i_batch * columns_row
        begins, hidden = tl.load(runs + i_batch * 2), tl.load(runs + i_batch * 2 + 1)
    if origin is not None:
        at_origin = tl.load(origin + i_batch)
    low = _lowest(o_at, begins, window, chunk, at_origin)
    low_first = _lowest(o_first, begins, window, chunk, at_origin)
    low_last = _lowest(o_end - 1, begins, window, chunk, at_origin)
    # Tiles before `every` and from `every_end` on are seen by some of the queries, those between by all.
    i_first, i_end = low_first // BN, tl.cdiv(o_end, BN)
    every = tl.minimum(tl.maximum(tl.cdiv(low_last, BN), i_first), i_end)
    every_end = tl.maximum(tl.minimum(o_first + 1, hidden) // BN, every)
    if low_first >= o_end:
        i_first, every, every_end, i_end = 0, 0, 0, 0
    before = every - i_first
    skipped = every_end - every

    b_max, b_sum = beginning(sinks, i_head, BM)
    b_acc = tl.zeros([BM, padded(DV)], tl.float32)
    for i in tl.range(i_first, i_end - skipped, num_stages=STAGES):
        row = (i + tl.where(i - i_first >= before, skipped, 0)) * BN
        b_max, b_sum, b_acc = _attend(b_q, k, v, p_columns, i_batch, i_kv, row, n, o_at, low, slope, top, b_max, b_sum,
                                      b_acc, DK, DV, BN, CAPPED, DESCRIPTORS, True)  # fmt: skip
    for i in tl.range(every, every_end, num_stages=STAGES):
        b_max, b_sum, b_acc = _attend(b_q, k, v, p_columns, i_batch, i_kv, i * BN, n, o_at, low, slope, top, b_max,
                                      b_sum, b_acc, DK, DV, BN, CAPPED, DESCRIPTORS, False)  # fmt: skip
    b_acc = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    p_out = out.ptr + i_batch * out.batch + i_head * out.head + o_m.to(tl.int64)[:, None] * out.token + o_v[None, :]
    tl.store(p_out, b_acc.to(out.ptr.dtype.element_ty), mask=(o_at < n)[:, None] & (o_v < DV)[None, :])


def runs_of(columns: Tensor) -> Tensor:
    """Of each row the first token, and the first column after it that is none: int32 ``[batch, 2]``."""
    n = columns.shape[1]
    at = torch.arange(n, device=columns.device, dtype=torch.int32)
    begins = torch.where(columns, at, n).amin(1, keepdim=True)
    hidden = torch.where(columns | (at < begins), n, at).amin(1, keepdim=True)
    return torch.cat((begins, hidden), dim=1).int()


def prompt_attention(
    query, key, value, scale, columns=None, window=None, chunk=None, origin=None, softcap=None, sinks=None, out=None, *,
    config=None,
):  # fmt: skip
    """As ``reference.prompt_attention``; ``config`` replaces the default for these shapes."""
    batch, q_heads, q, dk = query.shape
    n, dv = value.shape[2:]
    require_dense_rows(query=query, key=key, value=value, columns=columns, out=out)
    if out is None:
        out = query.new_empty(batch, q, q_heads, dv).transpose(1, 2)
    config = config or default(query, dk, dv, window)
    descriptors = config.descriptors and describable(key, value)
    kv = [
        TensorDescriptor.from_tensor(t, [1, 1, config.tokens, padded(t.shape[3])])
        if descriptors
        else operand(Tokens, t)
        for t in (key, value)
    ]
    launch(
        prompt_attention_kernel,
        (triton.cdiv(q, config.rows), q_heads, batch),
        query,
        operand(Tokens, query),
        *kv,
        *in_each_row(columns),
        None if columns is None else runs_of(columns),
        None if chunk is None else origin,
        sinks,
        operand(Tokens, out),
        n - q,
        n,
        window if window is None or window < n else None,
        chunk,
        *factors(scale, softcap),
        GROUP=q_heads // key.shape[1],
        DK=dk,
        DV=dv,
        BM=config.rows,
        BN=config.tokens,
        CAPPED=softcap is not None,
        DESCRIPTORS=descriptors,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return out
