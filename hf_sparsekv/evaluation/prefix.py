"""One prefill, many caches: compare configurations without paying for the prompt each time."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..cache import SparseCache

_RECORDER = "sparsekv_recorder"


@dataclass
class Prefix:
    """A prefilled prompt.

    Args:
        ids: ``[1, n]`` token ids.
        queries: per layer, ``[1, Hq, n, D]``.
        cache: the keys and values of full attention.
        logits: ``[1, vocab]`` of the last token.
    """

    ids: Tensor
    queries: list[Tensor]
    cache: DynamicCache
    logits: Tensor

    def fill(self, cache: SparseCache, model) -> SparseCache:
        """Put the prompt into an empty sparse cache, as a prefill through ``model`` would."""
        if cache.model_config is None:
            cache.bind(model.config)
        for layer, query, stock in zip(cache.sparse_layers, self.queries, self.cache.layers):
            layer.fill(query, stock.keys, stock.values)
        return cache

    def full(self) -> DynamicCache:
        """A copy of the full-attention cache to decode with."""
        new = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            new.update(layer.keys, layer.values, index)
        return new


@torch.no_grad()
def prefill(model, ids: Tensor, chunk: int = 1024) -> Prefix:
    """Run full attention over ``ids [1, n]`` and keep what caches are filled from.

    For models whose layers all attend to their whole past.
    """
    seen: dict[int, list[Tensor]] = {}

    def record(module, query, key, value, attention_mask, **kwargs):
        seen.setdefault(module.layer_idx, []).append(query)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(_RECORDER, record)
    AttentionMaskInterface.register(_RECORDER, sdpa_mask)
    cache = DynamicCache()
    with attention(model, _RECORDER):
        for part in ids.split(chunk, dim=1):
            logits = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    queries = [torch.cat(seen[index], dim=2) for index in sorted(seen)]
    return Prefix(ids, queries, cache, logits)


@contextmanager
def attention(model, name: str):
    """Run ``model`` under another attention implementation."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def greedy(model, prefix: Prefix, cache, max_new_tokens: int, eos: set[int]) -> list[int]:
    """Continue a prefilled prompt greedily."""
    out: list[int] = []
    logits = prefix.logits
    name = "sparsekv" if isinstance(cache, SparseCache) else "sdpa"
    with attention(model, name):
        for _ in range(max_new_tokens):
            token = int(logits.argmax(-1))
            if token in eos:
                break
            out.append(token)
            logits = model(torch.tensor([[token]], device=model.device), past_key_values=cache).logits[:, -1]
    return out


@torch.no_grad()
def forced_logits(model, cache, ids: Tensor) -> Tensor:
    """Logits ``[n, vocab]`` of feeding ``ids [1, n]`` one at a time, float32."""
    name = "sparsekv" if isinstance(cache, SparseCache) else "sdpa"
    with attention(model, name):
        rows = [model(ids[:, i : i + 1], past_key_values=cache).logits[0, -1].float() for i in range(ids.shape[1])]
    return torch.stack(rows)
