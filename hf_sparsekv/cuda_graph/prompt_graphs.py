"""Graphs of short prompts, and of short pieces of a text after cached tokens: memory that they read and write.

:mod:`.prompts` decides which passes get one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache_name import over, without_cache
from ..kv.pool import BlockPool
from ..layers.cache_state import CacheState
from .prompt_tape import Kept, Past, Shape, Tape


class Kind(NamedTuple):
    """Key of the graph of a prompt: see :class:`.prompt_tape.Tape`; ``observing`` layers calibrate."""

    shape: Shape
    batch: int
    size: int
    observing: int
    observed: int | None


class Piece(NamedTuple):
    """Key of the graph of a few tokens after cached ones.

    Args:
        width: of the block table. ring: shape of a layer's ring of recent tokens. sinks: of these. block: its tokens.
        pools: addresses of the layers' block pools. Another cache's may come to lie there, of blocks of another size.
        whole: the logits of all tokens are asked for, not of the last one alone.
    """

    shape: Shape
    batch: int
    size: int
    width: int
    ring: tuple[int, ...]
    sinks: int
    block: int
    pools: tuple[int, ...]
    whole: bool = False
    observing: int = 0
    observed: int | None = None


class CapturedPrompt:
    """The graph of one kind of prompt, and the memory that it reads and writes."""

    graph: Any
    output: Any

    past: tuple[list[Past], Tensor] | None = None

    def __init__(self, kind: Kind | Piece, kept: Kept, device: torch.device) -> None:
        self.kind, self.kept = kind, kept
        self.ids = torch.zeros(kind.batch, kind.size, dtype=torch.long, device=device)
        self.columns = torch.arange(kind.size, device=device)
        self.positions = self.columns.expand(kind.batch, -1).clone()
        self.last = torch.full((1,), kind.size - 1, dtype=torch.long, device=device)

    def run(self, model: torch.nn.Module, forward: Callable) -> Any:
        """The model's forward over these inputs; its output without the cache."""
        self.kept.params = []
        valid, kind = (self.columns <= self.last)[None], self.kind
        tape = Tape(self.kept, self.last, valid, kind.observed, self.past)
        given = {"input_ids": self.ids, "position_ids": self.positions, **over(model, tape)}
        kept = 0 if isinstance(kind, Piece) and kind.whole else self.last  # 0: of all tokens
        out = forward(**given, use_cache=True, logits_to_keep=kept)
        if tape.reached != kind.shape.layers:
            raise RuntimeError("a prompt's pass has not come to all layers")
        return type(out)(**without_cache(out))

    def give(self, ids: Tensor, positions: Tensor | None, cache: CacheState) -> None:
        """Write the inputs of a prompt. Padding follows it, which earlier tokens do not see."""
        n = ids.shape[1]
        self.ids[:, :n].copy_(ids)
        self.last.fill_(n - 1)
        if positions is None:
            self.positions.copy_(self.columns.expand_as(self.positions))
        else:
            self.positions[:, :n].copy_(positions)
            if n < self.kind.size:  # none is further on than the prompt's: rotary factors may follow the furthest
                self.positions[:, n:].copy_(positions[:, -1:].expand(len(ids), self.kind.size - n))


class CapturedPiece(CapturedPrompt):
    """The graph of a short piece, and copies of what it reads of a cache, but for the block pools."""

    def __init__(self, kind: Piece, kept: Kept, device: torch.device) -> None:
        super().__init__(kind, kept, device)
        layers, batch = kind.shape.layers, kind.batch
        self.rows = torch.zeros(batch, 2, dtype=torch.int32, device=device)
        self.table = torch.zeros(batch, kind.width, dtype=torch.int32, device=device)
        self.rings = torch.zeros(layers, *kind.ring, dtype=kind.shape.dtype, device=device).unbind(0)
        self._pools: list[weakref.ref[BlockPool]] = []  # of the cache that it was captured for; a replay needs none

    def run(self, model: torch.nn.Module, forward: Callable) -> Any:
        kind, pools = self.kind, [pool() for pool in self._pools]
        assert isinstance(kind, Piece)
        dims = kind.sinks, kind.shape.v_dim
        layers = [Past(pool, ring, self.table, *dims) for pool, ring in zip(pools, self.rings) if pool is not None]
        self.past = layers, self.rows
        try:
            return super().run(model, forward)
        finally:
            self.past = None

    def give(self, ids: Tensor, positions: Tensor | None, cache: CacheState) -> None:
        rows, device, stores = cache.row_table.rows, ids.device, [layer.store for layer in cache.sparse_layers]
        if positions is None:
            positions = torch.arange(rows.columns, rows.columns + ids.shape[1], device=device)[None]
        super().give(ids, positions, cache)
        self._pools = [weakref.ref(store.pool) for store in stores]
        table = stores[0].block_table
        self.rows.copy_(rows.on[device])
        self.table[:, : table.shape[1]].copy_(table)
        torch._foreach_copy_(self.rings, [store.recent_kv for store in stores])
