"""Estimates of the attention mass that tiles of a prompt's queries give to blocks of keys: the kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._operands import Tokens, operand, padded
from ..._overlap import begin, launch
from ..._prompts import BLOCK, EVERY, POOL, STEP, TILE, blocks_of, tiles_of
from ..._tiles import capped, factors
from .config import config as default


@triton.jit
def _load(p_rows, o_d, m_rows, D: tl.constexpr):
    return tl.load(p_rows[:, None] + o_d[None, :], mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _pooled_logits(
    b_q, p_k, stride, j, hi, o_at, first, n, slope, top, DK: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    POOL: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Logits of a tile against the means ``j`` and after, ``[BM, BN]``; a mean of fewer keys counts as these."""
    o_n = j + tl.arange(0, BN)
    b_k = _load(p_k + o_n.to(tl.int64) * stride, tl.arange(0, BK), o_n < hi, DK)  # [BN, BK]
    b_s = capped(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), slope, CAPPED) * top
    if MASKED:
        count = tl.minimum(n, o_n * POOL + POOL) - tl.maximum(first, o_n * POOL)
        b_s += tl.log2(tl.maximum(count, 1).to(tl.float32) / POOL)[None, :]
        m_s = (o_n * POOL)[None, :] <= o_at[:, None]
        b_s = tl.where(m_s & ((o_n < hi) & (count > 0))[None, :], b_s, float("-inf"))
    return b_s


@triton.jit
def _sum_exp(b_s, b_max, b_sum):
    """A running maximum and sum of exponentials, with more logits."""
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    return b_new, b_sum * tl.exp2(b_max - b_safe) + tl.sum(tl.exp2(b_s - b_safe[:, None]), 1)


@triton.jit
def _store_shares(
    p_out, b_share, j, i_tile, tiles, nb, b_scale, EACH: tl.constexpr, BN: tl.constexpr, PER: tl.constexpr
):
    """Add up the shares ``[BM, BN]`` of the ``EACH`` queries of each tile, and of the means of each block."""
    MANY: tl.constexpr = b_share.shape[0] // EACH
    b_tiles = tl.sum(tl.reshape(b_share, [MANY, EACH, BN]), 1)  # [MANY, BN]
    b_tiles = tl.sum(tl.reshape(b_tiles, [MANY, BN // PER, PER]), 2) * b_scale[:, None]
    o_t, o_b = i_tile + tl.arange(0, MANY), j // PER + tl.arange(0, BN // PER)
    m_out = (o_t < tiles)[:, None] & (o_b < nb)[None, :]
    tl.store(p_out + o_t.to(tl.int64)[:, None] * nb + o_b[None, :], b_tiles, mask=m_out)


@triton.jit(do_not_specialize=["past", "rows", "n", "nb", "tiles"])
def pooled_mass_kernel(
    q,
    k,
    start,
    out,
    past,
    rows,
    n,
    nb,
    tiles,
    slope,
    top,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    CAPPED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EACH: tl.constexpr,
    EVERY: tl.constexpr,
    PER: tl.constexpr,
    POOL: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Shares of all blocks, by the means of keys, for some tiles of one query head: the sums first, then the shares.

    ``EACH``: of ``BM`` queries, so many are a tile's. ``PER``: means of a block.
    """
    begin(PDL)
    BK: tl.constexpr = padded(DK)
    begin_m = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # those with most to do first
    i_batch, i_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    first = 0
    if start is not None:
        first = tl.load(start + i_batch)
    o_m = (begin_m + tl.arange(0, BM)) * EVERY + EVERY - 1
    o_at = past + o_m
    m_m = o_m < rows
    p_q = q.ptr + i_batch * q.batch + i_head * q.head + o_m.to(tl.int64) * q.token
    b_q = _load(p_q, tl.arange(0, BK), m_m, DK)  # [BM, BK]
    p_k = k.ptr + i_batch * k.batch + i_head // GROUP * k.head
    lo = first // (PER * POOL) * PER
    last = past + tl.minimum((begin_m + BM) * EVERY, rows) - 1
    hi = last // POOL + 1
    whole = (past + begin_m * EVERY) // POOL  # means of `POOL` keys that all queries see
    middle = lo
    if start is None:
        middle = whole // BN * BN

    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    for j in tl.range(lo, middle, BN, num_stages=STAGES):
        b_s = _pooled_logits(b_q, p_k, k.token, j, hi, o_at, first, n, slope, top, DK, BK, BN, POOL, CAPPED,
                             False)  # fmt: skip
        b_max, b_sum = _sum_exp(b_s, b_max, b_sum)
    for j in tl.range(middle, hi, BN, num_stages=1):
        b_s = _pooled_logits(b_q, p_k, k.token, j, hi, o_at, first, n, slope, top, DK, BK, BN, POOL, CAPPED,
                             True)  # fmt: skip
        b_max, b_sum = _sum_exp(b_s, b_max, b_sum)
    m_live = m_m & (o_at >= first)
    b_lse = tl.where(m_live & (b_sum > 0), b_max + tl.log2(tl.where(b_sum > 0, b_sum, 1.0)), float("inf"))
    b_scale = 1.0 / tl.maximum(tl.sum(tl.reshape(m_live.to(tl.float32), [BM // EACH, EACH]), 1), 1.0)

    p_out = out + (i_batch * tl.num_programs(1) + i_head) * tiles * nb
    i_tile = begin_m // EACH
    for j in tl.range(lo, middle, BN, num_stages=STAGES):
        b_s = _pooled_logits(b_q, p_k, k.token, j, hi, o_at, first, n, slope, top, DK, BK, BN, POOL, CAPPED,
                             False)  # fmt: skip
        _store_shares(p_out, tl.exp2(b_s - b_lse[:, None]), j, i_tile, tiles, nb, b_scale, EACH, BN, PER)
    for j in tl.range(middle, hi, BN, num_stages=1):
        b_s = _pooled_logits(b_q, p_k, k.token, j, hi, o_at, first, n, slope, top, DK, BK, BN, POOL, CAPPED,
                             True)  # fmt: skip
        _store_shares(p_out, tl.exp2(b_s - b_lse[:, None]), j, i_tile, tiles, nb, b_scale, EACH, BN, PER)


@triton.jit(do_not_specialize=["past", "rows", "nb", "exact_rows", "q_heads"])
def exact_rows_kernel(
    q,
    k,
    start,
    out,
    past,
    rows,
    nb,
    exact_rows,
    q_heads,
    slope,
    top,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    CAPPED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MANY: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Log-sum-exps of ``MANY`` blocks of ``BN`` keys for ``BM`` exact rows of one query head."""
    begin(PDL)
    BK: tl.constexpr = padded(DK)
    lo = tl.program_id(0) * MANY
    i_batch, i_head = (tl.program_id(2) // q_heads).to(tl.int64), (tl.program_id(2) % q_heads).to(tl.int64)
    first = 0
    if start is not None:
        first = tl.load(start + i_batch)
    o_e = tl.program_id(1) * BM + tl.arange(0, BM)
    o_m = o_e * STEP + STEP - 1
    o_at = past + o_m
    m_m = o_m < rows
    last = past + tl.minimum((tl.program_id(1) * BM + BM) * STEP, rows) - 1
    if (lo * BN > last) | ((lo + MANY) * BN <= first):
        return
    p_q = q.ptr + i_batch * q.batch + i_head * q.head + o_m.to(tl.int64) * q.token
    b_q = _load(p_q, tl.arange(0, BK), m_m, DK)  # [BM, BK]
    p_k = k.ptr + i_batch * k.batch + i_head // GROUP * k.head
    o_b = tl.arange(0, MANY)
    b_out = tl.full([BM, MANY], float("-inf"), tl.float32)
    for i in tl.range(0, MANY, num_stages=STAGES):
        o_n = (lo + i) * BN + tl.arange(0, BN)
        b_k = _load(p_k + o_n.to(tl.int64) * k.token, tl.arange(0, BK), o_n <= last, DK)  # [BN, BK]
        b_s = capped(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), slope, CAPPED) * top
        m_s = (o_n[None, :] <= o_at[:, None]) & m_m[:, None]
        if start is not None:
            m_s = m_s & (o_n >= first)[None, :]
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_max = tl.max(b_s, 1)
        b_safe = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_lse = b_safe + tl.log2(tl.sum(tl.exp2(b_s - b_safe[:, None]), 1))
        b_out = tl.where((o_b == i)[None, :], b_lse[:, None], b_out)
    p_out = out + (tl.program_id(2).to(tl.int64) * exact_rows + o_e)[:, None] * nb + (lo + o_b)[None, :]
    tl.store(p_out, b_out, mask=(o_e < exact_rows)[:, None] & (lo + o_b < nb)[None, :])


def prompt_mass(query, key, means, scale, past, start=None, step=STEP, softcap=None, *, config=None):
    """As ``reference.prompt_mass``; ``config`` replaces the default for these shapes."""
    batch, q_heads, r, dk = query.shape
    require_dense_rows(query=query, key=key, means=means)
    config = config or default(query, dk)
    tiles, nb = tiles_of(r), blocks_of(past + r)
    pooled = torch.empty(batch, q_heads, tiles, nb, dtype=torch.float32, device=query.device)
    exact = torch.empty(batch, q_heads, tiles * (TILE // step), nb, dtype=torch.float32, device=query.device)
    sizes = {"GROUP": q_heads // key.shape[1], "DK": dk, "BM": TILE, "CAPPED": softcap is not None}
    of_logits, queries = factors(scale, softcap), operand(Tokens, query)
    launch(
        pooled_mass_kernel,
        (triton.cdiv(tiles * TILE, TILE * EVERY), q_heads, batch),
        query,
        queries,
        operand(Tokens, means),
        start,
        pooled,
        past,
        r,
        key.shape[2],
        nb,
        tiles,
        *of_logits,
        **sizes,
        BN=config.means,
        EACH=TILE // EVERY,
        EVERY=EVERY,
        PER=BLOCK // POOL,
        POOL=POOL,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    launch(
        exact_rows_kernel,
        (triton.cdiv(nb, config.blocks), triton.cdiv(tiles * (TILE // step), TILE), batch * q_heads),
        query,
        queries,
        operand(Tokens, key),
        start,
        exact,
        past,
        r,
        nb,
        tiles * (TILE // step),
        q_heads,
        *of_logits,
        **sizes,
        BN=BLOCK,
        MANY=config.blocks,
        STEP=step,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return pooled, exact
