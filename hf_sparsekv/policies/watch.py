"""Optional per-step record of attended blocks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kv.state import Held, State
from ..kv.store import LayerStore
from ..tensors import no_inference_mode


class BlockWatch(State):
    """Marks at a fixed address, which a captured step writes, too.

    Attributes:
        marks: bool ``[batch, H, blocks + 1]``, the last one for ids that name no block.
        told: the policy marks blocks at all.
        adds: marks of earlier queries of the same pass stay.
    """

    TENSORS: ClassVar = {"marks": Held(rows=None)}

    marks: Any  # Tensor | None: never None where a step marks

    def __init__(self) -> None:
        super().__init__()
        self.told = self.adds = False

    @no_inference_mode
    def fit(self, store: LayerStore) -> None:
        """Make room for the blocks of ``store``; before a step is captured."""
        shape = (store.batch, store.heads, store.block_table.shape[1] + 1)
        if self.marks is None or self.marks.shape != shape or self.marks.device != store.device:
            self.marks = torch.zeros(shape, dtype=torch.bool, device=store.device)

    def mark(self, ids: Tensor) -> None:
        """The step attends to these blocks, ``ids [batch, H, n]``, -1 for none.

        Several queries of the only row may come in place of a batch: marked is what any of them attends to.
        """
        self.told = True
        spare = self.marks.shape[-1] - 1
        if not self.adds:
            self.marks.zero_()
        ids = torch.where(ids >= 0, ids, spare).long()
        if len(ids) != len(self.marks):
            ids = ids.transpose(0, 1).flatten(1)[None]
        self.marks.scatter_(2, ids, True)

    def mark_tokens(self, ids: Tensor, block_size: int, used: Tensor | None = None) -> None:
        """The same for the blocks of tokens ``ids [batch, H, n]``, where ``used [batch, H]`` count (None: all)."""
        there = ids >= 0
        if used is not None:
            there &= torch.arange(ids.shape[-1], device=ids.device) < used[..., None]
        self.mark(torch.where(there, ids // block_size, -1))

    def reset(self) -> None:
        """No step has attended to anything."""
        if self.marks is not None:
            self.marks.zero_()  # in place, and `told` stays: a captured step marks without being asked again

    def first_rows(self, n: int) -> BlockWatch:
        return self  # a step of some rows marks nothing of the others

    def share(self, store: LayerStore) -> Tensor:
        """The share of rows and KV heads that attended to tokens of each block, float32 ``[full_blocks]`` on the CPU.

        1 where attention was dense; NaN where it is unknown.
        """
        if store.counters.last_dense:
            return torch.ones(store.full_blocks)
        if not self.told or self.marks is None or self.marks.shape[0] != store.batch:
            return torch.full((store.full_blocks,), float("nan"))
        seen = self.marks[..., : min(store.full_blocks, self.marks.shape[-1] - 1)].float().mean((0, 1)).cpu()
        # The step that fills a block attends before the block is one: when that makes the table grow, no mark is there.
        return torch.nn.functional.pad(seen, (0, store.full_blocks - len(seen)))

    def copy(self) -> BlockWatch:
        """The copy of a cache has attended to nothing."""
        return BlockWatch()
