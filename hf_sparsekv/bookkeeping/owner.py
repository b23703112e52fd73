"""The interface of a sparse cache to its layers, to attention and to captured steps.

Apart from :class:`..SparseCache`, its interface to users and to transformers, because hardly a caller needs both.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ..attention.drafts import verified_tokens
from ..attention.handle import Step
from ..attention.masks import new_tokens
from ..config import OffloadConfig, SparseConfig
from ..kv.forward_pass import Pass
from ..kv.pool import BlockPool
from ..kv.row_table import RowTable
from ..kv.rows import Rows, Taken
from ..kv.store import Tally
from ..layers.checks import check_mask
from ..layers.complete import check_complete
from ..layers.sliding import SlidingRing
from ..layers.sparse_layer import SparseLayer
from ..offload.copy_streams import CopyStreams
from ..offload.host_limit import HostBudget
from ..offload.page_table import DevicePools
from ..policies.base import Policy
from ..policies.plan import Plan
from ..policies.registry import Method, method_of
from ..policies.watch import BlockWatch
from ..predictor.channels import check_config, check_layers
from ..row_batch import RowBatch
from ..tensors import no_autocast
from ..types import AttentionParams
from .models import check_kind, indexed, stock_layers, why_dense
from .notices import Notices
from .passes import LinearPasses
from .replayed import Replayed
from .row_changes import crop_recent, map_rows
from .trials import resume


class LayerOwner(Cache):
    """The owner of sparse layers (:class:`..layers.owned.Owner`).

    Args:
        config, offload: as the constructor of the cache completes them.
        method: what chooses in layers that are not dense.

    Attributes:
        config, offload_config: these.
        shared: what the policies of all layers have in common.
        foresight: what its layers want of those before them.
        met: hooks that give it have met this cache.
        budget, device_pools: of an offloaded cache: the host memory it may take, its device pools. Without: None.
        row_table: what the rows hold, and the blocks that they are in.
        under_way: the forward pass whose tokens layers get; None: no layer has got any yet, or all have.
        copy_streams: ways to and from the host.
        block_pools: of the layers, where several caches share them.
        row_batch: continuous batching; None: fixed rows.
        changes: counts what may make the next captured step another one than the last.
        going_on: see :meth:`all_go_on`.
        linear_passes: forward passes of models with linear-attention layers.
        notices: what it warns of.
        model_config: None until the model is known.
    """

    def __init__(self, config: SparseConfig, offload: OffloadConfig | None, method: Method) -> None:
        super().__init__(layers=[])
        self.config, self.offload_config = config, offload
        self.shared = method.share(config, offload)
        self.foresight = self.shared.foresight
        self.met = False
        self.budget = None if offload is None else HostBudget(offload)
        self.device_pools = None if offload is None else DevicePools(offload)
        self.row_table, self.copy_streams = RowTable(config), CopyStreams()
        self.block_pools: dict[int, BlockPool] | None = None
        self.row_batch: RowBatch | None = None
        self._joins = False  # made by beside()
        self.changes = 0
        self._joined = -1  # the number of changes when all layers were found to hold the same
        self.under_way: Pass | None = None
        self._last_layer = -1  # of ours, once the model is known
        self._replayed: Replayed | None = None  # steps that layers have not accounted for
        self.model_config: PreTrainedConfig | None = None
        self._record_past = self._watched = False
        self._drafts: bool | None = None  # what drafts() says of passes; None: nothing
        self.going_on = False
        self.linear_passes = LinearPasses()
        self.notices = Notices(type(self).__name__)

    # ------------------------------------------------------------------ layers

    def _method(self, config: SparseConfig) -> Method:
        """What chooses in layers that are not dense."""
        return method_of(config)

    def make_policy(self, layer_idx: int) -> Policy:
        """The selection policy of one layer."""
        offload = self.offload_config
        if layer_idx < self.config.dense_layers:
            return Policy(self.config, layer_idx, offload is not None and not offload.keep_dense)
        policy = self.shared.policy(layer_idx)
        if self._joins and policy.labels is not None:
            # Rows may share blocks, labels included: channels may depend on nothing but the tokens that they share.
            policy.labels.first_only = True
        return policy

    def bind(self, model_config: PreTrainedConfig) -> None:
        """Learn the model's layers from its configuration; otherwise the first attention call does.

        Raises:
            TypeError: it is no configuration.
            ValueError: the model is of a kind that a sparse cache cannot serve.
        """
        check_config(model_config)
        check_kind(model_config)
        self.shared.check_model(model_config.get_text_config(decoder=True))
        stock = stock_layers(model_config)
        if any(isinstance(layer, DynamicIndexedLayer) for layer in stock):
            raise indexed(type(self).__name__)
        for index, layer in enumerate(stock):
            if type(layer) is DynamicLayer:
                stock[index] = self._layer(index)
            elif self._record_past and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        if not any(isinstance(layer, SparseLayer) for layer in stock):
            why = why_dense(model_config, stock)
            warnings.warn(f"{why}: {type(self).__name__} has nothing to make sparse", stacklevel=3)
        # Both at the end: after an interrupt in between the next call binds again.
        self.layers = stock
        self._last_layer = max((i for i, layer in enumerate(stock) if isinstance(layer, SparseLayer)), default=-1)
        self.linear_passes.learn(stock)
        self.model_config = model_config

    def use_rings(self) -> None:
        """Replace filled sliding layers of transformers' own by ones that a captured step can use."""
        kinds = getattr(self.model_config.get_text_config(decoder=True), "layer_types", None) or ()
        for index, layer in enumerate(self.layers):
            if index < len(kinds) and kinds[index] == "chunked_attention":
                continue  # transformers keeps chunks in the same class: each begins anew, and is no window
            if type(layer) is DynamicSlidingWindowLayer and layer.is_initialized and not layer.record_past:
                self.layers[index] = SlidingRing(layer, self, index)

    def _layer(self, index: int) -> SparseLayer:
        if index < len(self.layers) and isinstance(self.layers[index], SparseLayer):
            return self.layers[index]
        layer = SparseLayer(self, index)
        if self._watched:
            layer.policy.watch = BlockWatch()
        return layer

    def _make_layers(self, layer_idx: int) -> None:
        """Make layers of ours up to this one. Raises ValueError if the model's are known, which ends before it."""
        if self.model_config is not None:
            raise ValueError(
                f"this cache was made for a model of {len(self.layers)} layers, got layer {layer_idx}: it belongs to "
                "another model, use a new one"
            )
        while len(self.layers) <= layer_idx:
            self.layers.append(self._layer(len(self.layers)))

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The layers that this cache manages itself."""
        if self._replayed is not None:
            self.settle()
        return [layer for layer in self.layers if isinstance(layer, SparseLayer)]

    def first(self, layer: SparseLayer) -> bool:
        """``layer`` is the first one of ours."""
        return layer is next((other for other in self.layers if isinstance(other, SparseLayer)), None)

    def joined_rows(self) -> Rows:
        """What all layers hold. From here on they follow ``row_table``.

        Raises:
            RuntimeError: they hold different things, after an error.
        """
        if self._joined == self.changes:
            return self.row_table.rows
        layers = self.sparse_layers
        rows = self.row_table.join([layer.store.held for layer in layers])
        if rows is None:
            check_complete(self.layers)
            raise RuntimeError(
                "this cache is incomplete: its layers hold different tokens. Call reset() and prefill again"
            )
        for layer in layers:
            layer.store.join()
        self._joined = self.changes
        return rows

    @no_autocast
    def __deepcopy__(self, memo: dict) -> LayerOwner:
        if self.row_batch is not None:
            raise TypeError("a cache of rows that come and go cannot be copied: copy what rows.prefill() gives")
        self.settle()
        self.under_way = None  # both begin with their next ones
        new = object.__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            setattr(new, name, copy.deepcopy(value, memo))
        new._drafts, new.going_on = None, False
        return new

    # ------------------------------------------------------------------ a forward pass

    def attend(self, module, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float):
        """Called by the attention function with a handle's step.

        Returns:
            ``(out, None, None)``; or ``(None, key, value)`` if the layer is transformers' own after all.
        """
        layer = step.layer
        if self.model_config is None:
            self.bind(module.config)
        elif step.past == 0 and module.config is not self.model_config:
            check_layers(self.model_config, module.config)
        current = self.layers[layer.index]
        if current is layer:
            return layer.attend(step, query, mask, params, dropout), None, None
        return None, *current.update(step.k, step.v)

    def begin_pass(self, layer: SparseLayer, step: Step, mask: Tensor | None) -> Pass:
        """The forward pass that brings ``layer`` the tokens of ``step``: :attr:`under_way` from here on."""
        if step.past and mask is not None and self.first(layer):
            check_mask(layer.store, mask, step.past, self.drop_tokens)
        before, new, known = layer.store.held if step.past else None, step.k.shape[2], self.under_way
        again = known is not None and known.begins_with(before, new)
        if again and known.mask is mask and known.device in (None, step.k.device):
            return known
        if self.row_batch is not None:
            valid = self.new_rows(step.k.device)
        else:
            valid = new_tokens(mask, step.past, step.length, len(step.k))
        few = valid is None and step.past and 1 < new <= self.config.max_draft + 1 and (mask is None or mask.ndim == 2)
        drafts = bool(few) and self.drafted(new)
        if again and valid is None and known.valid is None and drafts == known.drafts:
            known.mask = mask  # the same, on another device
        else:
            self.under_way = Pass(self.row_table, before, new, mask, valid, drafts)
        return self.under_way

    def new_rows(self, device: torch.device) -> Tensor | None:
        """Which rows of a batch of which rows come and go get a token, bool ``[batch, 1]``; None: all."""
        return None if self.row_batch is None else self.row_batch.valid(device)

    def drafted(self, tokens: int) -> bool:
        """The forward pass under way, of so many tokens over cached ones, is known to verify drafts."""
        return verified_tokens(self) == tokens if self._drafts is None else self._drafts

    # ------------------------------------------------------------------ changes

    def drop_tokens(self, valid: Tensor) -> bool:
        """A mask hides cached columns: they are padding from here on, and all layers drop their tokens.

        As in a batch of conversations, whose shorter answers were filled up with tokens that the next turn masks.

        Args:
            valid: bool ``[batch, columns]``, of all cached columns.

        Returns:
            False, and nothing has changed, unless it leaves each row its first tokens.
        """
        layers = [layer for layer in self.sparse_layers if layer.store is not None]
        rows = self.row_table.masked(layers[0].store.held, valid)
        if rows is None:
            return False
        with self._in_all("dropping masked tokens"):
            for layer in layers:
                layer.shorten(rows)
            self.row_table.trim([rows])
        return True

    @contextmanager
    def _in_all(self, what: str) -> Iterator[None]:
        """What is inside changes all layers, and may stop half-way: they count as incomplete until it is done."""
        if self.row_batch is not None:
            raise ValueError(f"{what} is not for rows that come and go: join(), leave() and hold() change them")
        self.changes += 1
        self.under_way = None
        layers = self.sparse_layers
        before = [layer.broken for layer in layers]
        for layer in layers:
            layer.broken = layer.broken or f"{what} stopped half-way"
        yield
        for layer, broken in zip(layers, before):
            layer.broken = broken

    def _crop_recent(self, tokens_to_remove: int) -> bool:
        """A crop where all layers follow the table: see :func:`.crop_recent`. What captured steps are stays known."""
        self.under_way = None
        follow = self._joined == self.changes and self.row_batch is None
        return follow and crop_recent(self.row_table, self.layers, tokens_to_remove)

    def _map_rows(
        self, what: str, select: Callable[[Tensor], Tensor], others: Callable[[CacheLayerMixin], None]
    ) -> None:
        """Rows become others, in all layers: see :func:`.map_rows`."""
        with self._in_all(what):
            map_rows(self.row_table, self.layers, select, others)

    def _forget(self) -> None:
        """No row holds anything."""
        self.changes += 1
        self._replayed = self.row_batch = None
        for layer in self.sparse_layers:
            layer.broken = "reset() stopped half-way"  # until all is done
        self.under_way = None
        resume(self.device_pools, self.shared)
        if self.model_config is not None:
            # transformers 5.17 zeroes its own layers but keeps their length: take fresh ones.
            fresh = DynamicCache(config=self.model_config).layers
            self.layers = [mine if isinstance(mine, SparseLayer) else new for mine, new in zip(self.layers, fresh)]
            if self._record_past:
                super().activate_past_recording()
        self.row_table.clear()
        for layer in self.sparse_layers:
            layer.empty()
        self.copy_streams.release()
        if self.device_pools is not None:
            self.device_pools.reset()
        self.linear_passes.clear()
        for layer in self.sparse_layers:
            layer.broken = None

    def passed(self, layer_idx: int) -> None:
        """A forward pass has come to this layer: of ours, it has stored its tokens."""
        self.changes += 1
        if layer_idx == self._last_layer:
            self.under_way = None
        if self.linear_passes.linear:
            self.linear_passes.came(layer_idx)

    # ------------------------------------------------------------------ captured steps

    def settle(self) -> None:
        """Let the layers account for the steps that were replayed since they last did."""
        replayed, self._replayed = self._replayed, None
        if replayed is not None:
            replayed.settle([layer for layer in self.layers if isinstance(layer, SparseLayer)])

    def replayed(
        self, plans: Sequence[Plan], queries: Sequence[Tensor], taken: Taken, drafts: Rows | None = None
    ) -> None:
        """A captured step was replayed; or a pass over drafts, which as rows are ``drafts``.

        Layers that follow ``row_table`` hold what it leaves from here on; :meth:`settle` does the rest.
        """
        if self._replayed is None or self._replayed.plans is not plans:
            self.settle()
            self._replayed = Replayed(plans, queries, Tally())
        self._replayed.tally.add(taken, self.config.sinks, drafts)
        self.row_table.rows = taken.after

    @contextmanager
    def all_go_on(self) -> Iterator[None]:
        """Inside, every row gets a token in each decode step: nobody has to read that off a mask on the device."""
        before, self.going_on = self.going_on, True
        try:
            yield
        finally:
            self.going_on = before
