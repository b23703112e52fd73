"""Label channels of a model, ranked on the user's text (``hf-sparsekv calibrate``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_sparsekv_config.tokens import TokenConfig

from ..cache_name import over
from ..cache_variants import OffloadedSparseCache
from ..layers.sparse_layer import SparseLayer
from ..predictor.channels import ChannelStats, LabelChannels, describe
from .serving_plan import CHUNK


@torch.no_grad()
def calibrate(model, inputs: Iterable[Tensor]) -> LabelChannels:
    """Rank the key channels of every full-attention layer on calibration text.

    Args:
        model: a causal language model; its attention implementation is ``sparsekv`` during the call.
        inputs: token ids, each ``[1, n]``.

    Raises:
        ValueError: there is no input, or the model has no full-attention layer.
    """
    config = model.config.get_text_config(decoder=True)
    before = model.config._attn_implementation
    model.set_attn_implementation("sparsekv")
    held: dict[int, ChannelStats] = {}
    try:
        for ids in inputs:
            # Channels are never fixed, so every chunk is observed.
            never = TokenConfig(calibration_tokens=1 << 60, dense_layers=0)
            cache = OffloadedSparseCache(never, offload=None, model_config=model.config)
            for part in ids.to(model.device).tensor_split(-(-ids.shape[1] // CHUNK), dim=1):
                model(part, **over(model, cache), use_cache=True, logits_to_keep=1)
            for index, layer in enumerate(cache.layers):
                if isinstance(layer, SparseLayer):
                    labels = layer.policy.labels
                    assert labels is not None
                    stats = labels.stats
                    if index in held:
                        held[index].merge(stats)
                    else:
                        held[index] = stats
    finally:
        model.set_attn_implementation(before)
    if not held:
        raise ValueError("nothing to calibrate: no input was given, or the model has no full-attention layer")
    first = next(iter(held.values()))
    heads, dim = first.moments.centre.shape[1:]
    ranking = torch.full((config.num_hidden_layers, heads, dim), -1, dtype=torch.int32)
    norms = torch.tensor([[0.0], [1.0]]).repeat(config.num_hidden_layers, heads, 1, dim)
    for index, stats in held.items():
        ranking[index], norms[index] = stats.ranking()[0].cpu(), stats.norms()[0].cpu()
    return LabelChannels(ranking, describe(config), model.config._name_or_path, first.tokens, norms)
