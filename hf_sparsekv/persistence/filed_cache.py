"""Details of layers on which saving and loading agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..kv.pool import BlockPool
from ..layers.cache_state import FullLayer
from .container import dtype_name

_LABELS = {"codes", "qparams"}
INDEX_KEYS = "index_keys"  # of a model's own indexer, ``[batch, columns, D]``


Kinds = Sequence[type[Any]]  # of CacheState


def kept_index(layer: FullLayer, calibrates: bool) -> dict[str, Tensor]:
    """Index fields of the blocks, such as bounds and labels. (Labels exist once the channels are chosen.)"""
    left = _LABELS if calibrates else ()
    return {name: held for name, held in layer.store.pool.fields.items() if name not in left}


def kv_dtype_of(pool: BlockPool) -> str | None:
    """Dtype of the codes in the pool's blocks; None if keys and values are not quantised."""
    return dtype_name(pool.kv.dtype) if "scales" in pool.fields else None
