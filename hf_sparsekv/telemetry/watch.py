"""The blocks that the last decode step attended to, over all layers of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.cache_state import FullLayer


@dataclass(frozen=True)
class BlockMap:
    """Full blocks that the last decode step attended to, per layer.

    Args:
        layers: index of each layer in the model; transformers' own layers are missing.
        share: float32 ``[layers, blocks]`` on the CPU: the share of rows and KV heads that attended to tokens of the
            block. 1 where attention was dense, NaN where it is unknown (a selection made on a second device).
        block_size: tokens of a block; block ``b`` begins at column ``b * block_size``.
        length: columns cached; those after the last full block are always attended.
    """

    layers: tuple[int, ...]
    share: Tensor
    block_size: int
    length: int


def collect_blocks(layers: Sequence[FullLayer]) -> BlockMap | None:
    """The block map recorded by the watches of a cache's layers; None before the first token."""
    stores = [layer.store for layer in layers if layer.store is not None]
    if not stores or len(stores) < len(layers) or any(store.length == 0 for store in stores):
        return None
    blocks = max(store.full_blocks for store in stores)
    share = torch.full((len(layers), blocks), float("nan"))
    for row, layer, store in zip(share, layers, stores):
        watch = layer.policy.watch
        if watch is not None:
            seen = watch.share(store)
            row[: len(seen)] = seen
    return BlockMap(tuple(layer.index for layer in layers), share, stores[0].block_size, stores[0].length)
