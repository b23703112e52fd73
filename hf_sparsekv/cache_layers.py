"""The layers of a cache: our own, those of a model's configuration, and rings in place of sliding ones."""

from __future__ import annotations

import warnings

from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from .layers.cache_state import CacheState
from .layers.indexed import Borrower, IndexedLayer
from .layers.sliding import SlidingRing
from .layers.sparse_layer import SparseLayer
from .policies.watch import BlockWatch
from .predictor.channels import check_config
from .transformers_compat import check_kind, check_options, chosen_tokens, in_blocks, stock_layers, why_dense


def own_layer(cache: CacheState, index: int, topk: int | None = None, dense: bool = False) -> SparseLayer:
    """Layer ``index`` if it is ours, else a new one; of a model whose indexer chooses ``topk`` tokens.

    ``dense``: it attends to everything.
    """
    known = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(known, SparseLayer):
        return known
    layer = SparseLayer(cache, index) if topk is None else IndexedLayer(cache, index, topk)
    if dense:
        layer.policy = cache.shared.dense(index)
    if cache.joins and layer.policy.labels is not None:
        # Rows may share blocks, labels included: channels may depend on nothing but the tokens that they share.
        layer.policy.labels.first_only = True
    if cache.watched:
        layer.policy.watch = BlockWatch()
    return layer


def layers_of(cache: CacheState, model_config: PreTrainedConfig) -> list[CacheLayerMixin]:
    """The layers of ``cache`` for a model: see :meth:`..SparseCache.bind`."""
    check_config(model_config)
    check_kind(model_config)
    text = model_config.get_text_config(decoder=True)
    cache.shared.check_model(text)
    stock = stock_layers(model_config)
    if indexed := in_blocks(text) or any(isinstance(layer, DynamicIndexedLayer) for layer in stock):
        check_options(cache.config, text)
    sources = getattr(text, "kv_source_layers", range(len(stock)))  # whose latents a layer attends to
    for index, layer in enumerate(stock):
        if isinstance(layer, DynamicIndexedLayer) and (source := sources[index]) != index:
            before = [other for other in stock[:index] if isinstance(other, Borrower)]
            place = 1 + sum(other.source is stock[source] for other in before)
            stock[source].policy.indexers = place + 1
            stock[index] = Borrower(stock[source], place)
        elif isinstance(layer, DynamicIndexedLayer):
            stock[index] = own_layer(cache, index, chosen_tokens(text))
            stock[index].asked_first = not hasattr(text, "index_topk")
        elif hasattr(layer, "update_index"):
            stock[index] = own_layer(cache, index, chosen_tokens(text))
            stock[index].size = text.index_block_size
        elif type(layer) is DynamicLayer:
            stock[index] = own_layer(cache, index, dense=indexed)
        elif cache.record_past and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    if not any(isinstance(layer, SparseLayer) for layer in stock):
        why = why_dense(model_config, stock)
        warnings.warn(f"{why}: {type(cache).__name__} has nothing to make sparse", stacklevel=5)
    return stock


def add_layers(cache: CacheState, layer_idx: int) -> None:
    """Make layers of ours up to this one. Raises ValueError if the model's are known, which ends before it."""
    if cache.model_config is not None:
        raise ValueError(
            f"this cache was made for a model of {len(cache.layers)} layers, got layer {layer_idx}: it belongs to "
            "another model, use a new one"
        )
    while len(cache.layers) <= layer_idx:
        cache.layers.append(own_layer(cache, len(cache.layers)))


def use_rings(cache: CacheState) -> None:
    """Replace filled sliding layers of transformers' own by ones that a captured step can use."""
    assert cache.model_config is not None
    kinds = getattr(cache.model_config.get_text_config(decoder=True), "layer_types", None) or ()
    for index, layer in enumerate(cache.layers):
        if index < len(kinds) and kinds[index] == "chunked_attention":
            continue  # transformers keeps chunks in the same class: each starts empty, and is no window
        if type(layer) is DynamicSlidingWindowLayer and layer.is_initialized and not layer.record_past:
            cache.layers[index] = SlidingRing(layer, cache, index)
