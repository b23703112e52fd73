"""Putting what a layer holds in order: tokens of the ring after full blocks, tokens at their columns, sinks of blocks.

Apart from the store, because it copies between tensors that it is given, and knows neither streams nor state.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..ops.storage.quantise import dequantise
from .pool import BlockPool
from .ring import Ring
from .rows import Rows


def add_recent(kv: Tensor, recent_kv: Tensor, rows: Rows, ring: Ring) -> None:
    """Copy the tokens that are not in full blocks to where ``kv [batch, H, n, Dk + Dv]`` has them."""
    groups = [slice(None)] if rows.uniform else [slice(row, row + 1) for row in range(rows.batch)]
    for some in groups:
        first = some.start or 0
        ring.read(recent_kv[some], rows.sealed[first] * rows.block_size, rows.lengths[first], kv[some])


def to_columns(kv: Tensor, rows: Rows) -> None:
    """Move the tokens of each row, in place, to their columns of the attention mask. What padding has is finite."""
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
