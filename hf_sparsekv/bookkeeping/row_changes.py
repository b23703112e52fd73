"""Changes of all rows at once, in the table and in every layer: rows that are mapped, and tokens that are removed.

Apart from the cache because they need no more of it than its row table and its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..kv.row_table import RowTable
from ..kv.rows import Rows
from ..layers.sparse_layer import SparseLayer

Layers = Sequence[CacheLayerMixin]


def held_rows(layers: Layers) -> list[Rows]:
    """What each of our layers holds."""
    return [layer.store.held for layer in layers if isinstance(layer, SparseLayer) and layer.store is not None]


def map_rows(
    table: RowTable,
    layers: Layers,
    select: Callable[[Tensor], Tensor],
    others: Callable[[CacheLayerMixin], None],
) -> None:
    """Row ``i`` becomes what row ``index[i]`` was; ``others`` does that in layers that are not ours.

    ``select`` makes the index, int64 ``[rows]``, of the numbers of all rows. Without layers of ours none is made.
    """
    held = held_rows(layers)
    index = select(torch.arange(table.batch)) if held else torch.arange(0)
    order = index.tolist()
    mapped = {id(rows): rows.mapped(order) for rows in held}
    for layer in layers:
        if not isinstance(layer, SparseLayer):
            others(layer)
        elif layer.store is not None:
            layer.map_rows(index, mapped[id(layer.store.held)])
    if held:
        table.map_rows(order, max(mapped.values(), key=lambda rows: rows.columns))


def crop_recent(table: RowTable, layers: Layers, tokens_to_remove: int) -> bool:
    """A ``crop()`` that takes drafts back behind captured steps: a change of the table, and no other.

    All layers follow the table. False, and nothing has changed, if layers have to be told.
    """
    if any(not isinstance(layer, SparseLayer) or layer.broken or layer.policy.follows_crops for layer in layers):
        return False
    rows = table.rows
    keep = tokens_to_remove if tokens_to_remove > 0 else rows.columns + tokens_to_remove
    if not 0 < keep <= rows.columns:
        return False
    after = rows if keep == rows.columns else table.cropped(rows, keep)
    if after.sealed != rows.sealed:
        return False
    table.rows = after
    return True
