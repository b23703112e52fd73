"""Prompts that are read for a batch, each into a cache of its own, until they join or are dropped.

Rows decode meanwhile.
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from ..attention.rotary import unfixed
from ..cache_name import over
from ..layers.cache_state import CacheState
from .model import no_positions, positions
from .prefilled import Prefilled


class Prompts:
    """The prompts of a batch of rows of up to ``max_length`` tokens."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._made: list[CacheState] = []  # prefilled, and not joined yet
        self._model: weakref.ref[nn.Module] | None = None  # the one that was looked at

    def check(self, model: nn.Module, input_ids: Tensor) -> None:
        """Raise ValueError if the model does not support continuous batching, or the prompt does not fit a row."""
        if self._model is None or self._model() is not model:
            if (why := no_positions(model) or unfixed(model, self.max_length)) is not None:
                raise ValueError(f"rows of {type(model).__name__} cannot share a batch: {why}")
            self._model = weakref.ref(model)
        if input_ids.ndim != 2 or len(input_ids) != 1:
            raise ValueError(f"input_ids must be one row [1, n], got {list(input_ids.shape)}: prefill row by row")
        n = input_ids.shape[1]
        if not 0 < n <= self.max_length:
            raise ValueError(f"a prompt of {n} tokens does not fit rows of 1 to {self.max_length}")

    def add(self, cache: CacheState) -> None:
        """A prompt has been read: it may join."""
        self._made.append(cache)

    def read(self, prefilled: Prefilled | CacheState, wanted: str) -> CacheState:
        """The cache of a prompt that has been read and has not joined, for method ``wanted``."""
        cache = prefilled.cache if isinstance(prefilled, Prefilled) else prefilled
        if not any(cache is made for made in self._made):
            raise ValueError(f"{wanted}() takes what prefill() of these rows gave, once: other caches have other pools")
        return cache

    def end(self, cache: CacheState, why: str) -> None:
        """A prompt's cache is over: its blocks are free."""
        self._made = [made for made in self._made if made is not cache]
        cache.row_table.clear()
        for layer in cache.sparse_layers:
            layer.broken = why


def read_prompt(model: nn.Module, cache: CacheState, input_ids: Tensor, chunk: int | None) -> Tensor:
    """Read a prompt ``[1, n]`` into an empty cache, ``chunk`` tokens a pass; gives the logits of its last pass."""
    at, n = 0, input_ids.shape[1]
    for part in input_ids.tensor_split([*range(chunk or n, n - 1, chunk or n)], dim=1):
        where = positions(at, at := at + part.shape[1], part.device)
        logits = model(
            input_ids=part, position_ids=where, **over(model, cache), use_cache=True, logits_to_keep=1
        ).logits
    return logits
