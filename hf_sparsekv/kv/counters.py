"""Counters of what decode steps meet and read, summed over steps and rows.

Statistics read them, and attention does not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..tensors import no_inference_mode
from .memory import new_memory
from .rows import Rows, Taken
from .state import Held, State

_HOST = (
    *("index_bytes", "to_host_bytes", "to_device_bytes"),
    *("steps", "sparse", "dense", "exact", "materialised"),
    "crossover",  # of the dense ones: because that is as quick as selecting
    "foreseen",  # of the sparse ones: chosen for the query that the layer before expected
    "masked",  # steps of one token that attended to what a 4-D mask showed
    "drafts",  # queries of steps that brought several, beyond the first of each
    *("context", "recent"),
)


@dataclass
class Tally:
    """A sum over decode steps and their rows: steps, tokens, blocks.

    Args:
        steps: how many there were, and passes over drafts. ``rows``: their rows, without those that attended to
            nothing; of a pass its queries.
        drafts: queries of passes beyond the first of each.
        context: tokens cached.
        ring: of these, not in full blocks. ``sinks``: sinks in full blocks.
        blocks: full blocks. ``sealed``: blocks that became full.
        full: how often a row had so many full blocks.
        last: the rows as the last step attended to them.
    """

    steps: int = 0
    drafts: int = 0
    rows: int = 0
    context: int = 0
    ring: int = 0
    sinks: int = 0
    blocks: int = 0
    sealed: int = 0
    full: Counter[int] = field(default_factory=Counter)
    last: Rows | None = None

    def add(self, taken: Taken, sinks: int, queries: Rows | None = None) -> None:
        """Count one step; or one pass over drafts, whose ``queries`` are :attr:`.rows.Drafts.queries`."""
        now, size = taken.now, taken.now.block_size
        if queries is not None:
            now = queries
            self.drafts += queries.batch - taken.before.batch
        blocks, context = sum(now.sealed), sum(now.lengths)
        self.steps += 1
        self.rows += sum(n > 0 for n in now.lengths)
        self.context += context
        self.ring += context - blocks * size
        self.sinks += sum(min(sinks, n * size) for n in now.sealed)
        self.blocks += blocks
        self.sealed += sum(taken.after.sealed) - sum(taken.before.sealed)
        self.full.update(now.sealed)
        self.last = taken.now


def tally_of(taken: Taken, sinks: int, queries: Rows | None = None) -> Tally:
    """The tally of one step, or of one pass over drafts, whose ``queries`` are :attr:`.rows.Drafts.queries`."""
    tally = Tally()
    tally.add(taken, sinks, queries)
    return tally


class Counters(State):
    """Counters of what decode steps read. Device counters are added to without synchronising; the host's cost nothing.

    Attributes:
        attended: int64 ``[batch, H]``, tokens; ``from_host``: of these, read in host memory. Only their sums mean
            something: rows that are regrouped leave theirs to the first one.
        blocks: int64, what a coarse level kept.
        context: tokens that dense steps would have attended to; ``recent``: of these, recent ones and sinks.
        last_dense: the last step attended to everything.
        stored_bytes: of a block, all heads, in host memory; 0: blocks are on the device.
    """

    TENSORS: ClassVar = {
        "attended": Held(rows=None, trial=True),
        **{name: Held(rows=None, captured=False, trial=True) for name in ("from_host", "blocks")},
    }
    HOST: ClassVar = {**dict.fromkeys(_HOST, 0), "last_dense": False}

    attended: torch.Tensor
    from_host: torch.Tensor
    blocks: torch.Tensor
    steps: int
    drafts: int
    dense: int
    sparse: int
    foreseen: int
    exact: int
    masked: int
    materialised: int
    crossover: int
    context: int
    recent: int
    index_bytes: int
    to_device_bytes: int
    to_host_bytes: int

    @no_inference_mode
    def __init__(self, batch: int, heads: int, device: torch.device, stored_bytes: int = 0) -> None:
        super().__init__()
        self.stored_bytes = stored_bytes
        for name in self.TENSORS:
            shape = (batch, heads) if name in ("attended", "from_host") else ()
            setattr(self, name, new_memory(name, shape, torch.int64, device, zeros=True))

    def reset(self) -> None:
        """Reset to zero in place, because captured graphs hold the addresses."""
        super().reset()
        for name in self.TENSORS:
            getattr(self, name).zero_()

    def count_steps(self, granularity: str, tally: Tally) -> None:
        """Count decode steps that attended with this granularity."""
        dense, heads = granularity == "all", self.attended.shape[1]
        self.steps += tally.steps
        self.drafts += tally.drafts
        self.last_dense = dense
        self.dense += dense * tally.steps
        self.sparse += (not dense) * tally.steps
        self.context += heads * tally.context
        self.recent += heads * (tally.ring if dense else tally.ring + tally.sinks)

    def count_to_host(self, blocks: int) -> None:
        """So many blocks have gone to host memory, if that is where they go."""
        self.to_host_bytes += blocks * self.stored_bytes

    @no_inference_mode
    def regroup(self, batch: int) -> None:
        for name in ("attended", "from_host"):
            held = getattr(self, name)
            total = held.sum()
            if batch == held.shape[0]:
                held.zero_()  # in place: captured graphs hold the address
            else:
                held = held.new_zeros(batch, held.shape[1])
            held[:1, :1] = total
            setattr(self, name, held)

    def first_rows(self, n: int) -> Counters:
        new = super().first_rows(n)
        new.attended, new.from_host = self.attended[:n], self.from_host[:n]
        return new

    @property
    def total_attended(self) -> int:
        """Tokens attended so far, over rows and KV heads. Synchronises."""
        return int(self.attended.sum())

    @property
    def total_from_host(self) -> int:
        """Attended tokens that were read in host memory. Synchronises."""
        return int(self.from_host.sum())
