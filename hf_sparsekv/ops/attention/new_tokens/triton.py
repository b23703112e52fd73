"""Attention of some new tokens to each other, beside attention to what was there before them: the kernel.

One launch for some sixteen of torch's, which took 1.8 ms of a captured pass of 36 layers (H200, ``1c4ab03``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..._operands import AnyTokens, Tokens, operand, padded
from ..._overlap import begin, launch, release
from . import reference

WIDEST = 256  # channels of a key or value that a program holds
QUERIES, KEYS = 16, 32  # of a tile


@triton.jit(do_not_specialize=["n"])
def new_tokens_kernel(
    q,
    k,
    v,
    past,
    lse,
    out,
    n,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """``BM`` queries of a KV head: all tokens of its first query head, then those of the next."""
    begin(PDL)
    BK: tl.constexpr = padded(DK)
    BV: tl.constexpr = padded(DV)
    i_batch, i_kv = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    m_m = o_m < GROUP * n
    o_token, o_head = o_m % n, i_kv * GROUP + o_m // n
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_v = m_m[:, None] & (o_v < DV)[None, :]
    p_q = q.ptr + i_batch * q.batch + o_head * q.head + o_token.to(tl.int64) * q.token  # [BM]
    b_q = tl.load(p_q[:, None] + o_k[None, :] * q.dim, mask=m_m[:, None] & (o_k < DK)[None, :], other=0.0)
    o_row = (i_batch * HEADS * GROUP + o_head) * n + o_token
    b_max = tl.load(lse + o_row, mask=m_m, other=0.0) * 1.4426950408889634  # [BM], to base 2
    b_acc = tl.load(past + o_row[:, None] * DV + o_v[None, :], mask=m_v, other=0.0)  # [BM, BV]
    there = b_max > float("-inf")
    b_sum = tl.where(there, 1.0, 0.0)
    b_acc = tl.where(there[:, None], b_acc, 0.0)
    for i in range(0, n, BN):
        o_n = i + tl.arange(0, BN)
        m_n = o_n < n
        p_k = k.ptr + i_batch * k.batch + i_kv * k.head + o_n.to(tl.int64) * k.token
        b_k = tl.load(p_k[:, None] + o_k[None, :] * k.dim, mask=m_n[:, None] & (o_k < DK)[None, :], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # [BM, BN]
        if softcap is not None:
            b_s = softcap * (2.0 * tl.sigmoid(2.0 * b_s / softcap) - 1.0)
        b_s = tl.where((o_n[None, :] <= o_token[:, None]) & m_n[None, :], b_s * 1.4426950408889634, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))  # a token sees itself, so with the first keys it is finite
        b_less = tl.exp2(b_max - b_new)
        b_p = tl.exp2(b_s - b_new[:, None])
        b_max, b_sum = b_new, b_sum * b_less + tl.sum(b_p, 1)
        p_v = v.ptr + i_batch * v.batch + i_kv * v.head + o_n.to(tl.int64) * v.token
        b_v = tl.load(p_v[:, None] + o_v[None, :] * v.dim, mask=m_n[:, None] & (o_v < DV)[None, :], other=0.0)
        b_acc = tl.dot(b_p, b_v.to(tl.float32), b_acc * b_less[:, None], input_precision="ieee")
    release(PDL)
    p_out = out.ptr + i_batch * out.batch + o_head * out.head + o_token.to(tl.int64) * out.token  # [BM]
    tl.store(p_out[:, None] + o_v[None, :], (b_acc / b_sum[:, None]).to(out.ptr.dtype.element_ty), mask=m_v)


def new_tokens(query, key, value, past, lse, scale, softcap=None, *, config=None):
    """As ``reference.new_tokens``; ``config`` replaces the queries and keys of a tile."""
    (batch, q_heads, n, dk), (heads, dv) = query.shape, (key.shape[1], value.shape[3])
    if max(dk, dv) > WIDEST:  # latents: they take few steps of this kind
        return reference.new_tokens(query, key, value, past, lse, scale, softcap)
    past, lse = past.contiguous(), lse.contiguous()
    out = query.new_empty(batch, n, q_heads, dv).transpose(1, 2)  # as projections read it
    rows, keys = config or (QUERIES, KEYS)
    group = q_heads // heads
    launch(
        new_tokens_kernel,
        (triton.cdiv(group * n, rows), batch * heads),
        query,
        *(operand(AnyTokens, t) for t in (query, key, value)),
        past,
        lse,
        operand(Tokens, out),
        n,
        scale,
        softcap,
        HEADS=heads,
        GROUP=group,
        DK=dk,
        DV=dv,
        BM=rows,
        BN=keys,
        num_warps=4,
        num_stages=1,
    )
    return out
