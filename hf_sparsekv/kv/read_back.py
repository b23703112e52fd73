"""Reading back what a layer holds: full blocks from the pool, with the tokens of the ring, by columns if asked.

Decode steps need none of it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..ops.storage.quantise import dequantise
from .pool import BlockPool
from .ring import Ring
from .rows import Rows
from .sealing import Indexer, index_again, indexing
from .store import LayerStore


def read_ahead(store: LayerStore, columns: int) -> None:
    """Begin to read the full blocks back on a copy stream, for :func:`materialise` of so many columns."""
    streams, shape = store.writer.copy_streams, store.shape(columns)
    assert streams is not None
    read = partial(_read_blocks, store)
    streams.read_ahead(store, shape, store.dtype, store.device, read, store.writer.in_use_until)


def _read_blocks(store: LayerStore, out: Tensor) -> None:
    """Copy the full blocks to the device, into the front of ``out`` (see :meth:`.store.LayerStore.shape`)."""
    store.read(0, store.full_blocks, out)
    if store.pool.host is not None:
        blocks = store.batch * store.heads * store.full_blocks
        store.counters.to_device_bytes += blocks * store.block_size * store.stored_bytes


def materialise(store: LayerStore, k: Tensor | None = None, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """All cached keys and values on the device, followed by ``k, v [batch, H, q, D]``, which are not cached yet.

    Returns:
        ``[batch, H, length + q, Dk]`` and ``[..., Dv]`` by columns of the attention mask: views of one tensor, which
        the next but one call of a later chunk may overwrite. Padding is finite.
    """
    rows, new = store.held, 0 if k is None else k.shape[2]
    streams = store.writer.copy_streams
    out = None if k is None or streams is None else streams.arrived(store, store.device)
    kv = tokens(store, out, rows.columns + new)
    to_columns(kv, rows)
    kv = kv[:, :, : rows.columns + new]
    key, value = kv.split((store.split, store.width - store.split), -1)
    if k is not None:
        key[:, :, rows.columns :], value[:, :, rows.columns :] = k, v
    return key, value


def tokens(store: LayerStore, out: Tensor | None = None, room: int = 0) -> Tensor:
    """All cached tokens on the device, ``[batch, H, n, Dk + Dv]``, n no less than ``room``.

    Contents after a row's last token mean nothing. ``out``: of :meth:`.store.LayerStore.shape`, with the full blocks in
    it.
    """
    rows = store.held
    if out is None:
        out = torch.empty(store.shape(max(room, *rows.lengths, 1)), dtype=store.dtype, device=store.device)
        _read_blocks(store, out)
    kv = out.flatten(2, 3)
    add_recent(kv, store.recent_kv, rows, store.ring)
    return kv


def reindex(store: LayerStore, indexer: Indexer, own: bool = True) -> None:
    """Index the full blocks again. Rows that share blocks get blocks of their own: each row has its own index.

    ``own``: False for rows that stand for those of another store, whose blocks theirs are.
    """
    if own:
        store.table_of_rows.blocks.unshare()
    kv, front = store.read(0, store.full_blocks), torch.empty_like(store.recent_kv)
    index, by_host = indexing(indexer, store)
    index_again(kv, store.held, front, store.split, store.sinks, store.block_table, store.pool, index, by_host)


def add_recent(kv: Tensor, recent_kv: Tensor, rows: Rows, ring: Ring) -> None:
    """Copy the tokens that are not in full blocks to where ``kv [batch, H, n, Dk + Dv]`` has them."""
    groups = [slice(None)] if rows.uniform else [slice(row, row + 1) for row in range(rows.batch)]
    for some in groups:
        first = some.start or 0
        ring.read(recent_kv[some], rows.sealed[first] * rows.block_size, rows.lengths[first], kv[some])


def to_columns(kv: Tensor, rows: Rows) -> None:
    """Move the tokens of each row, in place, to their columns of the attention mask. Padding is finite."""
    if rows.valid is None and rows.uniform:
        return
    token = (rows.valid_columns(kv.device).cumsum(1) - 1).clamp_min(0)  # of each column
    for row, length in enumerate(rows.lengths):  # one by one: twice a row is less than twice all
        kv[row, :, : rows.columns] = kv[row][:, token[row]] if length else 0


def add_sinks(recent_kv: Tensor, ring: Ring, pool: BlockPool, ids: np.ndarray) -> None:
    """Copy the sinks among full blocks ``ids``, the first ones of a row, to its ``recent_kv [H, n, Dk + Dv]``."""
    size = pool.kv.shape[2]
    for block, one in enumerate(ids[: -(-ring.sinks // size)].tolist()):
        # All of it: what is whole is copied from pinned memory in the order of the stream.
        kv = pool.kv[one].to(recent_kv.device, non_blocking=True)  # [H, block_size, Dk + Dv]
        if (scales := pool.fields.get("scales")) is not None:
            kv = dequantise(kv, scales[one], pool.split, pool.dtype)
        ring.put_sinks(recent_kv, block * size, kv)
