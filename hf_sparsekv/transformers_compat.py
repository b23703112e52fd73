"""All that leans on the inside of transformers: which models a cache serves, and what ``generate()`` gives with one.

Its layers come from transformers' own for a model. Models with an indexer (DeepSeek Sparse Attention) choose their
tokens by themselves and need more of a cache. ``generate()`` shows what it was given in the frame that calls us only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionAndFullAttentionLayer
from transformers.generation import GenerationMode

from hf_sparsekv_config.sparse import SparseConfig

from .attention.indexer import take_pieces
from .attention.masks import SECOND_PROMPT, check_columns
from .attention.mla import absorb_mla, caller, calling_model, passes_on
from .attention.pooled_indexer import take_pooled
from .cache_name import given_cache
from .layers.kinds import face, has_others
from .layers.together import check_complete
from .policies.indexed import chooses, in_blocks
from .untraced import untraced

passes_on(__name__)

# Their attention modules give the attention function the indices, and nothing but their own latents.
LATENT = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "mistral_large4_text")
SERVED = (*LATENT, "minimax_m3_vl_text", "qwen4_exp_text")

# Up to transformers 5.20 chunks begin with the input's first token, whatever is cached.
_CHUNKS_GO_ON = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 21)
_READ = {"self", "input_ids", "generation_config", "generation_mode"}
_ANEW = ": call cache.reset() or make a new cache, or leave {option} out"


# ------------------------------------------------------------------ models that are served


def check_kind(config) -> None:
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


def check_attention(config: Any, cache: Any) -> None:
    """Raise for a model whose attention function compiles what it is given, which is no tensor in sparse layers.

    Before anything is stored: the cache is as it was. Other functions get real tensors, with a warning.
    """
    text = config.get_text_config(decoder=True) if isinstance(config, PreTrainedConfig) else config
    compiled = getattr(text, "_attn_implementation", None) == "flex_attention"
    if compiled and (not cache.layers or cache.sparse_layers):  # layers are not known yet, or some are sparse
        raise ValueError(
            "attn_implementation='flex_attention' is compiled, and cannot read a sparse cache: load the model with "
            "attn_implementation='sparsekv', or call model.set_attn_implementation('sparsekv')"
        )


def prefix_tuning(cache: Cache) -> int:
    """In place of ``Cache.max_cache_len``, which PEFT's prefix tuning asks before it puts another cache in its place.

    Raises:
        ValueError: always.
    """
    given = getattr(cache, "_is_user_defined", False)
    leave = "leave past_key_values out" if given else "call generate() outside of sparse()"
    raise ValueError(
        "PEFT's prefix tuning keeps its prefix in a DynamicCache of its own, which would take the place of "
        f"{type(cache).__name__}, so that nothing were sparse: {leave}, or use LoRA or prompt tuning, which work with "
        "sparse caches. (For the length of a cache: get_max_length())"
    )


def need_config(model_config: PreTrainedConfig | None, cache: str) -> None:
    """Raise for a cache of this class, without the configuration, whose model has linear-attention layers."""
    if model_config is None:
        raise ValueError(
            f"this model has linear-attention layers: make the cache with {cache}(..., model_config=model.config)"
        )


def stock_layers(model_config: PreTrainedConfig) -> list[Any]:
    """Transformers' own layers for a model."""
    stock = DynamicCache(config=model_config).layers
    # Kinds of layers may be listed that are not run: assistant_early_exit has the first ones draft by themselves.
    run = getattr(model_config.get_text_config(decoder=True), "num_hidden_layers", None)
    return stock[:run]


def why_dense(model_config: PreTrainedConfig, layers: Sequence[CacheLayerMixin]) -> str:
    """Why none of these layers of a model is made sparse."""
    if any(isinstance(layer, LinearAttentionAndFullAttentionLayer) for layer in layers):
        return (
            f"the layers of this {model_config.model_type} model that attend to their whole past hold a state "
            "of linear attention (Mamba) as well, and such layers stay transformers' own: right, but dense"
        )
    return (
        f"no layer of this {model_config.model_type} model attends to its whole past (sliding windows or "
        "linear attention only)"
    )


def once_bound(name: str) -> Callable[..., Tensor]:
    """``Cache``'s method ``name``, for layers of other kinds (linear attention), once the model is known.

    ``get_conv_state`` and ``get_recurrent_state`` are of later releases than transformers 5.17.
    """

    def method(self, *args, **kwargs) -> Tensor:
        need_config(self.model_config, type(self).__name__)
        return getattr(Cache, name)(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"As ``Cache.{name}``, for layers of other kinds (linear attention)."
    return method


class FirstAttentionLayer:
    """RecurrentGemma's own: written when a forward pass begins, which then looks into the layer of this index."""

    @untraced
    def __get__(self, cache: Any, kind: type) -> Any:
        return self if cache is None else cache._first_attention

    @untraced
    def __set__(self, cache: Any, index: int) -> None:
        need_config(cache.model_config, type(cache).__name__)
        cache._first_attention = index


# ------------------------------------------------------------------ models with an indexer


def has_indexer(config: PreTrainedConfig | None) -> bool:
    """Whether a model of this configuration may have an indexer. ``None``, an unknown configuration, has none."""
    text = config.get_text_config(decoder=True) if isinstance(config, PreTrainedConfig) else config
    return any(hasattr(text, name) for name in ("index_topk", "indexer_budget")) or in_blocks(text)


def check_options(config: SparseConfig, text_config: PreTrainedConfig) -> None:
    """Raise ValueError unless a model with an indexer is of a kind that is served, with these options."""
    model = _model(text_config)
    if text_config.model_type not in SERVED:
        raise ValueError(f"{model}: of such models {', '.join(SERVED)} are served. Leave past_key_values out")
    if chooses(config):
        raise ValueError(
            f"{model}: {config.brief()} would only lose tokens of its selection. Leave the configuration and its "
            "options out: OffloadedSparseCache(), sparse(model, offload=True), or TokenConfig() on the device"
        )


def check_exact(config: PreTrainedConfig) -> None:
    """Raise ValueError for exact mode of a model that chooses its own tokens."""
    if has_indexer(config):
        raise ValueError(f"{_model(config)}, and its steps follow it exactly: leave exact out")


def _model(text_config: PreTrainedConfig) -> str:
    return f"this {text_config.model_type} model selects tokens by itself, by a trained indexer"


def check_first(cache: Any, config: PreTrainedConfig | None) -> None:
    """Before anything is stored, by the configuration of an attention module: the model is of a kind that is served.

    The layers of a model with an indexer are of a kind of their own, others may be: the cache learns them now.
    """
    check_kind(config)
    if cache.model_config is None and config is not None and (has_indexer(config) or has_others()):
        cache.bind(config)


def prepare_model(cache: Any) -> None:
    """The first forward pass of a cache begins: have attention modules give it latents, indexers what they choose.

    Modules with latents expand before they call the cache. (Later releases than transformers 5.17: after.)

    Raises:
        ValueError: the model's attention function, in any forward pass, compiles what it is given.
    """
    check_attention(getattr(calling_model(), "config", None), cache)
    if cache._checked or not (cache.model_config is None or _served(cache.model_config)):
        return
    model = calling_model()
    if model is not None and _served(getattr(model, "config", None)):
        absorb_mla(model)
        take_pooled(model)
        for module in model.modules():
            if hasattr(module, "build_block_mask"):
                take_pieces(module)


def _served(config: PreTrainedConfig | None) -> bool:
    return isinstance(config, PreTrainedConfig) and config.get_text_config(decoder=True).model_type in SERVED


class AllPositions:
    """The positions of all columns, which Qwen4-Exp keeps with the cache (5.17), or with its first such layer."""

    @untraced
    def __get__(self, cache: Any, kind: type) -> Any:
        if cache is None:
            return self
        layer = self._layer(cache)
        if layer is None or (positions := layer.indexer_position_ids) is None:
            raise AttributeError("no positions are kept")  # as the model asks
        return positions

    @untraced
    def __set__(self, cache: Any, positions: Tensor) -> None:
        need_config(cache.model_config, type(cache).__name__)
        self._layer(cache).indexer_position_ids = positions

    def _layer(self, cache: Any) -> Any:
        return next((layer for layer in cache.layers if face(layer).kind == "indexed"), None)


def update_indexer(cache: Any, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
    """As ``Cache.update_indexer``: the indexer's keys ``[batch, n, D]`` of new columns, to all of them so far.

    Raises:
        ValueError: the model is of a kind that is not served.
    """
    if cache.model_config is None:  # of an indexer that is asked before its layer has stored anything
        check_first(cache, getattr(caller(), "config", None))
    layer: Any = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if not hasattr(layer, "update_indexer"):
        raise ValueError(
            "this model selects tokens by itself, by an indexer of a kind that sparse caches do not serve: leave "
            "past_key_values out"
        )
    return layer.update_indexer(indexer_key_states)


# ------------------------------------------------------------------ what generate() is given with a cache


class GivenToGenerate:
    """``Cache._is_user_defined``, which ``generate()`` sets on a cache that it is given, before it reads anything.

    So its input is checked there, once a call. ``generate()`` skips as many first tokens of its input as the cache
    holds. Its count may be negative: 50 tokens over 93 cached ones leave the last 7. A forward pass could tell only by
    its mask. From transformers 5.18 on a mask of ones is dropped before that.
    """

    def __get__(self, cache: Any, kind: type) -> Any:
        return self if cache is None else cache.__dict__.get("_given", False)

    def __set__(self, cache: Any, given: bool) -> None:
        call = _call_over(cache)
        if call is not None:
            check_input(cache, call)
        cache._given = given


def _call_over(cache: Any) -> Mapping[str, Any] | None:
    """The local variables of the ``generate()`` that is given ``cache``; None if there is none.

    (Their names are those of transformers 5.17 to 5.24. If a later release renamed them, tests would fail.)
    """
    frame = sys._getframe(2).f_back
    while frame is not None:
        if frame.f_code.co_name == "generate":
            there = frame.f_locals
            given = there.get("model_kwargs")
            if isinstance(given, dict) and given_cache(given) is cache and _READ.issubset(there):
                return there
        frame = frame.f_back
    return None


def _virtual_tokens(model: Any) -> int:
    """Tokens that PEFT's prompt tuning puts before the input of ``model``, whose inputs it prepares meanwhile."""
    wrapper = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", None)
    return getattr(getattr(wrapper, "active_peft_config", None), "num_virtual_tokens", None) or 0


def check_input(cache: Any, call: Mapping[str, Any]) -> None:
    """Raise unless a ``generate()`` over ``cache``, with these local variables, reads what is new in its input.

    Raises:
        ValueError: the input has no new tokens, or its mask has too few columns. Or transformers would read the whole
            of it again: with drafts; in chunks, up to 5.20. Or PEFT has put virtual tokens before the first input.
        RuntimeError: an earlier error left the cache incomplete.
    """
    if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return  # nothing is cached, or only states of linear attention, which have no length
    for layer in cache.sparse_layers:
        layer._check_complete()
    check_complete(cache.layers)
    cache.linear_passes.check(0, cache.layers, cache.model_config)
    held = int(cache.get_seq_length())
    if not held:
        return
    if virtual := _virtual_tokens(call["self"]):
        raise ValueError(
            f"this cache holds {held} tokens, {virtual} of them virtual tokens of PEFT's prompt tuning, which "
            "generate() would count as tokens of its input: call cache.reset() or make a new cache for each turn"
        )
    given, config = call["model_kwargs"], call["generation_config"]
    mask = given.get("attention_mask")
    embeds = None if config.is_assistant else given.get("inputs_embeds")
    tokens = (call["input_ids"] if embeds is None else embeds).shape[1]
    columns = getattr(config, "_mask_length", None) if mask is None else mask.shape[-1]
    # The whole text so far, or only what is new of it, with a longer mask.
    new = tokens - held if embeds is not None or columns == tokens else tokens
    if new <= 0:
        raise ValueError(
            f"the input has {tokens} tokens, but no new tokens: this cache holds {held} tokens, and generate() takes "
            "that many first tokens of its input for those" + SECOND_PROMPT
        )
    if columns is not None:
        check_columns(columns, held, new)
    if call["generation_mode"] == GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"this cache holds {held} tokens, and transformers' loop for prompt lookup and assistants would read the "
            "whole input again" + _ANEW.format(option="the drafts")
        )
    if config.prefill_chunk_size is not None and not _CHUNKS_GO_ON:
        raise ValueError(
            f"this cache holds {held} tokens, and chunks begin with the input's first token up to transformers 5.20"
            + _ANEW.format(option="prefill_chunk_size")
        )
