"""The layers of a cache: those of a model's configuration."""

from __future__ import annotations

import warnings

from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicIndexedLayer

from .layers import indexed, recurrent, sliding  # noqa: F401  # the kinds of layers that there are
from .layers.cache_state import CacheState
from .layers.kinds import made_layers
from .layers.sparse_layer import SparseLayer
from .policies.indexed import in_blocks
from .predictor.channels import check_config
from .transformers_compat import check_kind, check_options, stock_layers, why_dense


def layers_of(cache: CacheState, model_config: PreTrainedConfig) -> list[CacheLayerMixin]:
    """The layers of ``cache`` for a model: see :meth:`..SparseCache.bind`."""
    check_config(model_config)
    check_kind(model_config)
    text = model_config.get_text_config(decoder=True)
    cache.shared.check_model(text)
    stock = stock_layers(model_config)
    if in_blocks(text) or any(isinstance(layer, DynamicIndexedLayer) for layer in stock):
        check_options(cache.config, text)
    layers = made_layers(cache, text, stock)
    if not any(isinstance(layer, SparseLayer) for layer in layers):
        why = why_dense(model_config, layers)
        warnings.warn(f"{why}: {type(cache).__name__} has nothing to make sparse", stacklevel=5)
    return layers


def add_layers(cache: CacheState, layer_idx: int) -> None:
    """Make layers of ours up to this one. Raises ValueError if the model's are known, which ends before it."""
    if cache.model_config is not None:
        raise ValueError(
            f"this cache was made for a model of {len(cache.layers)} layers, got layer {layer_idx}: it belongs to "
            "another model, use a new one"
        )
    while len(cache.layers) <= layer_idx:
        cache.layers.append(SparseLayer.at(cache, len(cache.layers)))
