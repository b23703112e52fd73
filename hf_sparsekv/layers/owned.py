"""A layer's weak reference to its cache."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from hf_sparsekv_config.sparse import SparseConfig

from ..attention.handle import AttendingCache
from ..kv.forward_pass import Pass
from ..kv.pool import BlockPool
from ..kv.row_table import RowTable
from ..offload.copy_streams import CopyStreams
from ..offload.host_limit import HostBudget
from ..offload.page_table import DevicePools
from ..policies.shared import Shared

if TYPE_CHECKING:
    from .sparse_layer import SparseLayer


class Warns(Protocol):
    """What a cache warns of, once each."""

    def bypass(self) -> None:
        """Something else than the attention function reads a layer's keys or values."""
        ...

    def own_queries(self) -> None:
        """Nothing is chosen beforehand."""
        ...


class Owner(AttendingCache, Protocol):
    """What layers need of the cache that they belong to.

    Attributes:
        config: of the cache.
        model_config: of the model; None: it is not known yet.
        shared: what the policies of all layers have in common.
        layers: all of it, in the model's order.
        changes: counts what may make the next captured step another one than the last.
        row_batch: continuous batching; None: fixed rows.
        draft_passes: passes of few tokens over cached ones are known to verify drafts, or not to; None: unknown.
        met: hooks that foresee queries have met it.
        under_way: the forward pass whose tokens layers get; None: no layer has got any yet, or all have.
        notices: what it warns of.
        row_table: what the rows hold, and the blocks that they are in.
        block_pools: of each layer, where several caches share them.
        copy_streams: ways to and from the host.
        budget, device_pools: of an offloaded cache: the host memory it may take, its device pools. Without: None.
    """

    config: SparseConfig
    shared: Shared
    model_config: PreTrainedConfig | None
    layers: list[CacheLayerMixin]
    changes: int
    row_batch: Any  # RowBatch | None
    draft_passes: bool | None
    met: bool
    under_way: Pass | None
    row_table: RowTable
    block_pools: dict[int, BlockPool] | None
    copy_streams: CopyStreams
    budget: HostBudget | None
    device_pools: DevicePools | None

    @property
    def notices(self) -> Warns: ...
    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """All full-attention layers, in the model's order."""
        ...

    def passed(self, layer_idx: int) -> None:
        """A layer has stored a forward pass's tokens."""
        ...


def is_first(owner: Owner, layer: object) -> bool:
    """``layer`` is the first full-attention layer."""
    return layer is next(iter(owner.sparse_layers), None)


def new_rows(owner: Owner, device: torch.device) -> Tensor | None:
    """Which rows of a continuous batch get a token, bool ``[batch, 1]``; None: all."""
    return None if owner.row_batch is None else owner.row_batch.valid(device)


def next_layer(owner: Owner, index: int) -> SparseLayer | None:
    """The full-attention layer that comes after layer ``index``, None after the last."""
    return next((layer for layer in owner.sparse_layers if layer.index > index), None)


def end_pass(owner: Owner, index: int) -> None:
    """A pass of several tokens has come through layer ``index``: after the last one, free the copy streams' buffers."""
    if next_layer(owner, index) is None:
        owner.copy_streams.release()


class Owned:
    """A layer that belongs to a cache, by a weak reference: without a cycle, memory is freed at once."""

    @property
    def owner(self) -> Owner:
        """The cache."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the cache that this layer belongs to does not exist any more")
        return owner

    @owner.setter
    def owner(self, cache: Owner) -> None:
        self._owner = weakref.ref(cache)

    def __reduce__(self):
        raise TypeError(
            "sparse caches cannot be pickled: write one to a file with cache.save(path), or copy it with "
            "copy.deepcopy(cache)"
        )
