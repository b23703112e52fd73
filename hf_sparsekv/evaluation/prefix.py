"""One prefill, many caches: compare configurations without paying for the prompt each time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..attention.mla import Absorbed, is_mla
from ..attention.tap import QueryTap
from ..cache import SparseCache
from ..cache_name import over

_RECORDER = "sparsekv_recorder"
T = TypeVar("T")


@dataclass
class Prefix:
    """A prefilled batch of prompts.

    Args:
        ids: ``[batch, n]`` token ids.
        queries: per layer, ``[batch, Hq, n, D]``; empty if every cache prefills on its own.
        cache: the keys and values (or latents) of full attention; ``None`` if every cache prefills on its own.
        logits: ``[batch, vocab]`` of the last token; ``None`` like ``cache``.
        mask: bool ``[batch, n]``, False for (left) padding; ``None`` if there is none.
    """

    ids: Tensor
    queries: list[Tensor]
    cache: DynamicCache | None
    logits: Tensor | None
    mask: Tensor | None = None

    def fill(self, cache: SparseCache, model) -> SparseCache:
        """Put the prompt into an empty sparse cache, as a prefill through ``model`` would."""
        if cache.model_config is None:
            cache.bind(model.config)
        latents = latent_modules(model)
        for layer, query, stock in zip(cache.sparse_layers, self.queries, self.cache.layers):
            absorbed = Absorbed(latents[layer.index]) if latents else None
            if absorbed is not None:
                absorbed.refresh(stock.keys)
            layer.fill(query, stock.keys, stock.values, self.mask, absorbed)
        return cache

    def full(self) -> DynamicCache:
        """A copy of the full-attention cache to decode with."""
        new = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            new.update(layer.keys, layer.values, index)
        return new

    def cut(self, length: int) -> Prefix:
        """The first ``length`` columns. What follows them must be fed: there are no logits after the last one."""
        mask = None if self.mask is None else self.mask[:, :length]
        if self.cache is None:
            return Prefix(self.ids[:, :length], [], None, None, mask)
        short = DynamicCache()
        for layer in map(copy, self.cache.layers):  # views: caches are filled from it, nothing is added to it
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
            short.layers.append(layer)
        return Prefix(self.ids[:, :length], [q[:, :, :length] for q in self.queries], short, None, mask)

    @torch.no_grad()
    def start(self, model, cache: SparseCache | None) -> tuple[Cache, Tensor]:
        """A cache that holds the prompt, and the logits ``[batch, vocab]`` after it.

        Args:
            cache: an empty cache of ours; ``None`` for full attention.
        """
        if self.cache is not None:
            return (self.full() if cache is None else self.fill(cache, model)), self.logits
        name = full_attention(model) if cache is None else "sparsekv"
        cache = DynamicCache(config=model.config) if cache is None else cache
        with attention(model, name):
            logits = model(
                self.ids,
                **over(model, cache),
                use_cache=True,
                logits_to_keep=1,
                **self.inputs(0, self.ids.shape[1]),
            ).logits[:, -1]
        return cache, logits

    def inputs(self, start: int, end: int) -> dict[str, Tensor]:
        """Mask and positions of columns ``start .. end - 1``, which a padded batch needs."""
        if self.mask is None:
            return {}
        more = end - self.mask.shape[1]
        mask = F.pad(self.mask, (0, more), value=True) if more > 0 else self.mask[:, :end]
        position = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return {"attention_mask": mask.long(), "position_ids": position[:, start:end]}


def can_share(model) -> bool:
    """One prefill can fill every cache: all layers attend to their whole past and cache keys and values, or latents."""
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=model.config).layers
    if getattr(config, "kv_lora_rank", None) is not None and len(latent_modules(model)) != len(layers):
        return False
    return all(type(layer) is DynamicLayer for layer in layers)


def latent_modules(model) -> dict[int, torch.nn.Module]:
    """The attention modules that cache latents, by their layer."""
    return {module.layer_idx: module for module in model.modules() if is_mla(module)}


def full_attention(model) -> str:
    """The implementation of attention to compare with: sdpa, or eager for models that have no sdpa version."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


@torch.no_grad()
def prefill(model, ids: Tensor, chunk: int | None = None, mask: Tensor | None = None) -> Prefix:
    """Run full attention over ``ids [batch, n]`` and keep what caches are filled from.

    Models with layers that cannot be filled (sliding windows) are prefilled anew for each cache.

    Args:
        chunk: tokens of one forward pass; ``None``: 1024 on a CPU, all on a GPU.
        mask: ``[batch, n]``, 0 for left padding.
    """
    if mask is not None:
        mask = mask.bool()
        mask = None if bool(mask.all()) else mask
    if not can_share(model):
        return Prefix(ids, [], None, None, mask)
    seen: dict[int, list[Tensor]] = {}

    def record(module, query, key, value, attention_mask, **kwargs):
        seen.setdefault(module.layer_idx, []).append(query)
        wide = value.shape[3]
        if ids.device.type == "cpu" and wide < query.shape[3]:  # torch has no fused kernel for values of another width
            value = F.pad(value, (0, query.shape[3] - wide))
        out, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return out[..., :wide], weights

    AttentionInterface.register(_RECORDER, record)
    AttentionMaskInterface.register(_RECORDER, sdpa_mask)
    cache = DynamicCache()
    prefix = Prefix(ids, [], cache, None, mask)
    start, chunk = 0, chunk or (1024 if ids.device.type == "cpu" else ids.shape[1])
    with attention(model, _RECORDER):
        for part in ids.split(chunk, dim=1):
            end = start + part.shape[1]
            more = prefix.inputs(start, end)
            logits = model(part, **over(model, cache), use_cache=True, logits_to_keep=1, **more).logits[:, -1]
            start = end
    prefix.queries = [torch.cat(seen.pop(index), dim=2) for index in sorted(seen)]
    prefix.logits = logits
    return prefix


def predicting(evaluate: Callable[..., T]) -> Callable[..., T]:
    """While ``evaluate(model, ...)`` runs, predictive caches get the queries that captured steps give them."""

    @functools.wraps(evaluate)
    def wrapped(model, *args, **kwargs) -> T:
        with QueryTap(model):
            return evaluate(model, *args, **kwargs)

    return wrapped


@contextmanager
def attention(model, name: str):
    """Run ``model`` under another attention implementation."""
    before = model.config._attn_implementation
    if before == name:
        yield model
        return
    model.set_attn_implementation(name)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


def _implementation(model, cache) -> str:
    return "sparsekv" if isinstance(cache, SparseCache) else full_attention(model)


@torch.no_grad()
def greedy_rows(
    model, prefix: Prefix, cache: Cache, logits: Tensor, max_new_tokens: int, eos: set[int]
) -> list[list[int]]:
    """Continue a prefilled batch greedily, each row up to a token of ``eos``.

    Args:
        cache, logits: what :meth:`Prefix.start` returned.
    """
    batch, length = prefix.ids.shape
    rows: list[list[int]] = [[] for _ in range(batch)]
    going = set(range(batch))
    with attention(model, _implementation(model, cache)):
        for step in range(max_new_tokens):
            tokens = logits.argmax(-1)
            for row, token in enumerate(tokens.tolist()):
                if row in going and token in eos:
                    going.discard(row)
                elif row in going:
                    rows[row].append(token)
            if not going or step == max_new_tokens - 1:
                break
            end = length + step + 1
            more = prefix.inputs(end - 1, end)
            logits = model(tokens[:, None], **over(model, cache), use_cache=True, **more).logits[:, -1]
    return rows


@torch.no_grad()
def forced_steps(model, cache: Cache, ids: Tensor, prefix: Prefix | None = None) -> Iterator[Tensor]:
    """Feed ``ids [batch, n]`` one column at a time; yields float32 logits ``[batch, vocab]`` after each.

    Args:
        prefix: what the cache was filled from; needed for padded batches only.
    """
    name = _implementation(model, cache)
    for i in range(ids.shape[1]):
        more = {} if prefix is None else prefix.inputs(prefix.ids.shape[1] + i, prefix.ids.shape[1] + i + 1)
        with attention(model, name):
            logits = model(ids[:, i : i + 1], **over(model, cache), use_cache=True, **more).logits[:, -1]
        yield logits.float()
