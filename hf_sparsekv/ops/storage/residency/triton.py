"""Find the device pages of chosen blocks, and assign pages to those without one: the kernels.

Many programs look up the blocks. One then assigns pages: it lists the missing blocks, and finds the oldest pages of a
window with a histogram of their ages. All results are those of the sequential definition: what is atomic commutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._operands import Rows, Table, operand, row_ptr
from ..._overlap import begin, launch
from .reference import EXTRA as _EXTRA
from .reference import OLDEST as _OLDEST
from .reference import SLACK as _SLACK
from .reference import WINDOW
from .state import FREE as _FREE

OLDEST, SLACK, EXTRA, FREE = tl.constexpr(_OLDEST), tl.constexpr(_SLACK), tl.constexpr(_EXTRA), tl.constexpr(_FREE)
AGES = tl.constexpr(256)  # 0: may not be taken, 1 .. OLDEST, OLDEST + 1: free


class State(NamedTuple):
    """The contiguous tensors of ``PageState``."""

    owner: Any
    stamp: Any
    hand: Any
    now: Any
    enabled: Any
    counters: Any
    addresses: Any


@dataclass(frozen=True)
class Config:
    """
    Args:
        look: entries that a program looks up. Not tuned yet.
        tile: entries that the program that hands out pages holds at a time.
        warps: of that program; with 8192 entries or pages a tile they spill registers.
    """

    look: int = 256
    tile: int = 4096
    warps: int = 8


@triton.jit(do_not_specialize=["n", "k"])
def residency_look_kernel(
    ids,
    block_table,
    state,
    p_table,
    p_page_ids,
    n,
    k,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Current page ids (page or host); stamps the pages found. With ``SHARED`` the first of equal blocks claims it.

    A claim is an entry of the page table, ``position - n - 1``, so that the smallest is the first and none is -1.
    """
    begin(PDL)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < n
    enabled, now = tl.load(state.enabled) != 0, tl.load(state.now)
    i_row = o_n // k
    i_batch, i_head = (i_row // HEADS).to(tl.int64), i_row % HEADS
    b_id = tl.load(row_ptr(ids, i_batch, i_head) + o_n % k, mask=m_n, other=-1)  # [BN]
    b_physical_id = tl.load(block_table.ptr + i_batch * block_table.row + b_id, mask=b_id >= 0, other=-1)  # [BN]
    m_there = b_physical_id >= 0
    p_entry = p_table + b_physical_id.to(tl.int64) * HEADS + i_head
    b_page = tl.load(p_entry, mask=m_there, other=-1)  # [BN]
    m_found = b_page >= 0
    # A claim of another program may have been read, or -1: both mean that there is no page.
    b_page_id = tl.where(m_found, b_page, tl.where(m_there, -b_physical_id - 2, -1))
    tl.store(p_page_ids + o_n, b_page_id, mask=m_n)
    tl.store(state.stamp + b_page, now, mask=m_found & enabled)
    if SHARED:
        tl.atomic_min(p_entry, o_n - n - 1, mask=m_there & (b_page < 0) & enabled, sem="relaxed")
    if enabled:
        tl.atomic_add(state.counters, tl.sum(m_there.to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(state.counters + 1, tl.sum(m_found.to(tl.int64), 0), sem="relaxed")


@triton.jit
def _list_missing(
    p_page_ids, p_table, p_copies, n, end, k, HEADS: tl.constexpr, SHARED: tl.constexpr, BN: tl.constexpr
):
    """Write page table entry and position of each missing block, once each, in order; returns their number."""
    missing = end * 0  # a tensor, entries or not
    for i in range(0, end, BN):
        o_n = i + tl.arange(0, BN)
        b_page_id = tl.load(p_page_ids + o_n, mask=o_n < n, other=-1)  # [BN]
        m_missing = b_page_id <= -2
        b_at = (-b_page_id - 2) * HEADS + (o_n // k) % HEADS
        if SHARED:
            m_missing = m_missing & (tl.load(p_table + b_at, mask=m_missing, other=0) == o_n - n - 1)
        b_to = missing + tl.cumsum(m_missing.to(tl.int32), 0) - 1
        tl.store(p_copies + 2 * b_to, b_at, mask=m_missing)
        tl.store(p_copies + 2 * b_to + 1, o_n, mask=m_missing)
        missing += tl.sum(m_missing.to(tl.int32), 0)
    return missing


@triton.jit
def _oldest(b_age, share):
    """Choose the ``share`` oldest entries, the first among equals; age 0 is never taken.

    Returns a mask, and the index of each entry in it, from 0 on.
    """
    o_age = tl.arange(0, AGES)
    b_count = tl.where(o_age == 0, 0, tl.histogram(b_age, AGES))  # [AGES]
    b_from = tl.sum(b_count, 0) - tl.cumsum(b_count, 0) + b_count  # as old, or older: falls with the age
    limit = tl.sum(((b_from >= share) & (o_age > 0)).to(tl.int32), 0)
    ties = share - tl.sum(tl.where(o_age > limit, b_count, 0), 0)
    m_over, m_tie = b_age > limit, (b_age == limit) & (limit > 0)
    # Both are counted in one prefix sum; a tile has less than 2 ** 15 entries.
    b_both = tl.cumsum(m_over.to(tl.int32) + (m_tie.to(tl.int32) << 16), 0)
    b_over, b_tie = b_both & 0xFFFF, b_both >> 16
    m_take = m_over | (m_tie & (b_tie <= ties))
    return m_take, b_over + tl.minimum(b_tie, ties) - 1


@triton.jit(do_not_specialize=["n", "k", "pages", "layer", "keep"])
def residency_page_kernel(
    state,
    p_table,
    p_page_ids,
    p_copies,
    p_n_copies,
    n,
    k,
    pages,
    layer,
    keep,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Assign pages to the missing blocks."""
    begin(PDL)
    now, hand = tl.load(state.now), tl.load(state.hand)
    end = tl.where(tl.load(state.enabled) != 0, n, 0)
    missing = _list_missing(p_page_ids, p_table, p_copies, n, end, k, HEADS, SHARED, BN)
    tl.debug_barrier()  # the list is read by other threads

    there = tl.cdiv(pages, WINDOW)
    planned = tl.minimum(there, tl.cdiv(missing * SLACK, WINDOW))
    most = tl.minimum(there, planned + EXTRA)
    taken, i = end * 0, end * 0
    while (i < most) & (taken < missing):
        o_w = i * WINDOW + tl.arange(0, WINDOW)
        m_w = o_w < pages
        b_page = hand + o_w
        b_page = tl.where(b_page >= pages, b_page - pages, b_page)
        b_stamp = tl.load(state.stamp + b_page, mask=m_w, other=now)  # [WINDOW]
        b_age = tl.where(b_stamp == FREE, OLDEST + 1, tl.minimum(now - b_stamp, OLDEST))
        b_age = tl.where(m_w & (b_stamp < now - keep), b_age, 0)
        left = missing - taken
        share = tl.where(i < planned, tl.cdiv(left, tl.maximum(planned - i, 1)), left)
        m_take, b_nth = _oldest(b_age, share)

        # The evicted blocks lose their entries in their layers' page tables.
        p_own = state.owner + 2 * b_page.to(tl.int64)
        b_layer = tl.load(p_own, mask=m_take, other=-1)  # [WINDOW]
        b_old = tl.load(p_own + 1, mask=m_take, other=0)  # [WINDOW]
        m_old = m_take & (b_layer >= 0)
        b_address = tl.load(state.addresses + b_layer, mask=m_old, other=0)  # [WINDOW]
        tl.store(b_address.to(tl.pointer_type(tl.int32)) + b_old, -1, mask=m_old)

        p_copy = p_copies + 2 * (taken + b_nth)
        b_at = tl.load(p_copy, mask=m_take, other=0)  # [WINDOW]
        b_position = tl.load(p_copy + 1, mask=m_take, other=0)  # [WINDOW]
        tl.store(p_copy + 1, b_page, mask=m_take)
        tl.store(p_page_ids + b_position, b_page, mask=m_take)
        tl.store(p_table + b_at, b_page, mask=m_take)
        tl.store(p_own, layer, mask=m_take)
        tl.store(p_own + 1, b_at, mask=m_take)
        tl.store(state.stamp + b_page, now, mask=m_take)
        taken += tl.sum(m_take.to(tl.int32), 0)
        i += 1

    tl.store(p_n_copies, taken)
    tl.store(state.hand, (hand + tl.minimum(i * WINDOW, pages)) % pages)
    unserved = missing - taken
    if SHARED:
        # Claims that got no page are withdrawn. Later claimants of the same block find the page in the page table.
        for j in range(taken, missing, BN):
            o_n = j + tl.arange(0, BN)
            b_at = tl.load(p_copies + 2 * o_n, mask=o_n < missing, other=0)  # [BN]
            tl.store(p_table + b_at, -1, mask=o_n < missing)
        tl.debug_barrier()
        unserved = end * 0
        for j in range(0, end, BN):
            o_n = j + tl.arange(0, BN)
            b_page_id = tl.load(p_page_ids + o_n, mask=o_n < n, other=-1)  # [BN]
            m_host = b_page_id <= -2
            b_at = (-b_page_id - 2) * HEADS + (o_n // k) % HEADS
            b_page = tl.load(p_table + b_at, mask=m_host, other=-1)  # [BN]
            tl.store(p_page_ids + o_n, b_page, mask=b_page >= 0)
            unserved += tl.sum((m_host & (b_page < 0)).to(tl.int32), 0)
    tl.atomic_add(state.counters + 2, taken.to(tl.int64), sem="relaxed")
    tl.atomic_add(state.counters + 3, unserved.to(tl.int64), sem="relaxed")


def _result(given, shape, like, name):
    if given is None:
        return torch.empty(shape, dtype=torch.int32, device=like.device)
    if given.shape != shape or given.dtype != torch.int32 or not given.is_contiguous():
        raise ValueError(f"{name} must be contiguous int32 {shape}, got {given.dtype} {tuple(given.shape)}")
    return given


def residency(
    block_ids, block_table, state, layer, keep, window=WINDOW, *, page_ids=None, copies=None, n_copies=None, config=None
):
    """As ``reference.residency``; results are contiguous, ``window`` is a power of two, at most 16,384.

    ``config`` replaces the default.
    """
    batch, heads, k = block_ids.shape
    n, pages, config = block_ids.numel(), len(state.stamp), config or Config()
    page_ids = _result(page_ids, (batch, heads, k), block_ids, "page_ids")
    copies = _result(copies, (n, 2), block_ids, "copies")
    n_copies = _result(n_copies, (1,), block_ids, "n_copies")
    if not n:
        n_copies.zero_()
        return page_ids, copies, n_copies
    require_dense_rows(block_ids=block_ids, block_table=block_table)
    look, tile = config.look, min(config.tile, max(32, triton.next_power_of_2(n)))
    window = min(window, max(32, triton.next_power_of_2(pages)))  # a window that holds all is as good as a larger one
    fixed = {"HEADS": heads, "SHARED": batch > 1}
    held, table = State(*(getattr(state, name) for name in State._fields)), state.page_tables[layer]
    args = operand(Rows, block_ids), operand(Table, block_table), held, table, page_ids, n, k
    warps = max(1, min(8, look // 64))
    launch(residency_look_kernel, (triton.cdiv(n, look),), block_ids, *args, BN=look, num_warps=warps, **fixed)
    args = held, table, page_ids, copies, n_copies, n, k, pages, layer, keep
    fixed |= {"BN": tile, "WINDOW": window, "num_warps": config.warps}
    launch(residency_page_kernel, (1,), block_ids, *args, **fixed)
    return page_ids, copies, n_copies
