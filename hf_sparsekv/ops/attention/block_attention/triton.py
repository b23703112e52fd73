"""Attention of a prompt's queries to chosen blocks of keys: the kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..._dispatch import require_dense_rows
from ..._operands import Tokens, describable, operand, padded
from ..._overlap import begin, launch
from ..._prompts import BLOCK, TILE
from ..._tiles import beginning, capped, factors, rescale, rows_of
from .config import config as default


@triton.jit(do_not_specialize=["sinks", "past", "rows", "nb"])
def block_attention_kernel(
    q,
    k,
    v,
    ids,
    counts,
    start,
    sinks,
    out,
    past,
    rows,
    nb,
    slope,
    top,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MANY: tl.constexpr,
    CAPPED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BM`` queries of a tile and query head: whole blocks first, then those that only some of the queries see."""
    begin(PDL)
    BK: tl.constexpr = padded(DK)
    BV: tl.constexpr = padded(DV)
    if HEADS_FIRST:
        o_m = (tl.num_programs(0) - 1 - tl.program_id(0)) // GROUP * BM
        i_head = tl.program_id(1) * GROUP + tl.program_id(0) % GROUP
        q_heads = tl.num_programs(1) * GROUP
    else:
        o_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # later ones have more to do
        i_head = tl.program_id(1)
        q_heads = tl.num_programs(1)
    i_tile = o_m // TILE
    i_batch, i_head = tl.program_id(2).to(tl.int64), i_head.to(tl.int64)
    i_row, i_kv = i_batch * q_heads + i_head, i_head // GROUP
    first = 0
    if start is not None:
        first = tl.load(start + i_batch)
    own = (past + o_m + 1) // BN  # whole blocks that the first query sees
    o_m += tl.arange(0, BM)
    o_at = past + o_m
    m_m = o_m < rows
    o_k = tl.arange(0, BK)
    p_q = q.ptr + i_batch * q.batch + i_head * q.head + o_m.to(tl.int64)[:, None] * q.token + o_k[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & (o_k < DK)[None, :], other=0.0)  # [BM, BK]

    i_list = i_row * tl.cdiv(rows, TILE) + i_tile
    count = tl.load(counts + i_list)
    p_ids = ids + i_list * nb
    last = past + tl.minimum(i_tile * TILE + TILE, rows) - 1
    whole = tl.maximum(count - (last // BN - own + 1), 0)
    whole = whole // MANY * MANY

    b_max, b_sum = beginning(sinks, i_head, BM)
    b_acc = tl.zeros([BM, BV], tl.float32)
    for i in tl.range(0, whole, MANY, num_stages=STAGES):
        row = tl.load(p_ids + i) * BN
        b_k = rows_of(k, i_batch, i_kv, row, last + 1, DK, BN, DESCRIPTORS, False)
        b_s = capped(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), slope, CAPPED)  # [BM, BN]
        if start is not None:
            b_s = tl.where((row + tl.arange(0, BN) >= first)[None, :], b_s, float("-inf"))
        if MANY == 2:
            row_2 = tl.load(p_ids + i + 1) * BN
            b_k2 = rows_of(k, i_batch, i_kv, row_2, last + 1, DK, BN, DESCRIPTORS, False)
            b_s2 = capped(tl.dot(b_q, tl.trans(b_k2), input_precision="ieee"), slope, CAPPED)
            if start is not None:
                b_s2 = tl.where((row_2 + tl.arange(0, BN) >= first)[None, :], b_s2, float("-inf"))
            b_top = tl.max(tl.maximum(b_s, b_s2), 1)
        else:
            b_top = tl.max(b_s, 1)
        b_max, b_safe, b_sum, b_acc = rescale(b_top * top, b_max, b_sum, b_acc)
        b_p = tl.exp2(b_s * top - b_safe[:, None])
        b_v = rows_of(v, i_batch, i_kv, row, last + 1, DV, BN, DESCRIPTORS, False)
        if MANY == 2:
            b_p2 = tl.exp2(b_s2 * top - b_safe[:, None])
            b_sum += tl.sum(b_p + b_p2, 1)
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
            b_v2 = rows_of(v, i_batch, i_kv, row_2, last + 1, DV, BN, DESCRIPTORS, False)
            b_acc = tl.dot(b_p2.to(b_v2.dtype), b_v2, b_acc, input_precision="ieee")
        else:
            b_sum += tl.sum(b_p, 1)
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")
    for i in tl.range(whole, count, num_stages=1):
        row = tl.load(p_ids + i) * BN
        o_n = row + tl.arange(0, BN)
        b_k = rows_of(k, i_batch, i_kv, row, last + 1, DK, BN, DESCRIPTORS, True)
        b_s = capped(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), slope, CAPPED)
        b_s = tl.where((o_n[None, :] <= o_at[:, None]) & (o_n >= first)[None, :], b_s, float("-inf"))
        b_max, b_safe, b_sum, b_acc = rescale(tl.max(b_s, 1) * top, b_max, b_sum, b_acc)
        b_p = tl.exp2(b_s * top - b_safe[:, None])
        b_sum += tl.sum(b_p, 1)
        b_v = rows_of(v, i_batch, i_kv, row, last + 1, DV, BN, DESCRIPTORS, True)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision="ieee")

    b_acc = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    o_v = tl.arange(0, BV)
    p_out = out.ptr + i_batch * out.batch + i_head * out.head + o_m.to(tl.int64)[:, None] * out.token + o_v[None, :]
    tl.store(p_out, b_acc.to(out.ptr.dtype.element_ty), mask=m_m[:, None] & (o_v < DV)[None, :])


def block_attention(
    query, key, value, ids, counts, scale, past, start=None, out=None, softcap=None, sinks=None, *, config=None
):
    """As ``reference.block_attention``; ``config`` replaces the default for these shapes."""
    batch, q_heads, r, dk = query.shape
    dv, nb = value.shape[3], ids.shape[3]
    require_dense_rows(query=query, key=key, value=value, ids=ids, out=out)
    if out is None:
        out = query.new_empty(batch, r, q_heads, dv).transpose(1, 2)
    config = config or default(query, dk, dv)
    descriptors = config.descriptors and describable(key, value)
    kv = [
        TensorDescriptor.from_tensor(t, [1, 1, BLOCK, padded(t.shape[3])]) if descriptors else operand(Tokens, t)
        for t in (key, value)
    ]
    group, grid = q_heads // key.shape[1], (triton.cdiv(r, config.rows), q_heads, batch)
    if config.heads_first:
        grid = grid[0] * group, q_heads // group, batch
    launch(
        block_attention_kernel,
        grid,
        query,
        operand(Tokens, query),
        *kv,
        ids.contiguous(),
        counts.contiguous(),
        start,
        sinks,
        operand(Tokens, out),
        past,
        r,
        nb,
        *factors(scale, softcap),
        GROUP=group,
        DK=dk,
        DV=dv,
        TILE=TILE,
        BM=config.rows,
        BN=BLOCK,
        MANY=config.many,
        CAPPED=softcap is not None,
        DESCRIPTORS=descriptors,
        HEADS_FIRST=config.heads_first,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return out
