"""State that the layers of one cache share, and a layer's weak reference to it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from ..attention.handle import Step
from ..attention.sparse_prompt import PromptAudit
from ..kv.forward_pass import Pass
from ..kv.pool import BlockPool
from ..kv.row_table import RowTable
from ..kv.rows import Rows
from ..kv.store import LayerStore
from ..offload.copy_streams import CopyStreams
from ..offload.host_limit import HostBudget
from ..offload.page_table import DevicePools
from ..policies.base import Policy
from ..policies.shared import Shared
from ..types import AttentionParams
from .kinds import LayerKind
from .linear_passes import LinearPasses
from .next_step import NextStep
from .replays import Replays

BYPASSED = (
    "something other than the sparsekv attention function reads the keys of {cache}: the result is right, but dense "
    "and slow. Load the model with attn_implementation='sparsekv'"
)
OWN_QUERIES = (
    "{cache} chooses each layer's tokens by that layer's own query, in place: right, but not hidden by the layer "
    "before, because nothing hands over what that expects. Call optimize(model), or predict_ahead(model) for eager "
    "steps; a TokenConfig is this without the warning"
)


class CacheState(Cache):
    """State of a cache that its layers, files, batches of rows and captured steps use.

    Args:
        config, offload: as the constructor of the cache completes them.
        shared: what the policies of all layers have in common.

    Attributes:
        layers: all of the model's, in its order.
        foresight: what its layers want of those before them. met: hooks that give it have met this cache.
        budget, device_pools: of an offloaded cache: the host memory it may take, its device pools. Without: None.
        row_table: what the rows hold, and the blocks that they are in.
        copy_streams: ways to and from the host.
        block_pools: of each layer, where several caches share them.
        row_batch: continuous batching; None: fixed rows.
        model_config: None until the model is known.
        under_way: the forward pass whose tokens layers get; None: no layer has got any yet, or all have.
        changes: counts what may make the next captured step another one than the last.
        draft_passes: passes of few tokens over cached ones are known to verify drafts, or not to; None: unknown.
        going_on: every row gets a token in each decode step, which need not be read off a mask on the device.
        joins: the cache is of one row that is to join a batch.
        watched: steps mark which blocks they attend to.
        warned: texts of warnings that were given.
        record_past: sliding layers keep tokens that leave their window, for ``crop()``.
        replays: replayed steps that layers have not accounted for.
        linear_passes: forward passes of models with linear-attention layers.
    """

    config_type: ClassVar[type[SparseConfig] | None] = None  # the only one that the class takes, and its default
    layers: list[Any]

    def __init__(self, config: SparseConfig, offload: OffloadConfig | None, shared: Shared) -> None:
        super().__init__(layers=[])
        self.config, self.offload_config, self.shared = config, offload, shared
        self.foresight, self.met = shared.foresight, False
        self.budget = None if offload is None else HostBudget(offload)
        self.device_pools = None if offload is None else DevicePools(offload)
        self.row_table, self.copy_streams = RowTable(config), CopyStreams()
        self.replays, self.linear_passes = Replays(), LinearPasses()
        self.block_pools: dict[int, BlockPool] | None = None
        self.row_batch: Any = None  # RowBatch | None
        self.model_config: PreTrainedConfig | None = None
        self.under_way: Pass | None = None
        self.changes = 0
        self.draft_passes: bool | None = None
        self.going_on = self.joins = self.watched = self.record_past = False
        self.warned: set[str] = set()

    if TYPE_CHECKING:  # methods of SparseCache

        @property
        def sparse_layers(self) -> list[Any]: ...
        def bind(self, model_config: Any) -> None: ...
        def attend(
            self, module: Any, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float
        ) -> Any: ...
        def passed(self, layer_idx: int) -> None: ...
        def joined_rows(self) -> Rows: ...
        def beside(self) -> CacheState: ...
        def drafts(self, sparse: bool = True) -> AbstractContextManager[None]: ...


def is_first(cache: CacheState, layer: object) -> bool:
    """``layer`` is the first full-attention layer."""
    return layer is next(iter(cache.sparse_layers), None)


def next_layer(cache: CacheState, index: int) -> FullLayer | None:
    """The full-attention layer that comes after layer ``index``, None after the last."""
    return next((layer for layer in cache.sparse_layers if layer.index > index), None)


def new_rows(cache: CacheState, device: torch.device) -> Tensor | None:
    """Which rows of a continuous batch get a token, bool ``[batch, 1]``; None: all."""
    return None if cache.row_batch is None else cache.row_batch.valid(device)


def end_pass(cache: CacheState, index: int) -> None:
    """A pass of several tokens has come through layer ``index``: the last one frees the copy streams' buffers."""
    if next_layer(cache, index) is None:
        cache.copy_streams.release()


def warn_once(cache: CacheState, text: str) -> None:
    """Warn in the name of the cache's class, :data:`BYPASSED` or :data:`OWN_QUERIES`, unless it has been done."""
    if text not in cache.warned:
        cache.warned.add(text)
        warnings.warn(text.format(cache=type(cache).__name__), stacklevel=3)


@contextmanager
def trial_steps(cache: CacheState) -> Iterator[None]:
    """Inside, steps are tried out for a capture: nothing is brought to the device."""
    with ExitStack() as stack:
        if cache.device_pools is not None:
            stack.enter_context(cache.device_pools.paused())
        stack.enter_context(cache.shared.trial())
        yield


def resume(cache: CacheState) -> None:
    """End :func:`trial_steps` whose own end was interrupted."""
    if cache.device_pools is not None:
        cache.device_pools.resume()
    cache.shared.resume()


class Owned:
    """A layer that belongs to a cache, by a weak reference: without a cycle, memory is freed at once."""

    @property
    def owner(self) -> CacheState:
        """The cache."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the cache that this layer belongs to does not exist any more")
        return owner

    @owner.setter
    def owner(self, cache: CacheState) -> None:
        self._owner = weakref.ref(cache)

    def __reduce__(self):
        raise TypeError(
            "sparse caches cannot be pickled: write one to a file with cache.save(path), or copy it with "
            "copy.deepcopy(cache)"
        )


class FullLayer(Owned, LayerKind):
    """A layer of full attention, as passes and files use it; its attributes: see :class:`.sparse_layer.SparseLayer`."""

    index: int
    store: LayerStore
    policy: Policy
    latent: bool
    q_heads: int
    broken: str | None
    next_step: NextStep
    audit: PromptAudit
    pending: Step | None
    captured: Any  # CapturedLayer | None

    if TYPE_CHECKING:  # methods of SparseLayer

        def begin(self, step: Step, q_heads: int, valid: Tensor | None = None) -> None: ...
        def commit(self, step: Step, query: Tensor | None, valid: Tensor | None) -> None: ...
        def materialise(self, step: Step, which: str) -> Tensor: ...
        def shorten(self, rows: Rows) -> None: ...
        def map_rows(self, index: Tensor, rows: Rows) -> None: ...
        def _check_complete(self) -> None: ...
