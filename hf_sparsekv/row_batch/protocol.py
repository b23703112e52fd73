"""The protocol of the cache that decodes rows, and the result of a prefill.

Apart from the rows because their parts hand these to each other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from ..kv.row_table import RowTable
from ..kv.rows import Rows
from ..layers.sparse_layer import SparseLayer
from ..policies.shared import Shared

if TYPE_CHECKING:
    from .batch import RowBatch


class Batch(Protocol):
    """The attributes of a cache that rows use, also of caches that are prefilled for a batch."""

    config: SparseConfig
    offload_config: OffloadConfig | None
    layers: list[CacheLayerMixin]
    shared: Shared
    row_table: RowTable
    changes: int
    model_config: PreTrainedConfig | None
    row_batch: RowBatch | None

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The layers that are ours."""
        ...

    def get_seq_length(self) -> int:
        """Columns cached."""
        ...

    def beside(self) -> Batch:
        """An empty cache over the same block pools."""
        ...

    def joined_rows(self) -> Rows:
        """The rows that all layers hold; from here on the layers follow the table."""
        ...

    def bind(self, model_config) -> None:
        """Make the layers that the model's configuration asks for."""
        ...

    def drafts(self) -> AbstractContextManager[None]:
        """Inside, passes of several tokens verify drafts."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


class Prefilled(NamedTuple):
    """A prompt that has been read.

    Args:
        cache: one row, over the pools of the batch that it was made for.
        logits: ``[1, vocabulary]`` of its last token.
    """

    cache: Batch
    logits: Tensor
