"""Balance the work of a batch over the programs of one launch, for rows of any lengths.

The number of programs depends on shapes alone, so that a captured step stays valid. Each program finds its part on the
device, from the lengths of all rows. The tiles per part are chosen so that the whole batch has about ``aim`` parts. The
parts of all rows are numbered consecutively, the same for each KV head. A long row among short ones therefore has many
parts, an empty row has one, and no part has more tiles than an equal share. (FlashInfer plans work by the lengths of a
batch, too, arXiv 2501.01005, section 3.3; there the host does it.)

Where each list has a length of its own (``used``), a KV head's list takes the place of a row: heads that need many
tokens get as many more parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..._operands import padded, row_ptr
from ..._paged import load_row


class Share(NamedTuple):
    """Rows of the batch, or lists, parts to aim at, the most parts (one program each), and stored tokens of a list."""

    batch: Any
    aim: Any
    most: Any
    n: Any


class Kinds(NamedTuple):
    """Numbers of tiles, or of parts: of stored tokens, of the recent buffer and of means."""

    stored: Any
    recent: Any
    means: Any


def programs(aim: int, batch: int, tiles: Kinds) -> tuple[int, int]:
    """Parts to aim at, and the most there may be, for ``batch`` rows with at most ``tiles`` each.

    A part has tiles of one kind. Each row may add one part for each further kind to the ``aim``, but no more. With more
    parts than run at once, the last ones would wait for an SM, and the launch would take twice as long.
    """
    aim, kinds = max(1, aim), max(1, sum(map(bool, tiles)))
    return aim, min(max(aim, batch) + batch * (kinds - 1), batch * max(1, sum(tiles)))


@triton.jit
def count_means(means, sealed, BLOCK_SIZE: tl.constexpr):
    """Spans of a row with at least one sealed token."""
    return tl.cdiv(sealed, means.span * BLOCK_SIZE)


@triton.jit
def count_recent(length, sealed, recent):
    """Entries of the recent buffer that a row reads: none if it is empty."""
    n = tl.minimum(recent.sinks + length - sealed, recent.end) - recent.first
    return tl.where(length > 0, tl.maximum(n, 0), 0)


@triton.jit
def count_tiles(length, sealed, n, recent, means, BOUNDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr):
    """Tiles of a row, or of several rows, as :class:`Kinds`.

    ``BOUNDED``: a list has at most as many of its ``n`` tokens (one number, or one for each row) as the row has sealed.
    Otherwise the list is read to its end.
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
def count_parts(tiles, each):
    """:class:`Kinds` of parts with ``each`` tiles at most."""
    return Kinds(tl.cdiv(tiles.stored, each), tl.cdiv(tiles.recent, each), tl.cdiv(tiles.means, each))


@triton.jit
def add_up(parts):
    """Parts of a row: at least one, which may be empty."""
    return tl.maximum(parts.stored + parts.recent + parts.means, 1)


@triton.jit
def find_part(
    i,
    rows,
    share,
    recent,
    means,
    BOUNDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    BATCH: tl.constexpr,
    used=None,
    HEADS: tl.constexpr = 1,
):
    """Find part ``i``: whether it exists, its row, its number in the row, and the row's parts.

    The row's parts are returned as :class:`Kinds` and as their number. ``BATCH`` is a power of two, at least the number
    of rows. With ``used [rows, HEADS]``, the length of each list, "row" means a list: ``row * HEADS + head``.
    """
    o_b = tl.arange(0, BATCH)
    m_b = o_b < share.batch
    b_length = tl.load(rows + 2 * (o_b // HEADS), mask=m_b, other=0)
    b_sealed = tl.load(rows + 2 * (o_b // HEADS) + 1, mask=m_b, other=0)
    n = share.n
    if used is not None:
        p_used = row_ptr(used, (o_b // HEADS).to(tl.int64), o_b % HEADS)
        n = tl.minimum(tl.load(p_used, mask=m_b, other=0), n)
    b_tiles = count_tiles(b_length, b_sealed, n, recent, means, BOUNDED, BLOCK_SIZE, BN)
    total = tl.sum(b_tiles.stored + b_tiles.recent + b_tiles.means, 0)
    each = tl.maximum(tl.cdiv(total, share.aim), 1)
    b_parts = tl.where(m_b, add_up(count_parts(b_tiles, each)), 0)
    parts = tl.sum(b_parts, 0)
    while parts > share.most:  # the last part of a row may be smaller, so there are more of them
        each = tl.maximum(each + 1 + each // 64, each * parts // share.most)
        b_parts = tl.where(m_b, add_up(count_parts(b_tiles, each)), 0)
        parts = tl.sum(b_parts, 0)
    b_end = tl.cumsum(b_parts, 0)
    there = i < parts
    i_batch = tl.where(there, tl.sum((b_end <= i).to(tl.int32), 0), 0)
    i = i - tl.max(tl.where(b_end <= i, b_end, 0), 0)
    length, sealed = load_row(rows, i_batch // HEADS)
    if used is not None:
        n = tl.minimum(tl.load(row_ptr(used, (i_batch // HEADS).to(tl.int64), i_batch % HEADS)), share.n)
    kinds = count_parts(count_tiles(length, sealed, n, recent, means, BOUNDED, BLOCK_SIZE, BN), each)
    return there, i_batch.to(tl.int64), i, kinds, add_up(kinds)


def batch_constant(batch: int) -> int:
    """``BATCH`` of :func:`find_part`: few different values, because each one compiles a separate kernel."""
    return 1 if batch == 1 else padded(batch, 32)
