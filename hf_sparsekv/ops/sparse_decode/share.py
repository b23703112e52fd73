"""How the work of a batch is shared out over the programs of one launch, whatever the lengths of its rows are.

How many programs a launch has depends on shapes alone: a captured step stays as it is. What each of them does it finds
out itself, from the lengths of all rows. A part has as many tiles as leave about ``aim`` parts of the whole batch, and
the parts of all rows and KV heads stand one after the other. So a long row among short ones has many parts, an empty
row has one, and no part has more tiles than an equal share. (FlashInfer plans work by the lengths of a batch, too,
arXiv 2501.01005, section 3.3; there the host does it.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .._operands import padded
from .._paged import load_row


class Share(NamedTuple):
    """Rows of the batch, parts to aim at, most parts that there are programs for, and stored tokens of a list."""

    batch: Any
    aim: Any
    most: Any
    n: Any


class Kinds(NamedTuple):
    """Tiles of stored tokens, of the recent buffer and of means; or parts."""

    stored: Any
    recent: Any
    means: Any


def programs(aim: int, lists: int, tiles: Kinds, joined: bool) -> tuple[int, int]:
    """Parts to aim at, and how many there may be: of ``lists`` rows and KV heads with at most ``tiles`` each.

    A part is of one kind. Where each kind of a list may end with a smaller part, these come on top of the ``aim``;
    ``joined``, stored and recent tokens are one kind, and there are no more programs than the ``aim``, if that gives
    each list one of each kind: one that fills a processor should not wait for another.
    """
    kinds = bool(tiles.stored + tiles.recent) + bool(tiles.means) if joined else sum(map(bool, tiles))
    every = lists * max(1, sum(tiles))
    aim = max(1, aim)
    if joined:
        aim = max(aim, lists * max(1, kinds))
        return aim, min(aim, every)
    return aim, min(aim + lists * kinds, every)


@triton.jit
def count_means(means, sealed, BLOCK_SIZE: tl.constexpr):
    """Spans of a row of which something is sealed."""
    return tl.cdiv(tl.minimum(sealed, means.cap * BLOCK_SIZE), means.span * BLOCK_SIZE)


@triton.jit
def count_recent(length, sealed, recent):
    """Entries of the recent buffer that a row walks over: none if it is empty."""
    n = tl.minimum(recent.sinks + length - sealed, recent.end) - recent.first
    return tl.where(length > 0, tl.maximum(n, 0), 0)


@triton.jit
def count_tiles(length, sealed, n, recent, means, BOUNDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr):
    """:class:`Kinds` of a row, or of several.

    ``BOUNDED``: of the ``n`` stored tokens of a list no more are there than the row has; otherwise the list is walked
    over to its end.
    """
    if BOUNDED:
        stored = tl.minimum(n, sealed)
    else:
        stored = tl.where(sealed > 0, n, 0)
    spans = tl.zeros_like(sealed)
    if means is not None:
        spans = count_means(means, sealed, BLOCK_SIZE)
    return Kinds(tl.cdiv(stored, BN), tl.cdiv(count_recent(length, sealed, recent), BN), tl.cdiv(spans, BN))


@triton.jit
def count_parts(tiles, each, JOINED: tl.constexpr):
    """:class:`Kinds` of parts with ``each`` tiles at most."""
    stored, recent = tiles.stored, tiles.recent
    if JOINED:
        stored, recent = stored + recent, tl.zeros_like(recent)
    return Kinds(tl.cdiv(stored, each), tl.cdiv(recent, each), tl.cdiv(tiles.means, each))


@triton.jit
def add_up(parts):
    """Parts of a row and KV head: at least one, which may be empty."""
    return tl.maximum(parts.stored + parts.recent + parts.means, 1)


@triton.jit
def find_part(
    i,
    rows,
    share,
    recent,
    means,
    BOUNDED: tl.constexpr,
    JOINED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Whether there is a part ``i``; its row, KV head and number among their parts; :class:`Kinds` of these, and how
    many they are.

    ``BATCH``: a power of two, at least the number of rows.
    """
    o_b = tl.arange(0, BATCH)
    m_b = o_b < share.batch
    b_length = tl.load(rows + 2 * o_b, mask=m_b, other=0)
    b_sealed = tl.load(rows + 2 * o_b + 1, mask=m_b, other=0)
    b_tiles = count_tiles(b_length, b_sealed, share.n, recent, means, BOUNDED, BLOCK_SIZE, BN)
    total = tl.sum(b_tiles.stored + b_tiles.recent + b_tiles.means, 0) * HEADS
    each = tl.maximum(tl.cdiv(total, share.aim), 1)
    b_parts = tl.where(m_b, add_up(count_parts(b_tiles, each, JOINED)), 0)
    parts = tl.sum(b_parts, 0) * HEADS
    while parts > share.most:  # the last part of a row may be smaller, so there are more of them
        each = tl.maximum(each + 1 + each // 64, each * parts // share.most)
        b_parts = tl.where(m_b, add_up(count_parts(b_tiles, each, JOINED)), 0)
        parts = tl.sum(b_parts, 0) * HEADS
    b_end = tl.cumsum(b_parts, 0) * HEADS
    there = i < parts
    i_batch = tl.where(there, tl.sum((b_end <= i).to(tl.int32), 0), 0)
    i -= tl.max(tl.where(b_end <= i, b_end, 0), 0)
    length, sealed = load_row(rows, i_batch)
    kinds = count_parts(count_tiles(length, sealed, share.n, recent, means, BOUNDED, BLOCK_SIZE, BN), each, JOINED)
    n_parts = add_up(kinds)
    return there, i_batch.to(tl.int64), (i // n_parts).to(tl.int64), i % n_parts, kinds, n_parts


def batch_constant(batch: int) -> int:
    """``BATCH`` of :func:`find_part`: few different ones, as each is a kernel of its own."""
    return 1 if batch == 1 else padded(batch, 32)
