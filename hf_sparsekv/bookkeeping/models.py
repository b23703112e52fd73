"""Which models a sparse cache serves, and which layers transformers gives their caches.

Apart from the cache because it says something of models only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionAndFullAttentionLayer

from ..untraced import untraced


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

    Before anything is stored: the cache is as it was. Other functions get real tensors, and a warning says so.
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
