"""Runs the kernels of sparse prompts before the first request, which would wait for a compiler.

It imitates prompts of all lengths with one KV head and a tile of queries, over tensors of its own. No cache,
calibration or count sees these prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..attention.mla import Absorbed, is_mla
from ..attention.sparse_prompt import LAST, PromptAudit, queries_at_once, sparse_attention
from ..cache import SparseCache
from ..layers.sparse_prompt import too_precise
from ..ops._dispatch import use_triton
from ..ops._prompts import BLOCK, LONG, TILE, blocks_of, step_of
from ..types import AttentionParams


@torch.no_grad()
def compile_sparse_prompts(model: PreTrainedModel, cache: SparseCache, chunk: int, longest: int) -> None:
    """Run what sparse prompts of up to ``longest`` tokens launch, read in pieces of up to ``chunk``.

    ``cache``: one that has read a prompt, so that its layers have memory.
    """
    mass = cache.config.prefill
    if mass is None or not use_triton(torch.empty(0, device=model.device)):
        return
    heads = max(layer.q_heads for layer in cache.sparse_layers)
    for group, dk, dv, dtype, softcap, has_sinks in sorted(shapes(model, cache), key=str):
        for columns, step in sizes(cache.config.prefill_below, longest, chunk, heads):
            # As projections lie.
            query = torch.zeros(1, TILE, group, dk, dtype=dtype, device=model.device).transpose(1, 2)
            if too_precise(query):
                break
            key, value = (
                torch.zeros(1, columns, 1, dim, dtype=dtype, device=model.device).transpose(1, 2) for dim in (dk, dv)
            )
            params = AttentionParams(1.0, softcap, key.new_zeros(group) if has_sinks else None)
            sparse_attention(query, key, value, params, mass, PromptAudit(), step=step)


class Shape(NamedTuple):
    """A prompt's attention: query heads of a KV head, channels of keys and of values, and what differs otherwise."""

    group: int
    dk: int
    dv: int
    dtype: torch.dtype
    softcap: float | None = None
    has_sinks: bool = False


def shapes(model: torch.nn.Module, cache: SparseCache) -> set[Shape]:
    """Those of the layers of a cache that has read a prompt."""
    absorbed: list[Any] = [Absorbed(module) for module in model.modules() if is_mla(module)]
    found: set[Shape] = set()
    for layer in cache.sparse_layers:
        store, params = layer.store, layer.policy.params
        more = (None, False) if params is None else (params.softcap, params.sink_logits is not None)
        if store.latent:  # a prompt attends to expanded keys, each head to its own
            found |= {Shape(1, one.nope + one.rope, one.value, store.dtype, *more) for one in absorbed}
        else:
            sizes = layer.q_heads // store.heads, store.split, store.width - store.split
            found.add(Shape(*sizes, store.dtype, *more))
    return found


def sizes(least: int, longest: int, chunk: int, heads: int) -> Iterator[tuple[int, int]]:
    """Columns and steps of pieces, one for each kernel that there is for pieces of any length.

    Blocks are counted in powers of two, and of long prompts fewer queries are exact.

    Args:
        least: columns of the shortest sparse prompt.
        longest: of the longest one.
        chunk: most new tokens of a piece.
        heads: query heads of a layer.
    """
    least = max(least, LAST + 1)
    for first, last in ((least, min(longest, LONG - 1)), (max(least, LONG), longest)):
        if first > last:
            continue
        new = min(chunk, first)  # a part of them chooses at a time, and sees no later columns
        end = first - new + min(new, queries_at_once(heads, new, last))
        columns = BLOCK << (blocks_of(end) - 1).bit_length()
        while columns < 2 * last:
            yield min(columns, last), step_of(last)
            columns *= 2
