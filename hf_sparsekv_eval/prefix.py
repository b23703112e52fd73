"""One prefill, many caches: compare configurations without paying for the prompt each time.

A pass over prompts has at most :data:`PASS` tokens of all rows, which bounds activations and masks. Results do not
depend on it, because label channels are computed from the whole prompt. There is an exception. Caches of models with
sliding or linear layers, and caches whose prompts are sparse, read prompts on their own. Longer than a pass, they
compute channels from the first one, as ``generate(prefill_chunk_size=...)`` does.
"""

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
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.masks import sparsekv_mask
from hf_sparsekv.attention.mla import Absorbed, is_mla
from hf_sparsekv.attention.tap import QueryTap
from hf_sparsekv.cache import SparseCache
from hf_sparsekv.cache_name import over
from hf_sparsekv.offload.host_limit import DEFAULT_SHARE, host_memory_limit
from hf_sparsekv.types import AttentionParams

PASS = 32_768  # tokens of all rows in one forward pass: 3 GB in an MLP of 14,336 channels, bfloat16
_LEAST = 64  # columns of a pass: fewer would be drafts for a sparse cache
_ON_CPU = 1024  # columns of a pass that fills all caches, on a CPU
_MASK_BYTES = 4 << 30  # most bytes of masks or scores in one pass of transformers' own attention
_RECORDER = "sparsekv_recorder"
T = TypeVar("T")


@dataclass
class Prefix:
    """A prefilled batch of prompts.

    Args:
        ids: ``[batch, n]`` token ids.
        queries: per layer, ``[batch, Hq, n, D]``, in host memory if they are much of the GPU's; empty if every cache
            prefills on its own.
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
            layer.fill(query.to(stock.keys.device), stock.keys, stock.values, self.mask, absorbed)
        return cache

    def full(self) -> DynamicCache:
        """A copy of the full-attention cache to decode with."""
        new = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            new.update(layer.keys, layer.values, index)
        return new

    def cut(self, length: int) -> Prefix:
        """The first ``length`` columns. The next tokens must be fed, because there are no logits after the last one."""
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
            cache: an empty cache of ours, which reads the prompt itself if that is to be sparse; ``None`` for full
                attention.
        """
        if self.cache is not None and (cache is None or cache.config.prefill is None):
            return (self.full() if cache is None else self.fill(cache, model)), self.logits
        name = full_attention(model) if cache is None else "sparsekv"
        cache = DynamicCache(config=model.config) if cache is None else cache
        with attention(model, name):
            return cache, self.read(model, cache, pass_columns(model, self, name))

    def read(self, model, cache: Cache, columns: int, begin: Callable[[int], None] = lambda start: None) -> Tensor:
        """Run ``model`` over the prompt in passes of at most so many columns; the last logits ``[batch, vocab]``.

        ``begin`` is called with the first column of each pass.
        """
        start, n = 0, self.ids.shape[1]
        for part in self.ids.tensor_split(-(-n // columns), dim=1):  # equal sizes: one last column would be a step
            end = start + part.shape[1]
            begin(start)
            more = self.inputs(start, end)
            logits = model(part, **over(model, cache), use_cache=True, logits_to_keep=1, **more).logits[:, -1]
            start = end
        return logits

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


def pass_columns(model, prefix: Prefix, name: str) -> int:
    """Columns of a forward pass over a prompt, with the attention implementation ``name``."""
    rows, n = prefix.ids.shape
    most = PASS // rows
    # Transformers' own attention makes a mask (and its copy in the queries' dtype), or the scores of all heads.
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    pair = {"sdpa": 3, "eager": 8 * heads}.get(name, 0)
    if pair:
        most = min(most, _MASK_BYTES // (pair * rows * n))
    if prefix.mask is not None and not all(
        isinstance(layer, DynamicLayer | DynamicSlidingWindowLayer)
        for layer in DynamicCache(config=model.config).layers
    ):
        # Linear attention looks at the padding of the first pass alone.
        most = max(most, 1 + int((~prefix.mask).sum(-1).max()))
    return max(most, _LEAST)


@torch.no_grad()
def prefill(model, ids: Tensor, chunk: int | None = None, mask: Tensor | None = None) -> Prefix:
    """Run full attention over ``ids [batch, n]`` and keep the tensors that caches are filled from.

    Models with layers that cannot be filled (sliding windows) are prefilled for each cache instead.

    Args:
        chunk: columns of one forward pass; ``None``: :data:`PASS` tokens of all rows, on a CPU at most 1024 columns.
        mask: ``[batch, n]``, 0 for left padding.

    Raises:
        MemoryError: the queries of these prompts, which caches are filled with, do not fit into memory.
    """
    if mask is not None:
        mask = mask.bool()
        mask = None if bool(mask.all()) else mask
    if not can_share(model):
        return Prefix(ids, [], None, None, mask)
    (rows, n), layers = ids.shape, len(DynamicCache(config=model.config).layers)
    queries: dict[int, Tensor] = {}
    begun = place = None

    def begin(start: int) -> None:
        nonlocal begun
        begun = start

    def record(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, **_):
        nonlocal place
        if module.layer_idx not in queries:
            shape = (rows, query.shape[1], n, query.shape[3])
            if place is None:
                place = _place(query, layers * query.shape[1] * query.shape[3] * query.itemsize * rows * n)
            queries[module.layer_idx] = query.new_empty(shape, device="cpu" if place == "host" else query.device)
        queries[module.layer_idx][:, :, begun : begun + query.shape[2]] = query
        wide = value.shape[3]
        if ids.device.type == "cpu" and wide < query.shape[3]:  # torch has no fused kernel for values of another width
            value = F.pad(value, (0, query.shape[3] - wide))
        params = AttentionParams(query.shape[3] ** -0.5 if scaling is None else scaling, softcap, s_aux)
        # A mask of the columns is made for later passes of unpadded prompts, too: without it kernels are faster.
        columns = None if mask is None else attention_mask
        if attention_mask is not None and attention_mask.ndim != 2:
            out = exact_attention(query, key, value, params, mask=attention_mask, dropout=dropout)
        else:
            out = exact_attention(query, key, value, params, columns=columns, dropout=dropout)
        return out[..., :wide].transpose(1, 2).contiguous(), None

    AttentionInterface.register(_RECORDER, record)
    AttentionMaskInterface.register(_RECORDER, sparsekv_mask)
    prefix = Prefix(ids, [], DynamicCache(), None, mask)
    if chunk is None:
        chunk = pass_columns(model, prefix, _RECORDER)
        chunk = min(chunk, _ON_CPU) if ids.device.type == "cpu" else chunk
    with attention(model, _RECORDER):
        prefix.logits = prefix.read(model, prefix.cache, chunk, begin)
    prefix.queries = [queries[index] for index in sorted(queries)]
    return prefix


def _place(query: Tensor, need: int) -> str:
    """Where ``need`` bytes of queries are kept until caches have been filled with them: "device" or "host".

    Grouped queries are several times as large as keys and values: they leave the GPU's memory to these.
    """
    if query.is_cuda and need <= torch.cuda.mem_get_info(query.device)[0] // 4:
        return "device"
    if need > (most := int(DEFAULT_SHARE * host_memory_limit())):
        raise MemoryError(
            f"the queries of {query.shape[0]} prompts take {need / 2**30:.1f} GiB, {most / 2**30:.1f} GiB of host "
            "memory may be used: take a smaller --batch, or shorter --lengths"
        )
    return "host" if query.is_cuda else "device"


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
