"""A captured decode step: its graph and buffers, and the state that a trial run changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..kv.rows import Drafts
from ..layers.cache_state import CacheState, FullLayer
from ..layers.kinds import LayerKind
from ..policies.plan import Plan
from ..tensors import sent


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Inside, autocast caches no weights: the cache is freed when the caller leaves autocast, but a graph stays."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on this device; None: it is off."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def held_addresses(cache: CacheState, others: Sequence[LayerKind], device: torch.device) -> tuple:
    """Addresses on ``device`` that a graph of this cache's steps holds; ``others``: its layers that do not select."""
    steps = cache.row_table.steps(device)
    of_others = tuple([layer.addresses(steps) for layer in others])
    addresses: list[int] = [cache.row_table.blocks.on[device].data_ptr(), *steps.addresses]
    for layer in cache.sparse_layers:
        layer.store.add_addresses(addresses)
        layer.policy.add_addresses(addresses)
    return tuple(addresses), of_others


@dataclass
class CapturedStep:
    """A graph and the buffers that it reads and writes.

    In a pass over drafts, ``input_ids`` and ``position_ids`` may be padded. ``count``, int32 ``[1]``, is the number of
    tokens; of rows that come and go, int32 ``[rows]``.
    """

    graph: torch.cuda.CUDAGraph
    input_ids: Tensor
    position_ids: Tensor
    valid: Tensor | None
    output: object
    queries: list[Tensor]
    plans: tuple[Plan, ...]
    count: Tensor | None = None
    _given: Tensor | bool | None = False  # source of `valid`

    @cached_property
    def selects(self) -> bool:
        """Some layer attends to a selection."""
        return not all(plan.dense for plan in self.plans)

    def give(self, valid: Tensor | None) -> None:
        """Write :attr:`valid` from the first rows of ``valid``, bool ``[batch, 1]`` (None: all), if that is new."""
        if valid is not self._given:
            self._given = False
            self.valid.fill_(True) if valid is None else self.valid.copy_(valid[: len(self.valid)])
            self._given = valid

    def give_counts(self, drafts: Drafts) -> None:
        """Write :attr:`count`."""
        assert self.count is not None
        if drafts.counts is None:
            self.count.fill_(drafts.tokens)
        else:
            self.count.copy_(sent(drafts.counts[: len(self.count)], torch.int32, self.count.device))


class Saved:
    """Snapshot of a layer's state that a trial step changes.

    Attributes:
        query: the query of the last trial step.
    """

    query: Tensor | None = None

    def __init__(self, layer: FullLayer) -> None:
        self.layer = layer
        self.states = [(state, state.snapshot()) for state in (layer.store, layer.policy)]

    def first_rows(self, n: int) -> None:
        """Restrict the layer to its first ``n`` rows, until :meth:`put_back_rows`."""
        self.layer.store, self.layer.policy = (state.first_rows(n) for state, _ in self.states)

    def put_back_host(self, broken: str | None = None) -> None:
        """Restore host state.

        ``broken``: the layer's error message until all the rest is restored, too.
        """
        self.layer.broken = broken
        self.put_back_rows()
        for state, saved in self.states:
            state.restore_host(saved)
        self.layer.pending = None

    def put_back_rows(self) -> None:
        """Give the layer all its rows back after a step."""
        self.layer.store, self.layer.policy = (state for state, _ in self.states)
        if self.layer.captured is not None:
            self.query = self.layer.captured.query
            self.layer.captured = None
        self.layer.store.capturing = False

    def check(self) -> None:
        """Raise RuntimeError if the trial step has made a tensor that lives from step to step."""
        for state, saved in self.states:
            if made := state.made_since(saved):
                raise RuntimeError(f"{type(state).__name__} makes {', '.join(made)} in a step: make it in start()")

    def put_back_device(self) -> None:
        """Restore device state."""
        for state, saved in self.states:
            state.restore_device(saved)
