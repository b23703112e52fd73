"""Move full blocks into the block pool, from the ring of recent tokens or from a prompt: the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..._codes import encode_tokens, most, store_norms
from ..._dispatch import require_dense_rows, require_rows
from ..._operands import (
    PagedKV,
    Scales,
    Table,
    Tokens,
    batch_and_head,
    label_rows,
    load_norms,
    operand,
    padded,
    row_ptr,
)
from ..._overlap import begin, launch
from ..._paged import load_row
from .labels import codes_4, largest, least, standardised
from .reference import check, check_range

TILE = 16  # tokens at once
STEP_TILE = 64  # in a step, with few blocks due: 10.07 ms, not 10.30 (32 rows of 4k, an H100, benchmarks/NOTES.md)
WIDE = 256  # channels of a key above which a program takes half as many tokens, with twice the warps


class Bounds(NamedTuple):
    """``[num_blocks, H, 2, Dk]``."""

    ptr: Any
    block: Any
    head: Any
    side: Any


class Means(NamedTuple):
    """``[num_blocks, H, D]``, and the blocks of a span."""

    ptr: Any
    block: Any
    head: Any
    span: Any


class New(NamedTuple):
    """New tokens: keys and values, ``[rows, H, n, D']`` each."""

    k: Any
    k_batch: Any
    k_head: Any
    k_token: Any
    v: Any
    v_batch: Any
    v_head: Any
    v_token: Any


@triton.jit
def _read(p_old, new, p_k, p_v, b_new, b_from, o_c, m_c, SPLIT: tl.constexpr, PART: tl.constexpr):
    """Columns ``o_c`` of some tokens: of the ring, or, where ``b_new``, new ones, number ``b_from`` of these.

    ``PART``: ``"k"`` or ``"v"`` if all these columns are of the one or the other.
    """
    m_c = m_c[None, :]
    if new is None:
        b_kv = tl.load(p_old + o_c[None, :], mask=m_c, other=0.0)
    else:
        m_new = b_new[:, None]
        b_kv = tl.load(p_old + o_c[None, :], mask=m_c & ~m_new, other=0.0)
        p_k = p_k + b_from[:, None] * new.k_token + o_c[None, :]
        p_v = p_v + b_from[:, None] * new.v_token + (o_c - SPLIT)[None, :]
        m_key = (o_c < SPLIT)[None, :]
        if PART == "k":
            b_one = tl.load(p_k, mask=m_c & m_new, other=0.0)
        elif PART == "v":
            b_one = tl.load(p_v, mask=m_c & m_new, other=0.0)
        else:
            b_one = tl.load(p_k, mask=m_c & m_new & m_key, other=0.0)
            b_one = tl.where(m_key, b_one, tl.load(p_v, mask=m_c & m_new & ~m_key, other=0.0))
        b_kv = tl.where(m_new, b_one, b_kv)
    return b_kv


@triton.jit
def _seal_block(
    recent,
    p_row,
    new,
    p_k,
    p_v,
    past,
    sealed,
    kv,
    to,
    physical_id,
    i_batch,
    i_head,
    bounds,
    channels,
    codes,
    qparams,
    means,
    scales,
    ring,
    sinks,
    BLOCK_SIZE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SPLIT: tl.constexpr,
    R: tl.constexpr,
    BT: tl.constexpr,
):
    """The block that begins at token ``sealed``: keys and values to block ``to``, the fields but means to their block.

    Returns the sums of the keys and of the values that means count.
    """
    BK: tl.constexpr = padded(DK, 1)
    BV: tl.constexpr = padded(DV, 1)
    BR: tl.constexpr = padded(R, 1)
    KEYS: tl.constexpr = "k" if SPLIT >= DK else "both"
    at = sinks + sealed % ring  # the ring holds whole blocks: none wraps
    o_k, o_v, o_r = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BR)
    m_k, m_v, m_r = o_k < DK, o_v < DV, o_r < R
    if codes is not None:
        p_channel = row_ptr(channels, i_batch, i_head)
        b_channel = tl.load(p_channel + o_r, mask=m_r, other=0)  # [BR]
        b_channel_2 = tl.load(p_channel + R + o_r, mask=m_r, other=0)  # [BR]
        b_centre, b_spread = load_norms(channels, i_batch, i_head, o_r, m_r, 2 * R)  # [BR]
        b_centre_2, b_spread_2 = load_norms(channels, i_batch, i_head, R + o_r, m_r, 2 * R)
    if scales is not None:
        p_scale = scales.ptr + physical_id * scales.block + i_head * scales.head
        norms = store_norms(p_row + at.to(tl.int64) * recent.token, recent.token, p_scale, o_k, m_k, DK, BLOCK_SIZE, BT)
    b_all_k, b_all_v = tl.zeros([BK], tl.float32), tl.zeros([BV], tl.float32)
    limit: tl.constexpr = largest(recent.ptr.dtype.element_ty)
    b_max = tl.full([BK], -1.0, tl.float32) * limit
    b_min = tl.full([BK], 1.0, tl.float32) * limit
    for i in range(BLOCK_SIZE // BT):
        o_t = i * BT + tl.arange(0, BT)
        b_token = sealed + o_t
        b_usable = b_token >= sinks
        p_from = p_row + (at + o_t)[:, None].to(tl.int64) * recent.token
        b_new, b_from = b_token >= past, (b_token - past).to(tl.int64)
        b_k = _read(p_from, new, p_k, p_v, b_new, b_from, o_k, m_k, SPLIT, KEYS)  # [BT, BK]
        b_v = _read(p_from, new, p_k, p_v, b_new, b_from, DK + o_v, m_v, SPLIT, "v")  # [BT, BV]
        if kv is not None:
            p_to = kv.ptr + to * kv.block + i_head * kv.head + o_t[:, None] * kv.token
            b_kept_k, b_kept_v = b_k, b_v
            if scales is not None:
                b_kept_k, b_kept_v = encode_tokens(b_k, b_v, m_k, m_v, norms, p_scale + 2 * DK + o_t)
            tl.store(p_to + o_k[None, :], b_kept_k, mask=m_k[None, :])
            tl.store(p_to + DK + o_v[None, :], b_kept_v, mask=m_v[None, :])
        m_sink = (b_token < sinks)[:, None]
        p_sink = p_row + b_token[:, None].to(tl.int64) * recent.token
        tl.store(p_sink + o_k[None, :], b_k, mask=m_sink & m_k[None, :])
        tl.store(p_sink + DK + o_v[None, :], b_v, mask=m_sink & m_v[None, :])
        if means is not None:
            b_all_k += tl.sum(tl.where(b_usable[:, None], b_k.to(tl.float32), 0.0), 0)
            b_all_v += tl.sum(tl.where(b_usable[:, None], b_v.to(tl.float32), 0.0), 0)
        if bounds is not None:
            b_k = b_k.to(tl.float32)
            b_max = most(b_max, tl.reduce(tl.where(b_usable[:, None], b_k, -limit), 0, most))
            b_min = least(b_min, tl.reduce(tl.where(b_usable[:, None], b_k, limit), 0, least))
        if codes is not None:
            b_x = _read(p_from, new, p_k, p_v, b_new, b_from, b_channel, m_r, SPLIT, KEYS)  # [BT, BR]
            b_y = _read(p_from, new, p_k, p_v, b_new, b_from, b_channel_2, m_r, SPLIT, KEYS)
            b_x, b_y = standardised(b_x, b_centre, b_spread), standardised(b_y, b_centre_2, b_spread_2)
            b_code, b_scale, b_zero = codes_4(b_x, b_y, m_r)
            p_code = codes.ptr + physical_id * codes.block + i_head * codes.head + o_t[:, None] * codes.token
            tl.store(p_code + o_r[None, :], b_code, mask=m_r[None, :])
            p_param = qparams.ptr + physical_id * qparams.block + i_head * qparams.head + o_t * qparams.token
            tl.store(p_param, b_scale)
            tl.store(p_param + 1, b_zero)
    if bounds is not None:
        p_bound = bounds.ptr + physical_id * bounds.block + i_head * bounds.head + o_k
        tl.store(p_bound, b_max.to(bounds.ptr.dtype.element_ty), mask=m_k)
        tl.store(p_bound + bounds.side, b_min.to(bounds.ptr.dtype.element_ty), mask=m_k)
    return b_all_k, b_all_v


@triton.jit
def _sums_before(means, p_table, i_head, before, DK: tl.constexpr, DV: tl.constexpr):
    """Sums of the ``before`` tokens that are in the mean of the block before the one that ``p_table`` names."""
    BK: tl.constexpr = padded(DK, 1)
    BV: tl.constexpr = padded(DV, 1)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    last = tl.load(p_table - 1, mask=before > 0, other=0)
    p_last = means.ptr + i_head * means.head + last.to(tl.int64) * means.block
    b_k = tl.load(p_last + o_k, mask=(o_k < DK) & (before > 0), other=0.0).to(tl.float32)
    b_v = tl.load(p_last + DK + o_v, mask=(o_v < DV) & (before > 0), other=0.0).to(tl.float32)
    return b_k * before, b_v * before


@triton.jit
def _store_mean(means, physical_id, i_head, b_k, b_v, count, DK: tl.constexpr, DV: tl.constexpr):
    """The mean of ``count`` tokens, of their sums."""
    BK: tl.constexpr = padded(DK, 1)
    BV: tl.constexpr = padded(DV, 1)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    p_mean = means.ptr + i_head * means.head + physical_id * means.block
    tl.store(p_mean + o_k, (b_k / count).to(means.ptr.dtype.element_ty), mask=o_k < DK)
    tl.store(p_mean + DK + o_v, (b_v / count).to(means.ptr.dtype.element_ty), mask=o_v < DV)


@triton.jit(do_not_specialize=["rows", "after"])
def seal_kernel(
    recent,
    rows,
    after,
    table,
    kv,
    bounds,
    channels,
    codes,
    qparams,
    means,
    scales,
    ring,
    sinks,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and KV head; most steps seal nothing in most rows."""
    begin(PDL)
    i_row = tl.program_id(0)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    length, sealed = load_row(rows, i_batch)
    if (load_row(after, i_batch)[1] <= sealed) | (length == 0):
        return
    nth = sealed // BLOCK_SIZE
    p_table = table.ptr + i_batch * table.row + nth
    physical_id = tl.load(p_table).to(tl.int64)
    if physical_id < 0:
        return
    p_row = row_ptr(recent, i_batch, i_head)
    b_k, b_v = _seal_block(
        recent, p_row, None, None, None, 0, sealed, kv, physical_id, physical_id, i_batch, i_head,
        bounds, channels, codes, qparams, means, scales, ring, sinks,
        BLOCK_SIZE, DK, DV, DK, R, BT,
    )  # fmt: skip
    if means is not None:
        start = tl.maximum((nth - nth % means.span) * BLOCK_SIZE, sinks)
        before = tl.maximum(sealed - start, 0)  # tokens in the preceding mean
        b_before_k, b_before_v = _sums_before(means, p_table, i_head, before, DK, DV)
        count = tl.maximum(sealed + BLOCK_SIZE - start, 1).to(tl.float32)
        _store_mean(means, physical_id, i_head, b_before_k + b_k, b_before_v + b_v, count, DK, DV)


@triton.jit(do_not_specialize=["past", "first", "end"])
def seal_range_kernel(
    recent,
    new,
    table,
    kv,
    bounds,
    channels,
    codes,
    qparams,
    means,
    past,
    first,
    end,
    ring,
    sinks,
    BLOCK_SIZE: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    SPLIT: tl.constexpr,
    R: tl.constexpr,
    STAGED: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The blocks of one span of one row and KV head, in order: each one's mean is also of those before it."""
    begin(PDL)
    span = 1 if means is None else means.span
    i_span = first // span + tl.program_id(0)
    i_batch, i_head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    p_row = row_ptr(recent, i_batch, i_head)
    p_k = new.k + i_batch * new.k_batch + i_head * new.k_head
    p_v = new.v + i_batch * new.v_batch + i_head * new.v_head
    begun, ended = tl.maximum(i_span * span, first), tl.minimum((i_span + 1) * span, end)
    p_table = table.ptr + i_batch * table.row
    if means is not None:
        start = tl.maximum(i_span * span * BLOCK_SIZE, sinks)
        before = tl.maximum(begun * BLOCK_SIZE - start, 0)
        b_all_k, b_all_v = _sums_before(means, p_table + begun, i_head, before, DK, DV)
    for nth in range(begun, ended):
        physical_id = tl.load(p_table + nth).to(tl.int64)
        to = (nth - first).to(tl.int64) * tl.num_programs(1) + i_batch if STAGED else physical_id
        b_k, b_v = _seal_block(
            recent, p_row, new, p_k, p_v, past, nth * BLOCK_SIZE, kv, to, physical_id, i_batch, i_head,
            bounds, channels, codes, qparams, means, None, ring, sinks,
            BLOCK_SIZE, DK, DV, SPLIT, R, BT,
        )  # fmt: skip
        if means is not None:
            b_all_k += b_k
            b_all_v += b_v
            count = tl.maximum((nth + 1) * BLOCK_SIZE - start, 1).to(tl.float32)
            _store_mean(means, physical_id, i_head, b_all_k, b_all_v, count, DK, DV)


def seal(recent_kv, rows, after, sinks, block_table, kv, index):
    """As ``reference.seal``."""
    check(recent_kv, rows, after, sinks, kv, index)
    batch, heads = recent_kv.shape[:2]
    size, dk = kv.shape[2], index.key_dim
    require_rows(rows, batch)
    require_rows(after, batch)
    require_dense_rows(recent_kv=recent_kv, block_table=block_table, kv=kv)
    require_dense_rows(bounds=index.bounds, channels=index.channels, codes=index.codes, qparams=index.qparams)
    require_dense_rows(means=index.means, scales=index.scales)
    tile = min(STEP_TILE if dk <= 128 else TILE // 2 if dk > WIDE else TILE, size)
    launch(
        seal_kernel,
        (batch * heads,),
        recent_kv,
        operand(Tokens, recent_kv),
        rows,
        after,
        operand(Table, block_table),
        operand(PagedKV, kv) if kv.shape[3] else None,
        operand(Bounds, index.bounds),
        label_rows(index.channels, index.norms),
        operand(PagedKV, index.codes),
        operand(PagedKV, index.qparams),
        None if index.means is None else Means(index.means, *index.means.stride()[:2], index.span),
        operand(Scales, index.scales),
        recent_kv.shape[2] - sinks,
        sinks,
        HEADS=heads,
        BLOCK_SIZE=size,
        DK=dk,
        DV=recent_kv.shape[3] - dk,
        R=0 if index.codes is None else index.codes.shape[-1],
        BT=tile,
        num_warps=8 if dk > WIDE or tile > TILE else 4,
    )


def seal_range(recent_kv, k, v, past, first, end, sinks, block_table, kv, index):
    """As ``reference.seal_range``."""
    check_range(recent_kv, k, v, past, first, end, kv, index)
    batch, heads, _, width = recent_kv.shape
    size, dk, staged = kv.shape[-2], index.key_dim, kv.dim() == 5
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))  # as a model hands them over
    require_dense_rows(recent_kv=recent_kv, block_table=block_table, kv=kv)
    require_dense_rows(bounds=index.bounds, channels=index.channels, codes=index.codes, qparams=index.qparams)
    require_dense_rows(means=index.means)
    span = 1 if index.means is None else index.span
    launch(
        seal_range_kernel,
        ((end - 1) // span - first // span + 1, batch, heads),
        recent_kv,
        operand(Tokens, recent_kv),
        New(k, *k.stride()[:3], v, *v.stride()[:3]),
        operand(Table, block_table),
        operand(PagedKV, kv.flatten(0, 1) if staged else kv) if kv.shape[-1] else None,
        operand(Bounds, index.bounds),
        label_rows(index.channels, index.norms),
        operand(PagedKV, index.codes),
        operand(PagedKV, index.qparams),
        None if index.means is None else Means(index.means, *index.means.stride()[:2], index.span),
        past,
        first,
        end,
        recent_kv.shape[2] - sinks,
        sinks,
        BLOCK_SIZE=size,
        DK=dk,
        DV=width - dk,
        SPLIT=k.shape[3],
        R=0 if index.codes is None else index.codes.shape[-1],
        STAGED=staged,
        BT=min(TILE // 2 if dk > WIDE else TILE, size),
        num_warps=8 if dk > WIDE else 4,
    )
