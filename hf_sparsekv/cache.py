"""The caches that ``generate()`` takes as ``past_key_values``: their interface to users and to transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .attention.masks import check_not_empty
from .attention.mla import caller, passes_on
from .bookkeeping.models import check_kind, indexed, need_config, prefix_tuning
from .bookkeeping.owner import LayerOwner
from .bookkeeping.row_changes import held_rows
from .config import OffloadConfig, SparseConfig, with_changes
from .kv.row_table import RowTable
from .layers.complete import check_complete
from .layers.sparse_layer import SparseLayer
from .offload.page_table import DevicePools
from .persistence.loading import load_cache
from .persistence.saving import save_cache
from .policies.ahead.predictive_config import PredictiveConfig
from .policies.progressive_config import ProgressiveConfig
from .policies.token_config import TokenConfig
from .policies.watch import BlockWatch
from .row_batch import RowBatch
from .telemetry.stats import CacheStats, allocated, collect
from .telemetry.watch import BlockMap, collect_blocks
from .tensors import no_autocast

passes_on(__name__)


class SparseCache(LayerOwner):
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

    config_type: ClassVar[type[SparseConfig] | None] = None  # the only one that the class takes, and its default

    def __init__(
        self,
        config: SparseConfig,
        offload: OffloadConfig | None = None,
        model_config: PreTrainedConfig | None = None,
        **changes: Any,
    ) -> None:
        if self.config_type is not None:
            config = self.config_type() if config is None else config
            if not isinstance(config, self.config_type):
                raise TypeError(f"config must be a {self.config_type.__name__}, got {type(config).__name__}")
        if offload is not None and not isinstance(offload, OffloadConfig):
            raise TypeError(f"offload must be an OffloadConfig or None, got {type(offload).__name__}")
        method = self._method(config)
        config = with_changes(config, changes)
        super().__init__(config, method.shared.place(config, offload), method)
        self._checked = False  # what the model is
        if model_config is not None:
            self.bind(model_config)

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

        For loops of one's own. ``generate()`` with prompt lookup or an assistant needs it not: its passes are known.
        Without an announcement any pass of several tokens is a prompt's, and exact. So are, inside, passes of more than
        ``max_draft + 1`` tokens, or with padding among them; and methods that choose a step ahead (docs/drafts.md).

        Args:
            sparse: False: inside, drafts attend to everything, those of ``generate()`` too.
        """
        before, self._drafts = self._drafts, sparse
        try:
            yield
        finally:
            self._drafts = before

    def rows(self, max_rows: int, max_length: int) -> RowBatch:
        """Use this empty cache for continuous batching (:mod:`.row_batch`), until :meth:`reset`.

        Args:
            max_rows: rows that there is room for.
            max_length: tokens that each may hold.

        Raises:
            ValueError: the cache is not empty, or its method chooses a step's tokens in the step before.
        """
        if not self.shared.rows_join:
            raise ValueError(
                f"rows() serves methods that choose for each step by itself; {self.config} chooses ahead: leave lag, "
                "the predictor of earlier queries, or the second device out"
            )
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
        new.shared, new.budget, new.block_pools, new._joins = self.shared, self.budget, self.block_pools, True
        new.row_table = RowTable(self.config, self.row_table.ids)
        if self.offload_config is not None:
            new.device_pools = DevicePools(replace(self.offload_config, device_pool=0))
        return new

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
        if self._replayed is not None:
            self.settle()
        if self.row_batch is not None and key_states.shape[-2] != 1:
            raise ValueError("prompts of rows that come and go are read by rows.prefill(), and join() them then")
        if not self._checked:  # before anything is stored, whatever attention function there is
            check_kind(getattr(caller(), "config", None))
            self._checked = True
        if layer_idx >= len(self.layers):
            self._make_layers(layer_idx)
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
        return super().get_mask_sizes(query_length, layer_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args, **kwargs) -> Tensor:
        """As ``Cache.update_conv_state``, for layers of other kinds (linear attention)."""
        need_config(self.model_config, type(self).__name__)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args, **kwargs) -> Tensor:
        """As ``Cache.update_recurrent_state``, for layers of other kinds."""
        need_config(self.model_config, type(self).__name__)
        state = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        self.linear_passes.stored(layer_idx)
        return state

    def get_conv_state(self, layer_idx: int, *args, **kwargs) -> Tensor | None:
        """As ``Cache.get_conv_state`` of later releases than transformers 5.17, for layers of other kinds."""
        need_config(self.model_config, type(self).__name__)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args, **kwargs) -> Tensor | None:
        """As ``Cache.get_recurrent_state`` of later releases than transformers 5.17, for layers of other kinds."""
        need_config(self.model_config, type(self).__name__)
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def update_indexer(self, *args, **kwargs) -> Tensor:
        raise indexed(type(self).__name__)

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

    @property
    def first_attention_layer(self) -> int:
        """RecurrentGemma's own: written when a forward pass begins, which then looks into the layer of this index."""
        return self._first_attention

    @first_attention_layer.setter
    def first_attention_layer(self, index: int) -> None:
        need_config(self.model_config, type(self).__name__)
        self._first_attention = index

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """As ``Cache.get_max_length``, for a cache without layers, too: -1, no limit."""
        return super().get_max_length(layer_idx) if self.layers else -1

    @property
    def max_cache_len(self) -> int:
        """Deprecated in transformers. PEFT's prefix tuning asks for it before it puts another cache in its place.

        Raises:
            ValueError: always.
        """
        raise prefix_tuning(type(self).__name__)

    def activate_past_recording(self) -> None:
        """As ``Cache.activate_past_recording``, for layers that are made later, too."""
        self._record_past = True
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, as ``Cache.crop``."""
        tokens = int(tokens_to_remove)  # once: generate() passes a tensor on the device
        if not self._crop_recent(tokens):
            with self._in_all("crop()"):
                super().crop(tokens)
                self.row_table.trim(held_rows(self.layers))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was, as ``Cache.reorder_cache``."""
        self._map_rows("reorder_cache()", lambda rows: beam_idx, lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes ``repeats`` rows, as ``Cache.batch_repeat_interleave``."""
        self._map_rows(
            "batch_repeat_interleave()",
            lambda rows: rows.repeat_interleave(repeats),
            lambda layer: layer.batch_repeat_interleave(repeats),
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, as ``Cache.batch_select_indices``."""
        self._map_rows(
            "batch_select_indices()",
            lambda rows: rows[indices.cpu()],
            lambda layer: layer.batch_select_indices(indices),
        )

    def reset(self) -> None:
        """Forget all tokens, keep the memory."""
        self._forget()

    # ------------------------------------------------------------------ reports and files

    def stats(self) -> CacheStats:
        """Counters since the cache was made or reset. Synchronises with the device."""
        return collect(self.sparse_layers, self.shared, self.device_pools, self.row_table)

    def watch_blocks(self, on: bool = True) -> None:
        """Have each decode step mark which blocks it attends to, for :meth:`chosen_blocks`; or stop that.

        Costs a few small kernels per layer and step while it is on, nothing otherwise.
        Captured steps are captured again when it changes.
        """
        if on == self._watched:
            return
        self._watched = on
        self.changes += 1
        for layer in self.sparse_layers:
            layer.policy.watch = BlockWatch() if on else None

    def chosen_blocks(self) -> BlockMap | None:
        """The blocks that the last decode step attended to; None before the first token. Synchronises with the device.

        Raises:
            RuntimeError: :meth:`watch_blocks` was not called before.
        """
        if not self._watched:
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
            ValueError: nothing is cached, or the model has layers that cannot be saved (linear attention).
            RuntimeError: an earlier error left the cache incomplete.
            OSError: ``path`` cannot be written; its directory has to exist.
        """
        save_cache(self, CACHES, path)

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
        return load_cache(cls, CACHES, path, config, offload, model_config, device)


class OffloadedSparseCache(SparseCache):
    """Sparse decoding over a KV cache whose full blocks live in host memory (AsyncTLS) or on the device.

    Each decode step scores all tokens in full blocks by label channels. It attends to the best ones, the sinks and the
    recent window. Recently chosen tokens have copies on the device. The same as
    ``SparseCache(TokenConfig(...), OffloadConfig())``.

    Args:
        config: what to select.
        offload: how to offload; ``None`` keeps all KV on the device.
        model_config: the model's configuration. Needed for models with linear-attention layers only.
        changes: options of the configuration: ``OffloadedSparseCache(token_budget=512)``.

    Raises:
        ValueError: the channel file named in ``config`` is missing or of another model.
    """

    config_type = TokenConfig

    def __init__(
        self,
        config: TokenConfig | None = None,
        offload: OffloadConfig | None = OffloadConfig(),  # noqa: B008 (frozen)
        model_config: PreTrainedConfig | None = None,
        **changes: Any,
    ) -> None:
        super().__init__(config, offload, model_config, **changes)


class ProgressiveCache(SparseCache):
    """Sparse decoding over as many tokens as it takes to cover a share of the attention mass (PSA, Twilight).

    Each decode step estimates the mass of every token by its label and attends to the largest ones, for each row, layer
    and KV head until the wanted share is covered (see ``stats()``). Same as ``SparseCache(ProgressiveConfig(...))``.

    Args:
        config: how much to cover.
        offload: how to offload; ``None`` keeps all KV on the device.
        model_config: the model's configuration. Needed for models with linear-attention layers only.
        changes: options of the configuration: ``ProgressiveCache(threshold=0.98)``.
    """

    config_type = ProgressiveConfig

    def __init__(
        self,
        config: ProgressiveConfig | None = None,
        offload: OffloadConfig | None = None,
        model_config: PreTrainedConfig | None = None,
        **changes: Any,
    ) -> None:
        super().__init__(config, offload, model_config, **changes)


class AsyncPredictiveCache(SparseCache):
    """Sparse decoding over tokens that were chosen a step before, for a predicted query (AsyncSpade).

    During each decode step the next step's query is predicted from the latest ones. All tokens in full blocks are
    scored for it. The next step attends to the best ones, the sinks and everything newer.
    The same as ``SparseCache(PredictiveConfig(...))``.

    Args:
        config: what to predict and to select, and where.
        offload: how to offload; ``None`` keeps all KV on the device, unless ``config.cache_rank`` is ``"host"``.
        model_config: the model's configuration. Needed for models with linear-attention layers only.
        changes: options of the configuration: ``AsyncPredictiveCache(token_budget=512)``.

    Raises:
        ValueError: ``config`` and ``offload`` want different places, or the channel file named in ``config`` is missing
            or of another model.
    """

    config_type = PredictiveConfig

    def __init__(
        self,
        config: PredictiveConfig | None = None,
        offload: OffloadConfig | None = None,
        model_config: PreTrainedConfig | None = None,
        **changes: Any,
    ) -> None:
        super().__init__(config, offload, model_config, **changes)


CACHES = (SparseCache, OffloadedSparseCache, ProgressiveCache, AsyncPredictiveCache)  # files name one of them
