"""Models that choose their tokens by themselves, by a trained indexer (DeepSeek Sparse Attention): which are served.

Apart from other models, because their layers need more of a cache, and less of a method.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from hf_sparsekv_config.sparse import SparseConfig

from ..attention.indexer import take_pieces
from ..attention.mla import absorb_mla, caller, calling_model, passes_on
from ..attention.pooled_indexer import take_pooled
from ..layers.indexed import IndexedLayer
from ..policies.indexed import chooses
from ..untraced import untraced
from .models import check_attention, check_kind, need_config

passes_on(__name__)

# Their attention modules give the attention function the indices, and nothing but their own latents.
LATENT = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4", "mistral_large4_text")
SERVED = (*LATENT, "minimax_m3_vl_text", "qwen4_exp_text")


def has_indexer(config: PreTrainedConfig | None) -> bool:
    """Whether a model of this configuration may have an indexer. ``None``, an unknown configuration, has none."""
    text = config.get_text_config(decoder=True) if isinstance(config, PreTrainedConfig) else config
    return any(hasattr(text, name) for name in ("index_topk", "indexer_budget")) or in_blocks(text)


def in_blocks(text_config: Any) -> bool:
    """Whether KV heads choose blocks of tokens, each by itself (MiniMax M3), in some layers."""
    return "minimax_m3_sparse" in (getattr(text_config, "layer_types", None) or ())


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
    """Raise ValueError for exact mode of a model that chooses tokens by itself."""
    if has_indexer(config):
        raise ValueError(f"{_model(config)}, and its steps follow it exactly: leave exact out")


def _model(text_config: PreTrainedConfig) -> str:
    return f"this {text_config.model_type} model selects tokens by itself, by a trained indexer"


def check_first(cache: Any, config: PreTrainedConfig | None) -> None:
    """Before anything is stored, by the configuration of an attention module: the model is of a kind that is served.

    The layers of a model with an indexer are of a kind of their own: the cache learns them now.
    """
    check_kind(config)
    if cache.model_config is None and has_indexer(config):
        cache.bind(config)


def chosen_tokens(text_config: Any) -> int:
    """Tokens that an indexer of such a model chooses for a query, at most."""
    if hasattr(text_config, "index_topk"):
        return text_config.index_topk
    if in_blocks(text_config):
        return text_config.index_topk_blocks * text_config.index_block_size
    return text_config.indexer_budget + text_config.indexer_compress_ratio - 1  # and what makes no whole block


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
        return next((layer for layer in cache.layers if isinstance(layer, IndexedLayer)), None)


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
