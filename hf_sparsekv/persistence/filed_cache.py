"""What saving and loading need of a cache, and what both know of its layers.

Apart from both because a file holds for one what it held for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from ..config import OffloadConfig, SparseConfig
from ..kv.pool import BlockPool
from ..kv.row_table import RowTable
from ..kv.rows import Rows
from ..layers.sparse_layer import SparseLayer
from ..policies.shared import Shared
from .container import dtype_name

_LABELS = {"codes", "qparams"}


class FiledCache(Protocol):
    """What saving and loading need of a cache.

    Attributes:
        config_type: the only configuration that its class takes; None: each method's.
        layers: ours, and transformers' own sliding ones.
        model_config: None as long as nobody told.
        _record_past: sliding layers keep what leaves their window, for ``crop()``.
        row_table: what the rows hold.
        row_batch: rows that come and go; None: they do not.
    """

    config_type: ClassVar[type[SparseConfig] | None]
    config: SparseConfig
    offload_config: OffloadConfig | None
    shared: Shared
    layers: list[CacheLayerMixin]
    model_config: PreTrainedConfig | None
    _record_past: bool
    row_table: RowTable
    row_batch: object | None

    def __init__(self, config: SparseConfig, offload: OffloadConfig | None) -> None: ...

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The layers that are ours."""
        ...

    def get_seq_length(self) -> int:
        """Columns cached."""
        ...

    def joined_rows(self) -> Rows:
        """What all layers hold."""
        ...

    def bind(self, model_config: PreTrainedConfig) -> None:
        """Make the layers that the model's configuration asks for."""
        ...

    def _layer(self, index: int) -> SparseLayer:
        """Make one of ours."""
        ...

    def _check_complete(self) -> None:
        """Raise RuntimeError if an earlier forward pass has stopped half-way."""
        ...


Kinds = Sequence[type[FiledCache]]


def kept_index(layer: SparseLayer, calibrates: bool) -> dict[str, Tensor]:
    """What a selection keeps of the blocks. (Labels are made when channels are.)"""
    left = _LABELS if calibrates else ()
    return {name: held for name, held in layer.store.pool.fields.items() if name not in left}


def kv_dtype_of(pool: BlockPool) -> str | None:
    """Of codes in the pool's blocks; None: keys and values are there as they are."""
    return dtype_name(pool.kv.dtype) if "scales" in pool.fields else None
