"""The interface of a cache that saving and loading need, and the layer details that both share.

Separate from both so that they agree on the content of a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from ..kv.pool import BlockPool
from ..kv.row_table import RowTable
from ..kv.rows import Rows
from ..layers.sparse_layer import SparseLayer
from ..policies.shared import Shared
from .container import dtype_name

_LABELS = {"codes", "qparams"}
INDEX_KEYS = "index_keys"  # of a model's own indexer, ``[batch, columns, D]``


class FiledCache(Protocol):
    """Interface of a cache for saving and loading.

    Attributes:
        config_type: the only configuration that its class takes; None: that of any method.
        layers: sparse layers, and transformers' own sliding ones.
        model_config: the model's configuration; None until it is bound.
        _record_past: sliding layers keep tokens that leave their window, for ``crop()``.
        row_table: lengths and blocks of the rows.
        row_batch: state of continuous batching; None without it.
    """

    config_type: ClassVar[type[SparseConfig] | None]
    config: SparseConfig
    offload_config: OffloadConfig | None
    shared: Shared
    layers: list[CacheLayerMixin]
    model_config: PreTrainedConfig | None
    _record_past: bool
    row_table: RowTable
    row_batch: Any

    def __init__(self, config: SparseConfig, offload: OffloadConfig | None) -> None: ...

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The sparse layers, which the cache manages itself."""
        ...

    def get_seq_length(self) -> int:
        """Columns cached."""
        ...

    def joined_rows(self) -> Rows:
        """Lengths and sealed tokens of the rows, which all layers share."""
        ...

    def bind(self, model_config: PreTrainedConfig) -> None:
        """Create the layers that the model's configuration describes."""
        ...


Kinds = Sequence[type[Any]]  # of FiledCache


def kept_index(layer: SparseLayer, calibrates: bool) -> dict[str, Tensor]:
    """Index fields of the blocks, such as bounds and labels. (Labels exist once the channels are chosen.)"""
    left = _LABELS if calibrates else ()
    return {name: held for name, held in layer.store.pool.fields.items() if name not in left}


def kv_dtype_of(pool: BlockPool) -> str | None:
    """Dtype of the codes in the pool's blocks; None if keys and values are not quantised."""
    return dtype_name(pool.kv.dtype) if "scales" in pool.fields else None
