"""Which blocks decode steps attend to: kept for who asks, and not even looked at otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..kv.lasting import lasting
from ..kv.state import Held, State

if TYPE_CHECKING:
    from ..kv.store import LayerStore
    from ..layers.sparse_layer import SparseLayer


@dataclass(frozen=True)
class BlockMap:
    """What the last decode step attended to among the full blocks, layer by layer.

    Args:
        layers: index of each layer in the model; those of transformers' own are missing.
        share: float32 ``[layers, blocks]`` on the CPU: the share of rows and KV heads that attended to tokens of the
            block, 1 where attention was dense; NaN where nobody says (a selection made on a second device).
        block_size: tokens of a block; block ``b`` is columns ``b * block_size ..``.
        length: columns cached; those behind the last full block are always attended.
    """

    layers: tuple[int, ...]
    share: Tensor
    block_size: int
    length: int


class BlockWatch(State):
    """Marks at a fixed address, which a captured step writes, too.

    Attributes:
        marks: bool ``[batch, H, blocks + 1]``, the last one for ids that name no block.
        told: the policy marks blocks at all.
    """

    TENSORS: ClassVar = {"marks": Held(rows=None)}

    def __init__(self) -> None:
        super().__init__()
        self.told = False

    @lasting
    def fit(self, store: LayerStore) -> None:
        """Make room for the blocks of ``store``; before a step is captured."""
        shape = (store.batch, store.heads, store.slots.shape[1] + 1)
        if self.marks is None or self.marks.shape != shape or self.marks.device != store.device:
            self.marks = torch.zeros(shape, dtype=torch.bool, device=store.device)

    def mark(self, ids: Tensor, used: Tensor | None = None) -> None:
        """The step attends to these blocks, ``ids [batch, H, n]``, -1 for none.

        Args:
            used: int ``[batch, H]``: only the first so many of each row and KV head.
        """
        self.told = True
        spare = self.marks.shape[-1] - 1
        named = ids >= 0
        if used is not None:
            named &= torch.arange(ids.shape[-1], device=ids.device) < used[..., None]
        self.marks.zero_()
        self.marks.scatter_(2, torch.where(named, ids, spare).long(), True)

    def mark_tokens(self, ids: Tensor, block_size: int) -> None:
        """The same for tokens, ``ids [batch, H, n]``: the blocks that hold them."""
        self.mark(torch.where(ids >= 0, ids // block_size, -1))

    def reset(self) -> None:
        """No step has attended to anything."""
        if self.marks is not None:
            self.marks.zero_()  # in place, and `told` stays: a captured step marks without being asked again

    def share(self, store: LayerStore) -> Tensor:
        """Float32 ``[sealed]``, see :class:`BlockMap`."""
        if store.counters.last_dense:
            return torch.ones(store.sealed)
        if not self.told or self.marks is None or self.marks.shape[0] != store.batch:
            return torch.full((store.sealed,), float("nan"))
        seen = self.marks[..., : min(store.sealed, self.marks.shape[-1] - 1)].float().mean((0, 1)).cpu()
        # The step that fills a block attends before the block is one: when that makes the table grow, no mark is there.
        return torch.nn.functional.pad(seen, (0, store.sealed - len(seen)))

    def copy(self) -> BlockWatch:
        """The copy of a cache has attended to nothing."""
        return BlockWatch()


def collect_blocks(layers: list[SparseLayer]) -> BlockMap | None:
    """What the watches of a cache's layers have seen; None before the first token."""
    stores = [layer.store for layer in layers]
    if not stores or any(store is None or store.length == 0 for store in stores):
        return None
    blocks = max(store.sealed for store in stores)
    share = torch.full((len(layers), blocks), float("nan"))
    for row, layer, store in zip(share, layers, stores):
        seen = layer.policy.watch.share(store)
        row[: len(seen)] = seen
    return BlockMap(tuple(layer.index for layer in layers), share, stores[0].block_size, stores[0].length)
