"""What a policy keeps of each block to score it by, whatever the method that asks for the scores."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kv.store import LayerStore
from ..ops._layout import empty_rows
from ..ops.selection.block_score import block_score
from ..ops.storage.seal import Index
from .memory import Request

SIDES = {"min_max": 2, "cuboid_mean": 2, "mean": 1}  # vectors that each kind keeps


class BlockMetadata:
    """Metadata of blocks, in the pool's field ``bounds``.

    Args:
        kind: ``"min_max"``, ``"cuboid_mean"`` or ``"mean"``.
        parts: of a block, each with metadata of its own.
        reduce: how the query heads of a group share a score.
    """

    def __init__(self, kind: str, parts: int, reduce: str) -> None:
        self.kind, self.parts, self.reduce = kind, parts, reduce

    def start(self, store: LayerStore) -> None:
        """Claim the fields."""
        if "bounds" not in store.pool.fields:
            shape = (self.parts, store.heads, SIDES[self.kind], store.key_dim)
            store.pool.add_field("bounds", shape, store.dtype)

    def sealing(self, store: LayerStore, index: Index) -> Index:
        """``index`` with the place of these fields, for the kernels that seal blocks."""
        fields = store.pool.fields
        return replace(index, bounds=fields["bounds"], metadata=self.kind)

    def scores(self, q: Tensor, store: LayerStore) -> Tensor:
        """Scores of all full blocks for ``q [batch, Hq, Dk]``, reduced over the heads of a group: ``[batch, H, n]``.

        The best part counts for a block of several parts. Contents after a row's sealed blocks may be anything.
        """
        return self._scores(q, store, None, fill=False)

    def head_scores(self, q: Tensor, store: LayerStore) -> tuple[Tensor, Tensor]:
        """The same, and those of each query head, ``[batch, Hq, n]``; ``-inf`` after a row's sealed blocks."""
        each = empty_rows((*q.shape[:2], store.table.shape[1] * self.parts), torch.float32, q.device)
        scores = self._scores(q, store, each, fill=True)
        return scores, self._best(each)

    def _best(self, scores: Tensor) -> Tensor:
        if self.parts == 1:
            return scores
        parts = scores.unflatten(-1, (-1, self.parts))
        best = empty_rows(parts.shape[:-1], scores.dtype, scores.device)
        return torch.amax(parts, -1, out=best)

    def _scores(self, q: Tensor, store: LayerStore, each: Tensor | None, fill: bool) -> Tensor:
        bounds, table = store.pool.fields["bounds"], store.table
        if self.parts > 1:  # the parts of a block are physical blocks of their own to the operator
            part = torch.arange(self.parts, dtype=torch.int32, device=q.device)
            ids = store.block_table[..., None]  # all of it: rows of a width that changes would be of two kinds
            ids = torch.where(ids < 0, -1, ids * self.parts + part).flatten(1)
            table = ids[:, : table.shape[1] * self.parts]
        how = {"tokens": store.block_size // self.parts, "sinks": store.sinks, "each": each, "fill": fill}
        return self._best(block_score(q, bounds.flatten(0, 1), store.rows, table, self.reduce, self.kind, **how))

    def nbytes(self, store: LayerStore, blocks: int) -> int:
        """Bytes that scoring ``blocks`` full blocks, of all rows together, reads."""
        blocks *= store.heads * self.parts
        return blocks * SIDES[self.kind] * store.key_dim * store.dtype.itemsize


def bounds_bytes(request: Request, kind: str, parts: int) -> int:
    """Bytes of the metadata of all physical blocks, all layers."""
    sides = sum(SIDES[kind] * layer.heads * layer.query_dim * request.item for layer in request.layers)
    return request.block_capacity * parts * sides
