"""The caches that ``generate()`` takes as ``past_key_values``, and the layer that they are made of."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar, Literal, NamedTuple

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
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from .attention.drafts import verified_tokens
from .attention.handle import Step
from .attention.masks import check_not_empty, is_whole, new_columns
from .attention.mla import caller, passes_on
from .config import (
    OffloadConfig,
    PredictiveConfig,
    ProgressiveConfig,
    SparseConfig,
    TwoLevelConfig,
    with_changes,
)
from .kv.pool import BlockPool
from .kv.row_table import RowTable
from .kv.rows import Rows, Taken
from .kv.store import Tally
from .layers.sliding import SlidingRing
from .layers.sparse_layer import SparseLayer
from .offload.copy_streams import CopyStreams
from .offload.host_limit import HostBudget
from .offload.page_table import DevicePools
from .persistence.cache_file import load_cache, save_cache
from .policies.base import Policy
from .policies.plan import Plan
from .policies.registry import method_of
from .policies.shared import Shared
from .policies.watch import BlockWatch
from .predictor.channels import check_config, check_layers
from .row_batch import RowBatch
from .telemetry.stats import CacheStats, allocated, collect
from .telemetry.watch import BlockMap, collect_blocks
from .tensors import no_autocast
from .types import AttentionParams

passes_on(__name__)

_HALF_WAY = (
    "this cache is incomplete: an earlier forward pass stopped between or inside linear-attention layers. Call reset() "
    "and prefill again"
)


class Replayed(NamedTuple):
    """Replayed steps that were alike: what each layer did, its last query, and what they met."""

    plans: Sequence[Plan]
    queries: Sequence[Tensor]
    tally: Tally


def _check_kind(config) -> None:
    """Raise for the configuration of an encoder-decoder, a whole model's or that of one of its attention modules."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            "sparse caches serve decoder-only models; for an encoder-decoder leave past_key_values out (its "
            "cross-attention cache is not supported)"
        )
    text = config.get_text_config(decoder=True) if isinstance(config, PreTrainedConfig) else config
    if getattr(text, "cross_attention_layers", None):
        raise ValueError(
            f"some layers of this {text.model_type} model attend to an image, whose keys lie in the same cache, and "
            "are passed over without one: sparse caches do not serve that; leave past_key_values out"
        )


class SparseCache(Cache):
    """A KV cache whose full-attention layers decode sparsely; every other layer is transformers' own.

    Prefill is exact. What a decode step attends to is up to the method that ``config`` belongs to.

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sparsekv")
        out = model.generate(**inputs, past_key_values=SparseCache(StreamingConfig(window=1024)))

    Without ``model_config`` the layers' kinds are learned from the first attention call. Models with
    linear-attention layers need it, because those touch the cache before any attention does.

    Args:
        config: what to select, and by which method: a :class:`TwoLevelConfig`, :class:`ProgressiveConfig`, ...
        offload: how to keep full blocks in host memory; ``None`` keeps all KV on the device, unless ``config`` says
            otherwise.
        model_config: the model's configuration. Needed for models with linear-attention layers only.
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
        super().__init__(layers=[])
        if self.config_type is not None:
            config = self.config_type() if config is None else config
            if not isinstance(config, self.config_type):
                raise TypeError(f"config must be a {self.config_type.__name__}, got {type(config).__name__}")
        if offload is not None and not isinstance(offload, OffloadConfig):
            raise TypeError(f"offload must be an OffloadConfig or None, got {type(offload).__name__}")
        policy = self._policy_type(config)
        config = with_changes(config, changes)
        offload = policy.place(config, offload)
        self.config, self.offload_config = config, offload
        self.shared: Shared = policy.share(config, offload)
        self.foresight = policy.foresees_by(config, offload is not None)  # what its layers want of those before them
        self.met = False  # hooks that give it have met this cache
        self.budget = None if offload is None else HostBudget(offload)
        self.device_pools = None if offload is None else DevicePools(offload)
        self.row_table, self.copy_streams = RowTable(config), CopyStreams()
        self.block_pools: dict[int, BlockPool] | None = None  # of the layers, where several caches share them
        self.row_batch: RowBatch | None = None
        self._joins = False  # made by beside()
        self.changes = 0  # counts what may make the next captured step another one than the last
        self._joined = -1  # the number of changes when all layers were found to hold the same
        self._replayed: Replayed | None = None  # steps that layers have not accounted for
        self.model_config = None
        self._record_past = self._warned = self._watched = self._told = self._checked = False
        self._drafts: bool | None = None  # what drafts() says of passes; None: nothing
        self.going_on = False  # see all_go_on()
        self._columns: tuple[Tensor | None, Tensor | None] = (None, None)
        self._linear = False  # the model has linear-attention layers, whose states do not tell how many tokens they saw
        # Of such a model, by layer: forward passes that have come to it, and those that have stored a recurrent state.
        self._passes: Counter[int] = Counter()
        self._states: Counter[int] = Counter()
        if model_config is not None:
            self.bind(model_config)

    def _policy_type(self, config: SparseConfig) -> type[Policy]:
        """The class of the policies of layers that are not dense."""
        return method_of(config).policy

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

    def __repr__(self) -> str:
        where = "device" if self.offload_config is None else "host"
        where = "second device" if "second" in self.shared.places else where
        rows = next((layer.store.batch for layer in self.sparse_layers if layer.store is not None), 1)
        tokens = f"{self.get_seq_length()} tokens" if rows == 1 else f"{rows} x {self.get_seq_length()} tokens"
        about = self.config.brief() if self.config_type is None else self.config.changes()
        return f"{type(self).__name__}({tokens} on {where}{', ' * bool(about)}{about})"

    # ------------------------------------------------------------------ layers

    def bind(self, model_config: PreTrainedConfig) -> None:
        """Learn the model's layers from its configuration; otherwise the first attention call does.

        Raises:
            TypeError: it is no configuration.
            ValueError: the model is of a kind that a sparse cache cannot serve.
        """
        check_config(model_config)
        _check_kind(model_config)
        self.shared.check_model(model_config.get_text_config(decoder=True))
        stock = DynamicCache(config=model_config).layers
        # Kinds of layers may be listed that are not run: assistant_early_exit has the first ones draft by themselves.
        run = getattr(model_config.get_text_config(decoder=True), "num_hidden_layers", None)
        stock = stock[:run]
        if any(isinstance(layer, DynamicIndexedLayer) for layer in stock):
            self.update_indexer()
        for index, layer in enumerate(stock):
            if type(layer) is DynamicLayer:
                stock[index] = self._layer(index)
            elif self._record_past and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        if not any(isinstance(layer, SparseLayer) for layer in stock):
            if any(isinstance(layer, LinearAttentionAndFullAttentionLayer) for layer in stock):
                why = (
                    f"the layers of this {model_config.model_type} model that attend to their whole past hold a state "
                    "of linear attention (Mamba) as well, and such layers stay transformers' own: right, but dense"
                )
            else:
                why = (
                    f"no layer of this {model_config.model_type} model attends to its whole past (sliding windows or "
                    "linear attention only)"
                )
            warnings.warn(f"{why}: {type(self).__name__} has nothing to make sparse", stacklevel=3)
        # Both at the end: after an interrupt in between the next call binds anew.
        self.layers = stock
        self._linear = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in stock)
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

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The layers that this cache manages itself."""
        if self._replayed is not None:
            self.settle()
        return [layer for layer in self.layers if isinstance(layer, SparseLayer)]

    @no_autocast
    def __deepcopy__(self, memo: dict) -> SparseCache:
        if self.row_batch is not None:
            raise TypeError("a cache of rows that come and go cannot be copied: copy what rows.prefill() gives")
        self.settle()
        new = object.__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            setattr(new, name, copy.deepcopy(value, memo))
        new._drafts, new.going_on = None, False
        return new

    # ------------------------------------------------------------------ drafts

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

    def drafted(self, tokens: int) -> bool:
        """The forward pass under way, of so many tokens over cached ones, is known to verify drafts."""
        return verified_tokens(self) == tokens if self._drafts is None else self._drafts

    @contextmanager
    def all_go_on(self) -> Iterator[None]:
        """Inside, every row gets a token in each decode step: nobody has to read that off a mask on the device."""
        before, self.going_on = self.going_on, True
        try:
            yield
        finally:
            self.going_on = before

    # ------------------------------------------------------------------ rows that come and go

    def rows(self, max_rows: int, max_length: int) -> RowBatch:
        """Make this empty cache a batch of rows that come and go (:mod:`.row_batch`), until :meth:`reset`.

        Args:
            max_rows: rows that there is room for.
            max_length: tokens that each may hold.

        Raises:
            ValueError: the cache is not empty, or its method chooses a step's tokens in the step before.
        """
        if not self.make_policy(self.config.dense_layers).rows_join:
            raise ValueError(
                f"rows() serves methods that choose for each step by itself; {self.config} chooses ahead: leave lag, "
                "the predictor of earlier queries, or the second device out"
            )
        batch = RowBatch(self, max_rows, max_length)
        for layer in self.sparse_layers:
            layer.drop()  # prompts of these rows are read into other pools
        if self.device_pools is not None:
            self.device_pools.clear()
        self.block_pools, self.row_batch = {}, batch
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

    # ------------------------------------------------------------------ captured steps

    def settle(self) -> None:
        """Let the layers account for the steps that were replayed since they last did."""
        replayed, self._replayed = self._replayed, None
        if replayed is not None:
            layers = [layer for layer in self.layers if isinstance(layer, SparseLayer)]
            for layer, plan, query in zip(layers, replayed.plans, replayed.queries):
                layer.account(plan, query, replayed.tally)

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
            self._check_complete()
            raise RuntimeError(
                "this cache is incomplete: its layers hold different tokens. Call reset() and prefill again"
            )
        for layer in layers:
            layer.store.join()
        self._joined = self.changes
        return rows

    @property
    def is_initialized(self) -> bool:
        """Something is cached: models ask whether a pass is the first one (transformers' own leaves our layers out)."""
        mine = [layer for layer in self.layers if isinstance(layer, SparseLayer)]
        return any(layer.get_seq_length() for layer in mine) if mine else super().is_initialized

    def first(self, layer: SparseLayer) -> bool:
        """``layer`` is the first one of ours."""
        return layer is next((other for other in self.layers if isinstance(other, SparseLayer)), None)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Keys and values of a layer's next tokens, as ``Cache.update``; what attention gets back knows the cache.

        Raises:
            ValueError: there are no tokens, they are of another model than those before, or of an encoder-decoder.
        """
        check_not_empty(key_states.shape[0], key_states.shape[-2])
        self.changes += 1
        if self._replayed is not None:
            self.settle()
        if self.row_batch is not None and key_states.shape[-2] != 1:
            raise ValueError("prompts of rows that come and go are read by rows.prefill(), and join() them then")
        if not self._checked:  # before anything is stored, whatever attention function there is
            _check_kind(getattr(caller(), "config", None))
            self._checked = True
        if self.model_config is None:
            while len(self.layers) <= layer_idx:
                self.layers.append(self._layer(len(self.layers)))
        elif layer_idx >= len(self.layers):
            raise ValueError(
                f"this cache was made for a model of {len(self.layers)} layers, got layer {layer_idx}: it belongs to "
                "another model, use a new one"
            )
        layer = self.layers[layer_idx]
        if layer is next((other for other in self.layers if isinstance(other, CacheLayerMixin)), None):
            self._check_complete()
        if not isinstance(layer, LinearAttentionCacheLayerMixin):  # else its other half was asked before, and counted
            self._check_passes(layer_idx)
        return layer.update(key_states, value_states, *args, **kwargs)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As ``Cache.get_mask_sizes``; a forward pass begins with it, so an empty input is refused here."""
        if not query_length:
            check_not_empty(1, 0, int(self.get_seq_length()))
        return super().get_mask_sizes(query_length, layer_idx)

    def _check_complete(self) -> None:
        """When a forward pass begins, all layers hold the same tokens."""
        lengths = {layer.get_seq_length() for layer in self.sparse_layers}
        for layer in self.layers:
            if isinstance(layer, CacheLayerMixin) and not isinstance(layer, SparseLayer):
                length = int(layer.get_seq_length())
                if length or getattr(layer, "is_sliding", False):  # layers of other kinds may never cache anything
                    lengths.add(length)
        if len(lengths) > 1:
            raise RuntimeError(
                f"this cache is incomplete: its layers hold {sorted(lengths)} tokens, because an earlier forward pass "
                "stopped half-way. Call reset() and prefill again"
            )

    def _check_passes(self, layer_idx: int) -> None:
        """When a forward pass begins, with this layer, earlier ones have come to all layers, and to their end there.

        For linear-attention layers, which change their states in place and without telling how many tokens are in them.
        """
        passes, states = self._passes, self._states
        if not passes or layer_idx > min(passes):
            return
        kinds = getattr(self.model_config.get_text_config(decoder=True), "layer_types", None) or []
        linear = [i for i, layer in enumerate(self.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
        named = {i for i in linear if kinds[i : i + 1] == ["linear_attention"]}  # others may be layers without a state
        counted = {passes[layer.index] for layer in self.sparse_layers}
        asked = any(passes[i] for i in linear)  # models of transformers 5.23 ask for no state: nothing counts theirs
        counted |= {passes[i] for i in linear if passes[i] or (asked and i in named)}
        # Kernels that store the state themselves in single steps do so in all layers.
        ended = {states[i] == passes[i] for i in linear if states[i]}
        if len(counted) > 1 or len(ended) > 1:
            raise RuntimeError(_HALF_WAY)

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

    def new_columns(self, mask: Tensor | None, step: Step) -> Tensor | None:
        """Validity of the step's columns, None if none is padding; worked out once a forward, not once a layer."""
        if self.row_batch is not None:
            return self.new_rows(step.k.device)
        if mask is None or is_whole(mask):
            return None
        if self._columns[0] is not mask:
            valid = new_columns(mask, step.past, step.length).expand(len(step.k), -1)  # one mask may serve all rows
            self._columns = (mask, None if bool(valid.all()) else valid)
        return self._columns[1]

    def new_rows(self, device: torch.device) -> Tensor | None:
        """Which rows of a batch of which rows come and go get a token, bool ``[batch, 1]``; None: all."""
        return None if self.row_batch is None else self.row_batch.valid(device)

    def warn_bypass(self) -> None:
        """Warn once that a model reads all keys and values instead of attending sparsely."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"something other than the sparsekv attention function reads the keys of {type(self).__name__}: the "
                "result is right, but dense and slow. Load the model with attn_implementation='sparsekv'",
                stacklevel=3,
            )

    def warn_own_queries(self) -> None:
        """Warn once that nothing is chosen beforehand."""
        if not self._told:
            self._told = True
            warnings.warn(
                f"{type(self).__name__} chooses each layer's tokens by that layer's own query, in place: right, but "
                "not hidden behind the layer before, because nothing hands over what that expects. Call "
                "optimize(model), or predict_ahead(model) for eager steps; predictor='own' is this without the warning",
                stacklevel=3,
            )

    # ------------------------------------------------------------------ what generate() asks

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args, **kwargs) -> Tensor:
        """As ``Cache.update_conv_state``, for layers of other kinds (linear attention)."""
        self._need_config()
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args, **kwargs) -> Tensor:
        """As ``Cache.update_recurrent_state``, for layers of other kinds."""
        self._need_config()
        state = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        self._states[layer_idx] += 1
        return state

    def get_conv_state(self, layer_idx: int, *args, **kwargs) -> Tensor | None:
        """As ``Cache.get_conv_state`` of later releases than transformers 5.17, for layers of other kinds."""
        self._need_config()
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args, **kwargs) -> Tensor | None:
        """As ``Cache.get_recurrent_state`` of later releases than transformers 5.17, for layers of other kinds."""
        self._need_config()
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def update_indexer(self, *args, **kwargs) -> Tensor:
        raise ValueError(
            "this model selects tokens by itself (DeepSeek Sparse Attention: a trained indexer, whose keys the cache "
            "has to hold), and caches expanded keys and values: selecting from its selection would only lose tokens. "
            f"Leave past_key_values out; {type(self).__name__} serves MLA models without an indexer"
        )

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As ``Cache.has_previous_state``, for layers of other kinds.

        Their first question in a forward pass, and the only one in all of transformers' models.

        Raises:
            RuntimeError: an earlier forward pass stopped half-way.
        """
        self._need_config()
        known = super().has_previous_state(layer_idx, state_idx)
        if layer_idx is not None and not state_idx:
            self._check_passes(layer_idx)
            if not self._passes[layer_idx] and max(self._passes.values(), default=0) > 1:
                raise RuntimeError(_HALF_WAY)  # the first one did not come here
            self.passed(layer_idx)
        return known

    def passed(self, layer_idx: int) -> None:
        """A forward pass has come to this layer: of ours, it has stored its tokens."""
        self.changes += 1
        if self._linear:
            self._passes[layer_idx] += 1

    def take_passes(self, other: SparseCache) -> None:
        """The layers of ``other`` have been copied into this cache, so its forward passes are this one's."""
        self._passes, self._states = other._passes.copy(), other._states.copy()

    def _need_config(self) -> None:
        if self.model_config is None:
            raise ValueError(
                f"this model has linear-attention layers: make the cache with {type(self).__name__}(..., "
                "model_config=model.config)"
            )

    @property
    def first_attention_layer(self) -> int:
        """RecurrentGemma's own: written when a forward pass begins, which then looks into the layer of this index."""
        return self._first_attention

    @first_attention_layer.setter
    def first_attention_layer(self, index: int) -> None:
        self._need_config()
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
        raise ValueError(
            "PEFT's prefix tuning keeps its prefix in a DynamicCache of its own, which would take the place of "
            f"{type(self).__name__}, so that nothing were sparse: leave past_key_values out, or use LoRA or prompt "
            "tuning, which work with sparse caches. (For the length of a cache: get_max_length())"
        )

    def activate_past_recording(self) -> None:
        """As ``Cache.activate_past_recording``, for layers that are made later, too."""
        self._record_past = True
        super().activate_past_recording()

    @contextmanager
    def _in_all(self, what: str) -> Iterator[None]:
        """What is inside changes all layers, and may stop half-way: they count as incomplete until it is done."""
        if self.row_batch is not None:
            raise ValueError(f"{what} is not for rows that come and go: join(), leave() and hold() change them")
        self.changes += 1
        layers = self.sparse_layers
        before = [layer.broken for layer in layers]
        for layer in layers:
            layer.broken = layer.broken or f"{what} stopped half-way"
        yield
        for layer, broken in zip(layers, before):
            layer.broken = broken

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, as ``Cache.crop``."""
        tokens = int(tokens_to_remove)  # once: generate() passes a tensor on the device
        if not self._crop_recent(tokens):
            with self._in_all("crop()"):
                super().crop(tokens)
                self.row_table.trim(self._held())

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

    def _crop_recent(self, tokens_to_remove: int) -> bool:
        """:meth:`crop` where it takes drafts back behind captured steps: a change of the table, and no other.

        False, and nothing has changed, if layers have to be told. What captured steps are stays known.
        """
        table = self.row_table
        if self._joined != self.changes or self.row_batch is not None:
            return False
        if any(
            not isinstance(layer, SparseLayer) or layer.broken or layer.policy.follows_crops for layer in self.layers
        ):
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was, as ``Cache.reorder_cache``."""
        with self._in_all("reorder_cache()"):
            self._map_rows(lambda rows: beam_idx, lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes ``repeats`` rows, as ``Cache.batch_repeat_interleave``."""
        with self._in_all("batch_repeat_interleave()"):
            self._map_rows(
                lambda rows: rows.repeat_interleave(repeats), lambda layer: layer.batch_repeat_interleave(repeats)
            )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, as ``Cache.batch_select_indices``."""
        with self._in_all("batch_select_indices()"):
            self._map_rows(lambda rows: rows[indices.cpu()], lambda layer: layer.batch_select_indices(indices))

    def _held(self) -> list[Rows]:
        """What each layer holds."""
        return [layer.store.held for layer in self.sparse_layers if layer.store is not None]

    def _map_rows(self, select: Callable[[Tensor], Tensor], others: Callable[[CacheLayerMixin], None]) -> None:
        """Row ``i`` becomes what row ``index[i]`` was; ``others`` does that in layers that are not ours.

        ``select`` makes the index, int64 ``[rows]``, of the numbers of all rows. Without layers of ours none is made.
        """
        table, held = self.row_table, self._held()
        index = select(torch.arange(table.batch)) if held else torch.arange(0)
        order = index.tolist()
        mapped = {id(rows): table.mapped(rows, order) for rows in held}
        for layer in self.layers:
            if not isinstance(layer, SparseLayer):
                others(layer)
            elif layer.store is not None:
                layer.map_rows(index, mapped[id(layer.store.held)])
        if held:
            table.map_rows(order, max(mapped.values(), key=lambda rows: rows.columns))

    def reset(self) -> None:
        """Forget all tokens, keep the memory."""
        self.changes += 1
        self._replayed = self.row_batch = None
        for layer in self.sparse_layers:
            layer.broken = "reset() stopped half-way"  # until all is done
        self._columns = (None, None)
        self.resume()
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
        self._passes.clear()
        self._states.clear()
        for layer in self.sparse_layers:
            layer.broken = None

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Inside, steps are tried out for a capture: nothing is brought to the device."""
        with ExitStack() as stack:
            if self.device_pools is not None:
                stack.enter_context(self.device_pools.paused())
            stack.enter_context(self.shared.trial())
            yield

    def resume(self) -> None:
        """End a :meth:`trial` whose own end was interrupted."""
        if self.device_pools is not None:
            self.device_pools.resume()
        self.shared.resume()

    # ------------------------------------------------------------------ reports

    def stats(self) -> CacheStats:
        """Counters since the cache was made or reset. Synchronises with the device."""
        return collect(self.sparse_layers, self.device_pools, self.row_table)

    def watch_blocks(self, on: bool = True) -> None:
        """Have each decode step mark which blocks it attends to, for :meth:`chosen_blocks`; or stop that.

        Costs a few small kernels per layer and step while it is on, nothing otherwise. Captured steps are captured
        anew when it changes.
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
        held = allocated(self.sparse_layers, self.device_pools, self.row_table)
        return {place: held[place] for place in self.shared.places}

    # ------------------------------------------------------------------ files

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
        """Read a cache that :meth:`save` wrote. Counters begin anew.

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

    Each decode step chooses tokens by quantised label channels among all, wherever their blocks are, and attends to
    those tokens, the sinks and the recent window. What was chosen lately has a copy on the device. The same as
    ``SparseCache(TwoLevelConfig(...), OffloadConfig())``.

    Args:
        config: what to select.
        offload: how to offload; ``None`` keeps all KV on the device.
        model_config: the model's configuration. Needed for models with linear-attention layers only.
        changes: options of the configuration: ``OffloadedSparseCache(token_budget=512)``.

    Raises:
        ValueError: the channel file named in ``config`` is missing or of another model.
    """

    config_type = TwoLevelConfig

    def __init__(
        self,
        config: TwoLevelConfig | None = None,
        offload: OffloadConfig | None = OffloadConfig(),  # noqa: B008 (frozen)
        model_config: PreTrainedConfig | None = None,
        **changes: Any,
    ) -> None:
        super().__init__(config, offload, model_config, **changes)


class ProgressiveCache(SparseCache):
    """Sparse decoding over as many tokens as it takes to cover a share of the attention mass (PSA, Twilight).

    Each decode step estimates the mass of every token by its label and attends to the largest ones, for each row, layer
    and KV head until the wanted share is covered; ``stats()`` tells how many that took. The same as
    ``SparseCache(ProgressiveConfig(...))``.

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

    Beside each decode step the next step's query is predicted from the latest ones, all tokens in full blocks are
    scored for it, and the best are handed to the next step, which attends to them, to the sinks and to everything
    newer. The same as ``SparseCache(PredictiveConfig(...))``.

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
