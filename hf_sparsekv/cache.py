"""The caches that ``generate()`` takes as ``past_key_values``: their interface to users and to transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import methodcaller
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig, checked, with_changes

from .attention.handle import Step
from .attention.masks import check_not_empty
from .attention.mla import caller, passes_on
from .cache_layers import add_layers, layers_of
from .kv.row_table import RowTable
from .kv.rows import Rows
from .layers.cache_state import CacheState
from .layers.changes import in_all
from .layers.checks import moves_itself
from .layers.sparse_layer import SparseLayer
from .layers.together import (
    check_complete,
    check_crop,
    crop_other,
    crop_recent,
    forget,
    held_rows,
    join_layers,
    map_rows,
)
from .offload.page_table import DevicePools
from .policies.registry import method_of
from .policies.watch import BlockWatch
from .predictor.channels import check_layers
from .telemetry.stats import CacheStats, allocated, collect
from .telemetry.watch import BlockMap, collect_blocks
from .tensors import no_autocast
from .transformers_compat import (
    AllPositions,
    FirstAttentionLayer,
    GivenToGenerate,
    check_first,
    need_config,
    once_bound,
    prefix_tuning,
    prepare_model,
    update_indexer,
)
from .types import AttentionParams
from .untraced import all_untraced

if TYPE_CHECKING:
    from .row_batch import RowBatch

passes_on(__name__)


class SparseCache(CacheState):
    """A KV cache whose full-attention layers decode sparsely; every other layer is transformers' own.

    Prefill is exact. The method of ``config`` decides which tokens a decode step attends to.

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sparsekv")
        out = model.generate(**inputs, past_key_values=SparseCache(StreamingConfig(window=1024)))

    Without ``model_config`` the first attention call tells the layers' kinds.

    Args:
        config: what to select, and by which method: a :class:`TokenConfig`, :class:`ProgressiveConfig`, ...
        offload: how to keep full blocks in host memory; ``None`` keeps all KV on the device, unless ``config`` says
            otherwise.
        model_config: the model's configuration. Needed only for linear-attention layers: they use the cache first.
        changes: options of the configuration, in place of those in ``config``: ``token_budget=512``.

    Raises:
        TypeError: ``config`` is no method's configuration or has no such option, or ``offload`` is no
            :class:`OffloadConfig`.
        ValueError: ``config`` and ``offload`` want different places, or a file or a device named in ``config`` is
            missing or of another model.
    """

    kinds: ClassVar[list[type[SparseCache]]] = []  # files name one of them
    _method = staticmethod(method_of)  # what chooses in layers that are not dense

    def __init__(
        self,
        config: SparseConfig,
        offload: OffloadConfig | None = None,
        model_config: PreTrainedConfig | None = None,
        **changes: Any,
    ) -> None:
        config = checked(self.config_type, config, offload)
        method, config = self._method(config), with_changes(config, changes)
        offload = method.shared.place(config, offload)
        super().__init__(config, offload, method.share(config, offload))
        self._joined = -1  # the number of changes when all layers were found to hold the same
        self._last_layer = -1  # of ours, once the model is known
        self._checked = False  # what the model is
        if model_config is not None:
            self.bind(model_config)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        all_untraced(cls)

    def __repr__(self) -> str:
        where = "device" if self.offload_config is None else "host"
        where = "second device" if "second" in self.shared.places else where
        rows = next((layer.store.batch for layer in self.sparse_layers if layer.store is not None), 1)
        tokens = f"{self.get_seq_length()} tokens" if rows == 1 else f"{rows} x {self.get_seq_length()} tokens"
        about = self.config.brief() if self.config_type is None else self.config.changes()
        return f"{type(self).__name__}({tokens} on {where}{', ' * bool(about)}{about})"

    # ------------------------------------------------------------------ drafts, and continuous batching

    @contextmanager
    def drafts(self, sparse: bool = True) -> Iterator[None]:
        """Inside, forward passes of several tokens over cached ones verify drafts, which attend as decode steps do.

            with cache.drafts():
                logits = model(drafts, past_key_values=cache).logits  # [rows, n, vocabulary]
            cache.crop(-rejected)

        For loops of one's own. It is not needed inside ``generate()`` with prompt lookup or an assistant, which marks
        drafts. Without an announcement any pass of several tokens is a prompt's, and exact. So are, inside, passes of
        more than ``max_draft + 1`` tokens, or with padding among them; and methods that choose a step ahead
        (docs/drafts.md).

        Args:
            sparse: False: inside, drafts attend to everything, those of ``generate()`` too.
        """
        before, self.draft_passes = self.draft_passes, sparse
        try:
            yield
        finally:
            self.draft_passes = before

    def rows(self, max_rows: int, max_length: int) -> RowBatch:
        """Use this empty cache for continuous batching (:mod:`.row_batch`), until :meth:`reset`.

        Args:
            max_rows: rows that there is room for.
            max_length: tokens that each may hold.

        Raises:
            ValueError: the cache is not empty, or its method chooses a step's tokens in the step before.
        """
        from .row_batch import RowBatch

        batch = RowBatch(self, max_rows, max_length)
        for layer in self.sparse_layers:
            layer.drop()  # prompts of these rows are read into other pools
        if self.device_pools is not None:
            self.device_pools.clear()
        self.block_pools, self.row_batch, self.under_way = {}, batch, None
        self.changes += 1
        return batch

    def beside(self) -> SparseCache:
        """An empty cache over the same block pools, for one row that is to join. Nothing is copied to the device."""
        new = type(self)(self.config, self.offload_config)
        new.shared, new.budget, new.block_pools, new.joins = self.shared, self.budget, self.block_pools, True
        new.row_table = RowTable(self.config, self.row_table.ids)
        if self.offload_config is not None:
            new.device_pools = DevicePools(replace(self.offload_config, device_pool=0))
        if (
            self.linear_passes.linear and self.model_config is not None
        ):  # whose layers come to the cache before an attention function does
            new.bind(self.model_config)
        return new

    # ------------------------------------------------------------------ its layers, and attention

    def bind(self, model_config: PreTrainedConfig) -> None:
        """Learn the model's layers from its configuration; otherwise the first attention call does.

        Raises:
            TypeError: it is no configuration.
            ValueError: the model is of a kind that a sparse cache cannot serve.
        """
        layers = layers_of(self, model_config)
        # Both at the end: after an interrupt in between the next call binds again.
        self.layers = layers
        self._last_layer = max((i for i, layer in enumerate(layers) if isinstance(layer, SparseLayer)), default=-1)
        self.linear_passes.learn(layers)
        self.model_config = model_config

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The layers that this cache manages itself."""
        layers = [layer for layer in self.layers if isinstance(layer, SparseLayer)]
        if self.replays.pending:
            self.replays.settle(layers)
        return layers

    def joined_rows(self) -> Rows:
        """The rows of all layers, joined. From here on they follow ``row_table``.

        Raises:
            RuntimeError: they hold different things, after an error.
        """
        if self._joined != self.changes:
            join_layers(self.row_table, self.layers, self.sparse_layers)
            self._joined = self.changes
        return self.row_table.rows

    @no_autocast
    def __deepcopy__(self, memo: dict) -> SparseCache:
        if self.row_batch is not None:
            raise TypeError("a cache of rows that come and go cannot be copied: copy what rows.prefill() gives")
        self.replays.settle(self.sparse_layers)
        self.under_way = None
        new = object.__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            setattr(new, name, copy.deepcopy(value, memo))
        new.draft_passes, new.going_on = None, False
        return new

    def attend(self, module, step: Step, query: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float):
        """Called by the attention function with a handle's step.

        Returns:
            ``(out, None, None)``; or ``(None, key, value)`` if the layer is transformers' own after all.
        """
        layer: Any = step.layer
        if self.model_config is None:
            self.bind(module.config)
        elif step.past == 0 and module.config is not self.model_config:
            check_layers(self.model_config, module.config)
        current = self.layers[layer.index]
        if current is layer:
            return layer.attend(step, query, mask, params, dropout), None, None
        return None, *current.update(step.k, step.v)

    def passed(self, layer_idx: int) -> None:
        """A forward pass has come to this layer: of ours, it has stored its tokens."""
        self.changes += 1
        if layer_idx == self._last_layer:
            self.under_way = None
        if self.linear_passes.linear:
            self.linear_passes.came(layer_idx)

    # ------------------------------------------------------------------ transformers' interface

    @property
    def is_initialized(self) -> bool:
        """Something is cached: models ask whether a pass is the first one (transformers' own leaves our layers out)."""
        mine = [layer for layer in self.layers if isinstance(layer, SparseLayer)]
        return any(layer.get_seq_length() for layer in mine) if mine else super().is_initialized

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Keys and values of a layer's next tokens, as ``Cache.update``; what attention gets back knows the cache.

        Raises:
            ValueError: there are no tokens, they are of another model than those before, or of an encoder-decoder.
        """
        if 0 in (key_states.shape[0], key_states.shape[-2]):
            check_not_empty(key_states.shape[0], key_states.shape[-2])
        self.changes += 1
        if self.replays.pending:
            self.replays.settle(self.sparse_layers)
        if self.row_batch is not None and key_states.shape[-2] != 1 and self.row_table.exactness.counts is None:
            raise ValueError("prompts of rows that come and go are read by rows.prefill(), and join() them then")
        if not self._checked:  # before anything is stored, whatever attention function there is
            check_first(self, getattr(caller(), "config", None))
            self._checked = True
        if layer_idx >= len(self.layers):
            add_layers(self, layer_idx)
        layer = self.layers[layer_idx]
        if layer is next((other for other in self.layers if isinstance(other, CacheLayerMixin)), None):
            check_complete(self.layers)
        if self.linear_passes.linear and not isinstance(layer, LinearAttentionCacheLayerMixin):
            # Else its other half was asked before, and counted.
            self.linear_passes.check(layer_idx, self.layers, self.model_config)
        return layer.update(key_states, value_states, *args, **kwargs)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As ``Cache.get_mask_sizes``; a forward pass begins with it, so an empty input is refused here."""
        if not query_length:
            check_not_empty(1, 0, int(self.get_seq_length()))
        prepare_model(self)
        return super().get_mask_sizes(query_length, layer_idx)

    update_conv_state = once_bound("update_conv_state")
    get_conv_state = once_bound("get_conv_state")
    get_recurrent_state = once_bound("get_recurrent_state")
    update_indexer = update_indexer
    position_ids, first_attention_layer, _is_user_defined = AllPositions(), FirstAttentionLayer(), GivenToGenerate()

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args, **kwargs) -> Tensor:
        """As ``Cache.update_recurrent_state``, for layers of other kinds."""
        need_config(self.model_config, type(self).__name__)
        state = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        self.linear_passes.stored(layer_idx)
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As ``Cache.has_previous_state``, for layers of other kinds.

        Their first question in a forward pass, and the only one in all of transformers' models.

        Raises:
            RuntimeError: an earlier forward pass stopped half-way.
        """
        need_config(self.model_config, type(self).__name__)
        known = super().has_previous_state(layer_idx, state_idx)
        if layer_idx is not None and not state_idx:
            self.linear_passes.check_asked(layer_idx, self.layers, self.model_config)
            self.passed(layer_idx)
        return known

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """As ``Cache.get_max_length``, for a cache without layers, too: -1, no limit."""
        return super().get_max_length(layer_idx) if self.layers else -1

    max_cache_len = property(prefix_tuning)  # deprecated in transformers

    offload = prefetch = moves_itself

    def activate_past_recording(self) -> None:
        """As ``Cache.activate_past_recording``, for layers that are made later, too."""
        self.record_past = True
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, as ``Cache.crop``.

        Raises:
            ValueError: the model has layers with a recurrent state, which cannot give tokens back.
        """
        tokens = int(tokens_to_remove)  # once: generate() passes a tensor on the device
        if self.linear_passes.linear:
            check_crop(self.layers, -tokens if tokens <= 0 else max(0, int(self.get_seq_length()) - tokens))
        self.under_way = None
        follow = self._joined == self.changes and self.row_batch is None
        if not (follow and crop_recent(self.row_table, self.layers, tokens)):
            nothing = tokens == 0 or tokens >= self.get_seq_length()
            with in_all(self, "crop()", partial(crop_other, tokens, nothing)):
                for layer in self.sparse_layers:
                    layer.crop(tokens)
                self.row_table.trim(held_rows(self.layers))
        self.row_table.exactness.cropped(self.get_seq_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was, as ``Cache.reorder_cache``."""
        with in_all(self, "reorder_cache()", methodcaller("reorder_cache", beam_idx)):
            map_rows(self.row_table, self.layers, lambda rows: beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes ``repeats`` rows, as ``Cache.batch_repeat_interleave``."""
        with in_all(self, "batch_repeat_interleave()", methodcaller("batch_repeat_interleave", repeats)):
            map_rows(self.row_table, self.layers, methodcaller("repeat_interleave", repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, as ``Cache.batch_select_indices``."""
        with in_all(self, "batch_select_indices()", methodcaller("batch_select_indices", indices)):
            map_rows(self.row_table, self.layers, lambda rows: rows[indices.cpu()])

    def reset(self) -> None:
        """Forget all tokens, keep the memory."""
        forget(self)

    # ------------------------------------------------------------------ reports and files

    def stats(self) -> CacheStats:
        """Counters since the cache was made or reset. Synchronises with the device."""
        return collect(self.sparse_layers, self.shared, self.device_pools, self.row_table)

    def watch_blocks(self, on: bool = True) -> None:
        """Have each decode step mark which blocks it attends to, for :meth:`chosen_blocks`; or stop that.

        Costs a few small kernels per layer and step while it is on. Captured steps are captured again when it changes.
        """
        if on == self.watched:
            return
        self.watched = on
        self.changes += 1
        for layer in self.sparse_layers:
            layer.policy.watch = BlockWatch() if on else None

    def chosen_blocks(self) -> BlockMap | None:
        """The blocks that the last decode step attended to; None before the first token. Synchronises with the device.

        Raises:
            RuntimeError: :meth:`watch_blocks` was not called before.
        """
        if not self.watched:
            raise RuntimeError("chosen blocks are not recorded: call watch_blocks() before the step")
        return collect_blocks(self.sparse_layers)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes allocated by its own layers, shared blocks included: ``device``, ``host``; ``second`` if it has one."""
        held = allocated(self.sparse_layers, self.shared, self.device_pools, self.row_table)
        return {place: held[place] for place in self.shared.places}

    @no_autocast
    def save(self, path: str | PathLike[str]) -> None:
        """Write the cache to one safetensors file, which appears when it is whole; several may save to one path.

        Raises:
            ValueError: nothing is cached, or the model has layers that cannot be saved.
            RuntimeError: an earlier error left the cache incomplete.
            OSError: ``path`` cannot be written; its directory has to exist.
        """
        from .persistence.saving import save_cache  # most programs save none

        save_cache(self, self.kinds, path)

    @classmethod
    @no_autocast
    def load(
        cls,
        path: str | PathLike[str],
        config: SparseConfig | None = None,
        offload: OffloadConfig | Literal["default"] | None = "default",
        model_config: PreTrainedConfig | None = None,
        device: torch.device | str | None = None,
    ) -> SparseCache:
        """Read a cache that :meth:`save` wrote. Counters start at zero.

        Args:
            config: ``None`` takes the saved one. Another may differ in what only later steps depend on
                (``token_budget``, ``num_blocks``, ``lag``, ``dense_below``, ``max_length``, the reduces, and much of
                a :class:`ProgressiveConfig` or :class:`PredictiveConfig`: their ``FREE``; docs/saving.md).
            offload: as in the constructor, whatever it was when the cache was saved. ``"default"``: what the
                constructor of the saved cache's class does.
            model_config: the model's configuration, to be compared with the saved model's. Needed for models with
                sliding-window layers.
            device: the model's device. ``None`` means that of each layer when it was saved.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no saved cache, is damaged, or belongs to another version, model or configuration; or
                without ``config`` it reserves far more memory than it fills (docs/saving.md).
            MemoryError: the host memory that ``offload`` allows does not hold it.
        """
        from .persistence.loading import load_cache

        return load_cache(cls, cls.kinds, path, config, offload, model_config, device)


all_untraced(SparseCache)
SparseCache.kinds.append(SparseCache)
