"""Bounds on the keys of each block, by which blocks are scored (Quest; AsyncTLS, section 4.1)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..kv.store import LayerStore
from ..ops.selection.block_score import block_score
from ..ops.storage.seal import Index
from .memory import Request

SIDES = 2  # the largest and the smallest key, by channel


class BlockBounds:
    """Bounds of blocks, in the pool's field ``bounds``.

    Args:
        reduce: how the query heads of a group share a score.
    """

    def __init__(self, reduce: str) -> None:
        self.reduce = reduce

    def start(self, store: LayerStore) -> None:
        """Claim the field."""
        if "bounds" not in store.pool.fields:
            store.pool.add_field("bounds", (store.heads, SIDES, store.key_dim), store.dtype)

    def sealing(self, store: LayerStore, index: Index) -> Index:
        """``index`` with the place of the field, for the kernels that seal blocks."""
        return replace(index, bounds=store.pool.fields["bounds"])

    def scores(self, q: Tensor, store: LayerStore) -> Tensor:
        """Scores of all full blocks for ``q [batch, Hq, Dk]``, reduced over the heads of a group: ``[batch, H, n]``.

        Contents after a row's sealed blocks may be anything.
        """
        sizes = {"tokens": store.block_size, "sinks": store.sinks}
        return block_score(q, store.pool.fields["bounds"], store.rows, store.table, self.reduce, **sizes, fill=False)

    def nbytes(self, store: LayerStore, blocks: int) -> int:
        """Bytes that scoring ``blocks`` full blocks, of all rows together, reads."""
        return blocks * store.heads * SIDES * store.key_dim * store.dtype.itemsize


def bounds_bytes(request: Request) -> int:
    """Bytes of the bounds of all physical blocks, all layers."""
    return request.block_capacity * sum(
        SIDES * layer.heads * layer.query_dim * request.item for layer in request.layers
    )
