"""Keys and queries that imitate recorded ones, in an engine that runs: random weights alone thrash every pool.

A random model's queries choose other tokens in each step, so that nothing which a pool holds is found. Here prompts are
computed as ever, but what is cached of them are keys of :class:`..synthetic.keys.SyntheticKV`; decode steps ask with
its queries. Each row walks through them with a phase of its own, and each prompt takes another stretch of the keys.

This asks three things of an engine. It makes its batch by ``cache.rows()`` before it captures a step, its steps are
``rows.step()``, and rows move by ``rows.move()``. Nothing of it has to know::

    with replaying(source):
        engine = Engine(...)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_sparsekv.cache import SparseCache
from hf_sparsekv.row_batch import RowBatch
from hf_sparsekv.tensors import sent
from hf_sparsekv_config.sparse import SparseConfig

from ..filling import CALIBRATION, STEPS
from ..shapes import head_dim, latent_dims, text_config, windows
from ..synthetic.keys import SyntheticKV, set_sinks
from ..synthetic.replay import ReplayedQueries, _instead

LANES = 4  # different walks; rows of the same walk are apart by their phases
STRETCHES = 128  # blocks from which on a prompt may take its keys


class ReplayedKeys:
    """Keys and queries for prompts and steps in place of a random model's.

    Args:
        model: gives shapes, dtype and device.
        length: tokens of a prompt at most. The keys take ``layers * heads * dim`` numbers for each.
        typical: tokens of a prompt whose first piece does not say how long it is: of it the share depends that its
            sinks take.
    """

    def __init__(self, model: torch.nn.Module, length: int, typical: int, seed: int = 0) -> None:
        config = text_config(model)
        if latent_dims(config) or None not in windows(config):
            raise ValueError(
                "replayed keys need layers that cache keys and values of their whole past: use --kv random"
            )
        self.layers = sum(window is None for window in windows(config))
        shape = (self.layers, config.num_attention_heads, config.num_key_value_heads, head_dim(config))
        self.typical, kind = typical, {"seed": seed, "dtype": model.dtype, "device": model.device}
        made = self.made = SyntheticKV(*shape, 1, length + STRETCHES * SparseConfig().block_size, **kind)
        self.keys = [made.keys_values(layer)[0] for layer in range(self.layers)]
        self.asked = []  # the last queries of a prompt, of each layer
        for layer in range(self.layers):
            query = made.prompt_queries(layer)
            self.asked.append(query.repeat(1, 1, -(-CALIBRATION // query.shape[2]), 1)[:, :, -CALIBRATION:])
        self.queries = SyntheticKV(*shape, LANES, 0, **kind).queries(STEPS)
        self._prompts = 0

    def install(self, rows: RowBatch, model: torch.nn.Module) -> None:
        """All prompts and steps of an empty batch."""
        cache = rows.cache
        if not cache.layers:
            cache.bind(model.config)
        if any(layer.policy.foresight is not None for layer in cache.sparse_layers):
            raise ValueError("replayed keys of an engine are for methods that choose by a step's own query")
        queries = RowQueries(self.queries, rows.max_rows)
        queries.install(cache)
        beside, step, move = cache.beside, rows.step, rows.move

        def prompt() -> SparseCache:
            made = beside()
            self._prompts += 1
            at = (self._prompts * 37) % STRETCHES * cache.config.block_size
            bind = made.bind

            def bound(config) -> None:
                bind(config)
                for index, layer in enumerate(made.sparse_layers):
                    self._replace(index, layer, at)

            made.bind = bound
            return made

        def stepped(*args, **kwargs) -> Tensor:
            queries.next(rows.active)
            return step(*args, **kwargs)

        def moved(row: int, to: int | None = None) -> int:
            new = move(row, to)
            queries.move(new, row)
            return new

        cache.beside, rows.step, rows.move = prompt, stepped, moved

    def _replace(self, index: int, layer, at: int) -> None:
        """Make a prompt's layer cache made keys from ``at`` on. Its attention was computed with the model's own."""
        own, parameters, config = layer.commit, self.made.parameters(index), layer.owner.config

        def commit(step, query: Tensor, valid: Tensor | None) -> None:
            n, begin = step.k.shape[2], at + step.past
            key = self.keys[index][:, :, begin : begin + n]
            if step.past < config.sinks:
                key = key.clone()
                set_sinks(key, parameters, config, max(n, self.typical))
            step.k = key
            own(step, self.asked[index][:, :, -min(n, CALIBRATION) :], valid)

        layer.commit = commit


class RowQueries(ReplayedQueries):
    """Queries for rows that come and go: each row is at a place of its own in them.

    Args:
        sequence: ``[steps, layers, lanes, Hq, D]``.
        rows: row ``r`` takes lane ``r % lanes``.
    """

    def __init__(self, sequence: Tensor, rows: int) -> None:
        super().__init__(sequence)
        steps, layers, lanes, *rest = sequence.shape
        device = sequence.device
        self.buffer = torch.empty(layers, rows, *rest, dtype=sequence.dtype, device=device)
        turn = max(1, 2 * (steps - 1))
        there_and_back = [*range(steps), *range(steps - 2, 0, -1)]
        self._places = torch.tensor(there_and_back, device=device)
        self._lane = torch.arange(rows, device=device) % lanes
        self._at = torch.arange(rows, device=device) * 29 % turn
        self._moves: tuple[tuple[int, ...], Tensor] = (), torch.zeros_like(self._at)
        self._fill()

    def _fill(self) -> None:
        self.buffer.copy_(self.sequence[self._places[self._at], :, self._lane].transpose(0, 1))

    def next(self, rows: Sequence[int]) -> None:
        """The next step's queries of these rows; the others stay where they are. Behind the last one they run
        backwards. Nothing waits for the device."""
        rows = tuple(rows)
        if rows != self._moves[0]:
            which = [int(row in rows) for row in range(len(self._at))]
            self._moves = rows, sent(which, self._at.dtype, self._at.device)
        self._at = (self._at + self._moves[1]) % len(self._places)
        self._fill()

    def move(self, row: int, source: int) -> None:
        """Row ``row`` goes on where row ``source`` was, which takes its place."""
        index = sent([row, source], torch.long, self._at.device)
        for of_rows in (self._lane, self._at):
            of_rows[index] = of_rows[index.flip(0)]

    @staticmethod
    def _attend(layer, held: Tensor):
        own = type(layer).attend

        def attend(step, query, mask, params, dropout=0.0):
            if query.shape[2] == 1 and step.past:
                query = _instead(query, held[: query.shape[0]])  # a step may be of the first rows only
            return own(layer, step, query, mask, params, dropout)

        return attend


@contextmanager
def replaying(keys: ReplayedKeys | None, model: torch.nn.Module) -> Iterator[None]:
    """The first batch that is made meanwhile, an engine's, replays ``keys``; None: it does not.

    The engine then tries the model itself, on rows of other caches.
    """
    plain, left = SparseCache.rows, [keys]

    def rows(cache: SparseCache, max_rows: int, max_length: int) -> RowBatch:
        batch = plain(cache, max_rows, max_length)
        if left and (mine := left.pop()) is not None:
            mine.install(batch, model)
        return batch

    SparseCache.rows = rows
    try:
        yield
    finally:
        SparseCache.rows = plain
