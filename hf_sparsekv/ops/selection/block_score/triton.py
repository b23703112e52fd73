"""Score of every stored block for one query: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows, require_rows
from ..._group import MANY, mean_heads
from ..._layout import empty_rows
from ..._operands import PagedKV, Query, Rows, Table, batch_and_head, operand, padded, row_ptr
from ..._overlap import begin, launch
from ..._paged import load_row
from .config import config as default


@triton.jit(do_not_specialize=["rows", "n"])
def block_score_kernel(
    q,
    bounds,
    rows,
    table,
    out,
    n,
    tokens,
    sinks,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    DK: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    REDUCE: tl.constexpr,
    FILL: tl.constexpr,
    NATIVE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of ``BN`` blocks of one row and KV head, from ``BK`` channels at a time."""
    begin(PDL)
    BG: tl.constexpr = padded(GROUP, 2 if COUNT < GROUP else 16)
    i_row = tl.program_id(1)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    sealed = load_row(rows, i_batch)[1]
    if not FILL:
        n = tl.minimum(n, tl.cdiv(sealed, tokens))
        if tl.program_id(0) * BN >= n:
            return
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < n
    m_live = m_n & (o_n * tokens < sealed) & (o_n * tokens + tokens > sinks)
    b_physical_id = tl.load(table.ptr + i_batch * table.row + o_n, mask=m_live, other=-1).to(tl.int64)  # [BN]
    m_live = b_physical_id >= 0

    o_g = tl.arange(0, BG)
    o_far = o_g.to(tl.int64)[:, None]  # heads of a prompt's last query are as far apart as the prompt is long
    p_row = q.ptr + i_batch * q.batch + i_head * GROUP * q.head + o_far * q.head
    p_box = bounds.ptr + b_physical_id[:, None] * bounds.block + i_head * bounds.head
    if REDUCE == "mean":
        b_both = tl.zeros([BN, BK], tl.float32)
    else:
        b_all = tl.zeros([BG, BN], tl.float32)
    for i in tl.range(0, DK, BK, num_stages=STAGES):
        o_k = i + tl.arange(0, BK)
        m_q = (o_g < GROUP)[:, None] & (o_k < DK)[None, :]
        b_q = tl.load(p_row + o_k[None, :] * q.dim, mask=m_q, other=0.0).to(tl.float32)
        b_one = tl.maximum(b_q, 0.0, propagate_nan=tl.PropagateNan.ALL)  # [BG, BK]
        b_two = tl.minimum(b_q, 0.0, propagate_nan=tl.PropagateNan.ALL)
        # Blocks that are not live may hold anything, NaN included, and are not read.
        m_box = m_live[:, None] & (o_k < DK)[None, :]
        b_first = tl.load(p_box + o_k[None, :], mask=m_box, other=0.0)  # [BN, BK]
        b_second = tl.load(p_box + bounds.token + o_k[None, :], mask=m_box, other=0.0)  # [BN, BK]
        if REDUCE == "mean":  # linear, so the group collapses to one vector first
            b_both += b_first.to(tl.float32) * (tl.sum(b_one, 0) / COUNT)[None, :]
            b_both += b_second.to(tl.float32) * (tl.sum(b_two, 0) / COUNT)[None, :]
        else:
            if NATIVE:  # both parts of a 16-bit query are exact in its own type
                b_one, b_two = b_one.to(b_first.dtype), b_two.to(b_first.dtype)
            else:
                b_first, b_second = b_first.to(tl.float32), b_second.to(tl.float32)
            b_all = tl.dot(b_one, tl.trans(b_first), b_all, input_precision="ieee")  # [BG, BN]
            b_all = tl.dot(b_two, tl.trans(b_second), b_all, input_precision="ieee")
    p_to = row_ptr(out, i_batch, i_head) + o_n
    if REDUCE == "mean":
        b_s = tl.sum(b_both, 1)  # [BN]
        b_s = tl.where(b_s == b_s, b_s, float("-inf"))  # NaN counts as -inf
    else:
        b_all = tl.where((o_g < GROUP)[:, None] & (b_all == b_all), b_all, float("-inf"))
        b_s = tl.max(b_all, 0)  # [BN]
    tl.store(p_to, tl.where(m_live, b_s, float("-inf")), mask=m_n)


def block_score(
    q,
    bounds,
    rows,
    block_table,
    reduce,
    *,
    tokens,
    sinks,
    out=None,
    fill=True,
    config=None,
):
    """As ``reference.block_score``; ``config`` replaces the default for these shapes."""
    batch, q_heads, dk = q.shape
    heads, n = bounds.shape[1], block_table.shape[1]
    if out is None:
        out = empty_rows((batch, heads, n), torch.float32, q.device)
    if not n:
        return out
    require_rows(rows, batch)
    require_dense_rows(bounds=bounds, block_table=block_table, out=out)
    group = count = q_heads // heads
    config = config or default(q, batch * heads, n, group, dk)
    if group > MANY and reduce == "mean":
        # positive and negative part are heads that are added up
        q, group, count = mean_heads(q, heads, split=True), 2, 1
    launch(
        block_score_kernel,
        (triton.cdiv(n, config.tile), batch * heads),
        q,
        operand(Query, q),
        operand(PagedKV, bounds),
        rows,
        operand(Table, block_table),
        operand(Rows, out),
        n,
        tokens,
        sinks,
        HEADS=heads,
        GROUP=group,
        COUNT=count,
        DK=dk,
        BK=config.channels,
        BN=config.tile,
        REDUCE=reduce,
        FILL=fill,
        NATIVE=q.dtype == bounds.dtype and q.dtype != torch.float32,
        STAGES=config.stages,
    )
    return out
