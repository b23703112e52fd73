"""Sealing: full blocks move from the ring, or from a prompt, to the block pool, with their index and running means.

Its arguments are all that it reads: tokens, block table, rows and blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..ops.storage.seal import Index, seal, seal_range
from .block_writer import BlockWriter
from .pool import BlockPool
from .rows import Rows, Taken

_ALL = slice(None)  # rows
_SEAL_BYTES = 1 << 26  # blocks are sealed in pieces of about this size, which bounds the temporaries of a long prompt

IndexBlocks = Callable[[Tensor, int, slice], dict[str, Tensor]]  # as Indexer.index()


class Indexer(Protocol):
    """Computes what a selection policy stores per block (bounds, labels)."""

    def index(self, kv: Tensor, start: int, rows: slice) -> dict[str, Tensor]:
        """Fields of blocks ``kv [n, rows, H, block_size, Dk + Dv]``, the first begins at token ``start``.

        Asked where :meth:`sealing` is None. ``rows``: which ones of the batch. Tokens before ``config.sinks`` are not
        selected.
        """
        ...

    def sealing(self, store: Any) -> Index | None:
        """Where these fields of a ``LayerStore`` are kept, for the kernels that seal blocks; None: these make none."""
        ...


def indexing(indexer: Indexer, store: Any) -> tuple[Index, IndexBlocks | None]:
    """The index that the sealing kernels write, and the function that indexes afterwards, if the kernels cannot."""
    index = indexer.sealing(store)
    return (Index(store.key_dim), indexer.index) if index is None else (index, None)


class Span(NamedTuple):
    """Blocks of some rows that hold as much as each other.

    Args:
        rows: of the batch.
        start, end: the blocks are ``start .. end - 1`` of each.
        past: tokens that the rows hold in ``recent_kv`` and before, without those that come with the call.
    """

    rows: slice
    start: int
    end: int
    past: int


def index_of_rows(index: Index, rows: slice) -> Index:
    """``index`` for some rows of the batch."""
    if index.channels is None or index.norms is None or rows == _ALL:
        return index
    return replace(index, channels=index.channels[rows], norms=index.norms[rows])


def with_means(index: Index, pool: BlockPool, tokens: int) -> Index:
    """``index`` with the place of the means of ``tokens`` tokens, if any are kept."""
    if not tokens:
        return index
    return replace(index, means=pool.fields["means"], span=tokens // pool.kv.shape[2])


def steps_due(taken: Taken, device: torch.device) -> list[Tensor]:
    """The rows, int32 ``[batch, 2]``, before each of the blocks that are due is sealed, and after the last one."""
    first, last = taken.before.sealed, taken.after.sealed
    more = range(max(then - block for block, then in zip(first, last)))
    between = [tuple(min(block + i, then) for block, then in zip(first, last)) for i in more]
    held = [taken.now if taken.now.sealed == one else replace(taken.now, sealed=one) for one in between]
    return [rows.on[device] for rows in (*held, taken.after)]


def seal_steps(
    recent_kv: Tensor, due: Sequence[Tensor], sinks: int, block_table: Tensor, pool: BlockPool, index: Index
) -> None:
    """Seal what decode steps have made old, by kernels. ``due``: tells the device which rows (:func:`steps_due`)."""
    index = replace(index, scales=pool.fields.get("scales"))
    for now, after in pairwise(due):
        seal(recent_kv, now, after, sinks, block_table, pool.kv, index)


def seal_span(
    span: Span,
    recent_kv: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: int,
    block_table: Tensor,
    writer: BlockWriter,
    index: Index,
    by_host: IndexBlocks | None,
    aside: bool = True,
) -> None:
    """Seal blocks of the ring's tokens and of new ones.

    Args:
        recent_kv, block_table: of all rows of the batch.
        k, v: new tokens ``[rows, H, n, D]`` of the span's rows.
        index: what the kernel computes, for all rows of the batch.
        by_host: computes what the kernel does not; None: nothing.
        aside: a copy stream may copy the blocks to the host, if there is one. Their next reader has to wait for it.
    """
    pool, (rows, start, end, past) = writer.pool, span
    index, every_row = index_of_rows(index, rows), block_table
    if rows != _ALL:
        recent_kv, block_table = recent_kv[rows], block_table[rows]
    device, dtype = recent_kv.device, recent_kv.dtype
    shape = (*recent_kv.shape[:2], pool.kv.shape[2], recent_kv.shape[3])
    piece = end - start
    staged = by_host is not None or writer.copy_stream is not None or pool.kv.device != device
    staged = staged or "scales" in pool.fields
    if staged:
        piece = max(1, _SEAL_BYTES // (math.prod(shape) * k.itemsize))
    for lo in range(start, end, piece):
        hi, kv = min(lo + piece, end), pool.kv
        copy_stream = writer.copy_stream if aside else None  # a piece may have found that memory cannot be pinned
        if copy_stream is not None:
            kv = copy_stream.take((hi - lo, *shape), dtype=dtype)
        elif staged:
            kv = torch.empty(hi - lo, *shape, dtype=dtype, device=device)
        seal_range(recent_kv, k, v, past, lo, hi, sinks, block_table, kv, index)
        if by_host is not None:
            found = by_host(kv, lo * shape[2], rows)
            pool.note(block_table[:, lo:hi].T.flatten(), **{name: held.flatten(0, 1) for name, held in found.items()})
        if staged:
            writer.write(kv, rows, lo, every_row, copy_stream)


def index_again(
    kv: Tensor,
    held: Rows,
    front: Tensor,
    split: int,
    sinks: int,
    block_table: Tensor,
    pool: BlockPool,
    index: Index,
    by_host: IndexBlocks | None,
) -> None:
    """Index full blocks ``kv [batch, H, n, block_size, Dk + Dv]`` again; what rows ``held`` do not have is skipped.

    Args:
        front: like ``recent_kv``, for the kernel to write sinks to: not those that are kept, which codes would round.
        split: entries of a key.
        index: what the kernel computes, unless ``by_host`` computes it.
    """
    nowhere = kv.new_empty(0, kv.shape[1], kv.shape[3], 0)
    groups = [_ALL] if held.uniform else [slice(row, row + 1) for row in range(held.batch)]
    for rows in groups:
        n, table = held.sealed[rows.start or 0], block_table[rows]
        if not n:
            continue
        if by_host is not None:
            found = by_host(kv[rows, :, :n].permute(2, 0, 1, 3, 4), 0, rows)
            at = table[:, :n].T.flatten()
            pool.note(at, **{name: value.flatten(0, 1) for name, value in found.items()})
        else:
            tokens = kv[rows].flatten(2, 3).split((split, kv.shape[4] - split), -1)
            seal_range(front[rows], *tokens, 0, 0, n, sinks, table, nowhere, index_of_rows(index, rows))
