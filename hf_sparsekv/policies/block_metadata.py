"""What a policy keeps of each block to score it by, whatever the method that asks for the scores."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..config import ProgressiveConfig, TwoLevelConfig
from ..kv.store import VALID, LayerStore
from ..ops.block_score import block_score
from ..ops.seal import Index, key_metadata
from .memory import Request

SIDES = {"min_max": 2, "cuboid_mean": 2, "mean": 1}  # vectors that each kind keeps


class BlockMetadata:
    """Metadata of blocks, in the pool's fields ``bounds`` and, for several parts a block, ``part_fill``."""

    def __init__(self, config: TwoLevelConfig | ProgressiveConfig) -> None:
        self.kind, self.parts, self.reduce = kind_of(config), config.bounds_per_block, config.block_reduce

    def start(self, store: LayerStore) -> None:
        """Claim the fields."""
        if "bounds" not in store.pool.fields:
            shape = (self.parts, store.heads, SIDES[self.kind], store.key_dim)
            store.pool.add_field("bounds", shape, store.dtype)
            if self.parts > 1:
                store.pool.add_field("part_fill", (self.parts,), torch.int32)

    def index(self, keys: Tensor, flags: Tensor) -> dict[str, Tensor]:
        """The fields of blocks ``keys [n, batch, H, block_size, Dk]``, ``flags [n, batch, block_size]``."""
        usable = flags == VALID
        fields = {"bounds": key_metadata(keys, usable, self.parts, self.kind)}
        if self.parts > 1:
            fields["part_fill"] = usable.unflatten(2, (self.parts, -1)).sum(-1)
        return fields

    def sealing(self, store: LayerStore, index: Index) -> Index:
        """``index`` with the place of these fields, for the kernel that seals one block."""
        fields = store.pool.fields
        return replace(index, bounds=fields["bounds"], part_fill=fields.get("part_fill"), metadata=self.kind)

    def scores(self, q: Tensor, store: LayerStore) -> Tensor:
        """Scores of all full blocks for ``q [batch, Hq, Dk]``, reduced over the heads of a group: ``[batch, H, n]``.

        The best part counts for a block of several parts.
        """
        return self._scores(q, store, None)

    def head_scores(self, q: Tensor, store: LayerStore) -> tuple[Tensor, Tensor]:
        """The same, and those of each query head, ``[batch, Hq, n]``."""
        each = torch.empty(*q.shape[:2], store.table.shape[1] * self.parts, dtype=torch.float32, device=q.device)
        scores = self._scores(q, store, each)
        return scores, self._best(each)

    def _best(self, scores: Tensor) -> Tensor:
        return scores.unflatten(-1, (-1, self.parts)).amax(-1) if self.parts > 1 else scores

    def _scores(self, q: Tensor, store: LayerStore, each: Tensor | None) -> Tensor:
        fields, table = store.pool.fields, store.table
        fill = fields["fill"]
        if self.parts > 1:  # the parts of a block are physical blocks of their own to the operator
            part = torch.arange(self.parts, dtype=torch.int32, device=q.device)
            table = torch.where(table[..., None] < 0, -1, table[..., None] * self.parts + part).flatten(1)
            fill = fields["part_fill"].flatten()
        return self._best(
            block_score(q, fields["bounds"].flatten(0, 1), fill, table, self.reduce, self.kind, each=each)
        )

    def nbytes(self, store: LayerStore) -> int:
        """Bytes that scoring all full blocks reads."""
        blocks = store.batch * store.heads * store.full_blocks * self.parts
        return blocks * SIDES[self.kind] * store.key_dim * store.dtype.itemsize


def kind_of(config: TwoLevelConfig | ProgressiveConfig) -> str:
    """Which summary of a block's keys is kept, where one is: two-level selection may leave it open."""
    return config.metadata or "min_max"


def bounds_bytes(request: Request) -> int:
    """Bytes of the metadata of all physical blocks, all layers."""
    config, parts = request.config, request.config.bounds_per_block
    sides = sum(SIDES[kind_of(config)] * layer.heads * layer.query_dim * request.item for layer in request.layers)
    return request.block_capacity * parts * (sides + (4 * len(request.layers) if parts > 1 else 0))
