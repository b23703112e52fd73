"""Copies of chosen tokens on the device: the kernels.

One program a row and KV head finds the tokens that have slots and assigns slots to the others. Then many programs copy.
With several queries of one row, many programs first remove the tokens that an earlier query has chosen as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..._ascending import find
from ..._codes import load_decoded
from ..._dispatch import require_dense_rows
from ..._layout import empty_parts, empty_rows, whole
from ..._operands import PagedKV, Rows, Scales, Table, batch_and_head, operand, padded, row_ptr
from ..._overlap import begin, launch
from .reference import CLASSES as _CLASSES
from .reference import SLACK as _SLACK
from .reference import WINDOW, require_one_row

CLASSES, SLACK = tl.constexpr(_CLASSES), tl.constexpr(_SLACK)
TILE = 256  # tokens that a program locates. Not tuned yet.
COUNTED = 1024  # stamps that a program of a count reads at once. Not tuned yet.
COPYING = 128  # copying programs to aim for: reads in flight over the link matter, not SMs


@dataclass(frozen=True)
class Config:
    """Launch parameters of the kernels.

    Args:
        listed: ids that a program reads at once.
        tile: tokens that a program copies at once.
        copying: number of copying programs to aim for.
    """

    listed: int = 1024
    tile: int = 16
    copying: int = COPYING


@triton.jit
def _class(b_age):
    """As ``reference.age_class``."""
    b_class = (b_age >= 1).to(tl.int32)
    for i in tl.static_range(1, CLASSES):
        b_class += (b_age >= (1 << i)).to(tl.int32)
    return b_class


@triton.jit
def _lane(p_lanes, i_batch, BLOCK_SIZE: tl.constexpr):
    """First slot of a row, in 64 bits, and its number of slots."""
    first = tl.multiple_of(tl.load(p_lanes + 2 * i_batch), BLOCK_SIZE)
    return first.to(tl.int64), tl.multiple_of(tl.load(p_lanes + 2 * i_batch + 1), BLOCK_SIZE)


@triton.jit(do_not_specialize=["used", "k", "steps"])
def bring_tokens_once_kernel(
    ids,
    used,
    out,
    k,
    steps,
    HEADS: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy ``BN`` ids of one query and KV head; ids that an earlier query has become -1."""
    begin(PDL)
    i_query, i_head = batch_and_head(tl.program_id(0), HEADS)
    n = k
    if used is not None:
        n = tl.minimum(n, tl.load(used + tl.program_id(0)))
    first = tl.program_id(1) * BN
    if first >= n:
        return
    o_n = first + tl.arange(0, BN)
    b_id = tl.load(row_ptr(ids, i_query, i_head) + o_n, mask=o_n < n, other=-1)  # [BN]
    for i in range(0, i_query):
        n_other = k
        if used is not None:
            n_other = tl.minimum(n_other, tl.load(used + i * HEADS + i_head))
        p_other = row_ptr(ids, i, i_head)
        b_length = tl.where(b_id >= 0, n_other, 0)
        b_at = find(p_other, b_id, b_length, steps)
        b_found = tl.load(p_other + b_at, mask=b_at < b_length, other=-1)
        b_id = tl.where(b_found == b_id, -1, b_id)
    tl.store(row_ptr(out, i_query, i_head) + o_n, b_id, mask=o_n < n)


@triton.jit(do_not_specialize=["used", "p_now", "k", "queries"])
def bring_tokens_assign_kernel(
    ids,
    used,
    slots,
    p_columns,
    p_stamps,
    p_now,
    p_lanes,
    p_missing,
    p_to,
    p_count,
    p_enabled,
    p_counters,
    k,
    listed,
    total,
    queries,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the tokens of one row and KV head to copy, at most ``listed``, and their new slots."""
    begin(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    p_slots = row_ptr(slots, i_batch, i_head)
    first_slot, room = _lane(p_lanes, i_batch, BLOCK_SIZE)
    first_slot += i_head * total
    p_columns, p_stamps = p_columns + first_slot, p_stamps + first_slot
    p_missing, p_to = p_missing + i_row * listed, p_to + i_row * listed
    live = i_row >= 0
    if p_enabled is not None:
        live = tl.load(p_enabled) != 0
    now = tl.load(p_now + i_row) + 1

    missing, chosen = now * 0, now * 0
    for i_query in range(queries):  # one query compiles without a loop, all other numbers to one kernel
        i_ids = i_batch + i_query
        p_ids, n = row_ptr(ids, i_ids, i_head), k
        if used is not None:
            n = tl.minimum(n, tl.load(used + i_ids * HEADS + i_head))
        n = tl.where(live, n, 0)
        for i in range(0, n, BK):
            o_n = i + tl.arange(0, BK)
            b_id = tl.load(p_ids + o_n, mask=o_n < n, other=-1)  # [BK]
            m_id = b_id >= 0
            b_slot = tl.load(p_slots + b_id, mask=m_id, other=-1)
            tl.store(p_stamps + b_slot, tl.zeros([BK], tl.int32) + now, mask=b_slot >= 0)
            m_missing = m_id & (b_slot < 0)
            b_at = missing + tl.cumsum(m_missing.to(tl.int32), 0) - 1
            tl.store(p_missing + b_at, b_id, mask=m_missing)
            missing += tl.sum(m_missing.to(tl.int32), 0)
            chosen += tl.sum(m_id.to(tl.int32), 0)
    tl.debug_barrier()  # makes the stamps and the list visible to all threads

    # The slots to examine, and the number in each age class and above. Often no token is missing.
    windows = tl.maximum(1, (room + BR - 1) // BR)
    free = BR * tl.maximum(1, room - (chosen - missing)).to(tl.int64)
    wanted = tl.minimum(windows, ((missing.to(tl.int64) * SLACK * room + free - 1) // free)).to(tl.int32)
    first = tl.minimum(now % windows, windows - wanted)
    looked, end = first * BR, tl.minimum(room, (first + wanted) * BR)
    o_class = tl.arange(0, 2 * CLASSES)
    b_reach = tl.zeros([2 * CLASSES], tl.int32)
    for i in range(looked, end, BR):
        o_r = i + tl.arange(0, BR)
        b_age = _class(now - tl.load(p_stamps + o_r, mask=o_r < room, other=now))  # [BR]
        for c in tl.static_range(1, CLASSES + 1):
            b_reach += tl.where(o_class == c, tl.sum((b_age >= c).to(tl.int32), 0), 0)
    m_class = (o_class > 0) & (o_class <= CLASSES)
    moved = tl.minimum(missing, tl.max(b_reach, 0))
    # The youngest class to evict from, and how many slots of it; all slots of older classes are evicted.
    last = tl.max(tl.where(m_class & (b_reach >= moved), o_class, 0), 0)
    need = moved - tl.sum(tl.where(o_class == last + 1, b_reach, 0), 0)
    above, ties = now * 0, now * 0
    for i in range(looked, tl.where(moved > 0, end, looked), BR):
        o_r = i + tl.arange(0, BR)
        b_age = _class(now - tl.load(p_stamps + o_r, mask=o_r < room, other=now))
        m_above, m_tie = b_age > last, b_age == last
        b_ties = ties + tl.cumsum(m_tie.to(tl.int32), 0)
        m_to = m_above | (m_tie & (b_ties <= need))
        b_at = above + tl.cumsum(m_above.to(tl.int32), 0) + tl.minimum(b_ties, need) - 1
        b_new = tl.load(p_missing + b_at, mask=m_to, other=0)
        b_old = tl.load(p_columns + o_r, mask=m_to, other=-1)
        tl.store(p_slots + b_old, tl.full([BR], -1, tl.int32), mask=b_old >= 0)
        tl.store(p_slots + b_new, o_r, mask=m_to)
        tl.store(p_columns + o_r, b_new, mask=m_to)
        tl.store(p_stamps + o_r, tl.zeros([BR], tl.int32) + now, mask=m_to)
        tl.store(p_to + b_at, o_r, mask=m_to)
        above += tl.sum(m_above.to(tl.int32), 0)
        ties += tl.sum(m_tie.to(tl.int32), 0)
    tl.store(p_count + i_row, moved)
    tl.store(p_now + i_row, now, mask=chosen > 0)
    if p_counters is not None:
        tl.atomic_add(p_counters, chosen.to(tl.int64), sem="relaxed")
        tl.atomic_add(p_counters + 1, moved.to(tl.int64), sem="relaxed")


@triton.jit
def bring_tokens_copy_kernel(
    kv,
    scales,
    block_table,
    p_held,
    p_lanes,
    p_missing,
    p_to,
    p_count,
    listed,
    total,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy a share of the listed tokens of one row and KV head."""
    begin(PDL)
    BW: tl.constexpr = padded(WIDTH)
    i_row = tl.program_id(0).to(tl.int64)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    n = tl.load(p_count + i_row)
    first_slot, _ = _lane(p_lanes, i_batch, BLOCK_SIZE)
    p_held += (i_head * total + first_slot) * WIDTH
    o_w = tl.arange(0, BW)
    for i in range(tl.program_id(1) * BN, n, tl.num_programs(1) * BN):
        o_n = i + tl.arange(0, BN)
        m_n = o_n < n
        b_id = tl.load(p_missing + i_row * listed + o_n, mask=m_n, other=0)  # [BN]
        b_to = tl.load(p_to + i_row * listed + o_n, mask=m_n, other=0)  # [BN]
        p_table = block_table.ptr + i_batch * block_table.row + b_id // BLOCK_SIZE
        b_physical_id = tl.load(p_table, mask=m_n, other=0).to(tl.int64)
        b_in = (b_id % BLOCK_SIZE).to(tl.int64)
        p_from = kv.ptr + b_physical_id * kv.block + i_head * kv.head + b_in * kv.token
        m_w = m_n[:, None] & (o_w < WIDTH)[None, :]
        if scales is None:
            b_kv = tl.load(p_from[:, None] + o_w[None, :], mask=m_w, other=0.0)  # [BN, BW]
        else:
            p_scale = scales.ptr + b_physical_id * scales.block + i_head * scales.head
            b_kv = load_decoded(p_from, p_scale, b_in, m_n, o_w, WIDTH, SPLIT, p_held.dtype.element_ty)
        p_slot = p_held + b_to.to(tl.int64) * WIDTH
        tl.store(p_slot[:, None] + o_w[None, :], b_kv, mask=m_w)


@triton.jit(do_not_specialize=["used", "k"])
def locate_tokens_kernel(
    ids,
    used,
    slots,
    p_lanes,
    block_table,
    out,
    k,
    total,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Addresses of ``BN`` tokens of one row and KV head."""
    begin(PDL)
    i_row = tl.program_id(0)
    i_batch, i_head = batch_and_head(i_row, HEADS)
    n = k
    if used is not None:
        n = tl.minimum(n, tl.load(used + i_row))
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    b_id = tl.load(row_ptr(ids, i_batch, i_head) + o_n, mask=o_n < n, other=-1)  # [BN]
    m_id = b_id >= 0
    b_slot = tl.load(row_ptr(slots, i_batch, i_head) + b_id, mask=m_id, other=-1)
    first_slot = (i_head * total).to(tl.int32) + tl.load(p_lanes + 2 * i_batch)
    p_table = block_table.ptr + i_batch * block_table.row + b_id // BLOCK_SIZE
    b_physical_id = tl.load(p_table, mask=m_id, other=-1)
    b_place = tl.where(b_slot >= 0, first_slot + b_slot, -(b_physical_id + 2) * BLOCK_SIZE + b_id % BLOCK_SIZE)
    b_place = tl.where(m_id & (b_physical_id >= 0), b_place, -1)
    tl.store(row_ptr(out, i_batch, i_head) + o_n, b_place, mask=o_n < n)


@triton.jit(do_not_specialize=["batch", "steps"])
def young_tokens_kernel(
    p_stamps, p_now, p_lanes, p_out, total, batch, steps, HEADS: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr
):
    """Count the young tokens of one layer, row and KV head."""
    begin(PDL)
    i = tl.program_id(0).to(tl.int64)
    i_layer, i_head, i_batch = i // HEADS // batch, i % HEADS, (i // HEADS) % batch
    first, room = tl.load(p_lanes + 2 * i_batch), tl.load(p_lanes + 2 * i_batch + 1)
    p_stamps += (i_layer * HEADS + i_head) * total + first
    old = tl.load(p_now + i) - steps
    b_young = tl.zeros([BR], tl.int32)
    for lo in range(0, room, BR):
        o_r = lo + tl.arange(0, BR)
        b_young += (tl.load(p_stamps + o_r, mask=o_r < room, other=old) > old).to(tl.int32)
    tl.store(p_out + i, tl.sum(b_young, 0))


def bring_tokens(
    ids,
    kv,
    block_table,
    held,
    *,
    used=None,
    enabled=None,
    counters=None,
    window=WINDOW,
    scales=None,
    split=0,
    config=None,
):
    """As ``reference.bring_tokens``; ``window`` is a power of two, ``config`` replaces the default."""
    require_dense_rows(ids=ids, kv=kv, block_table=block_table, slots=held.slots, used=used, scales=scales)
    _require_whole(kv=held.kv, columns=held.columns, stamps=held.stamps, now=held.now, lanes=held.lanes)
    if not ids.numel():
        return
    (queries, heads, k), total, config = ids.shape, held.kv.shape[1], config or Config()
    batch, listed = len(held.now), k
    require_one_row(queries, batch)
    if queries != batch:
        ids, listed = _once(ids, used), min(queries * k, held.slots.shape[-1])
    rows = batch * heads
    listed = whole(listed)  # apart, in the lists of two rows
    missing, to, count = empty_parts((rows * listed, rows * listed, rows), torch.int32, ids.device)
    lists = operand(Rows, held.slots), held.columns, held.stamps, held.now, held.lanes
    shape = {"HEADS": heads, "BLOCK_SIZE": kv.shape[2]}
    wide = {"BK": min(config.listed, max(32, triton.next_power_of_2(k))), "BR": window}
    args = operand(Rows, ids), used, *lists, missing, to, count, enabled, counters
    args = *args, k, listed, total, queries // batch
    launch(bring_tokens_assign_kernel, (rows,), ids, *args, **shape, **wide, num_warps=8)
    stored = operand(PagedKV, kv), operand(Scales, scales), operand(Table, block_table)
    args = *stored, held.kv, held.lanes, missing, to, count, listed, total
    tile = config.tile * (held.kv.itemsize // kv.itemsize)  # more for codes, so that as many bytes are in flight
    each = max(1, min(config.copying // rows, triton.cdiv(listed, tile)))
    shape |= {"WIDTH": kv.shape[3], "SPLIT": split, "BN": tile}
    launch(bring_tokens_copy_kernel, (rows, each), ids, *args, **shape)


def _once(ids, used):
    """``ids [n, H, K]`` of several queries, with -1 for ids that an earlier query has; see ``used``."""
    queries, heads, k = ids.shape
    out = empty_rows(ids.shape, torch.int32, ids.device)
    grid = queries * heads, triton.cdiv(k, TILE)
    args = operand(Rows, ids), used, operand(Rows, out), k, k.bit_length()
    launch(bring_tokens_once_kernel, grid, ids, *args, HEADS=heads, BN=TILE, num_warps=2)
    return out


def locate_tokens(ids, slots, lanes, block_table, total, block_size, *, used=None, out=None):
    """As ``reference.locate_tokens``."""
    _require_whole(lanes=lanes)
    require_dense_rows(ids=ids, slots=slots, block_table=block_table, used=used, out=out)
    batch, heads, k = ids.shape
    if out is None:
        out = empty_rows(ids.shape, torch.int32, ids.device)
    if not slots.shape[-1]:
        return out.fill_(-1)
    grid = batch * heads, triton.cdiv(k, TILE)
    args = operand(Rows, ids), used, operand(Rows, slots), lanes, operand(Table, block_table), operand(Rows, out)
    if ids.numel():
        fixed = {"HEADS": heads, "BLOCK_SIZE": block_size, "BN": TILE, "num_warps": 2}
        launch(locate_tokens_kernel, grid, ids, *args, k, total, **fixed)
    return out


def young_tokens(stamps, now, lanes, steps, *, out=None):
    """As ``reference.young_tokens``."""
    _require_whole(stamps=stamps, now=now, lanes=lanes)
    batch, heads = now.shape[1:]
    if out is None:
        out = torch.empty_like(now)
    args = stamps, now, lanes, out, stamps.shape[2], batch, steps
    if now.numel():
        launch(young_tokens_kernel, (now.numel(),), stamps, *args, HEADS=heads, BR=COUNTED)
    return out


def _require_whole(**tensors) -> None:
    for name, t in tensors.items():
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {t.stride()}")
