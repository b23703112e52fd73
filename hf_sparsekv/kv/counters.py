"""What the decode steps of one layer read."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..tensors import no_inference_mode
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


class Counters(State):
    """What decode steps read. Device counters are added to without synchronising; the host's cost nothing.

    Attributes:
        attended: int64 ``[batch, H]``, tokens; ``from_host``: of these, read in host memory. Only their sums mean
            something: rows that are regrouped leave theirs to the first one.
        blocks: int64, what a coarse level kept.
        context: tokens that dense steps would have attended to; ``recent``: of these, recent ones and sinks.
        last_dense: the last step attended to everything.
    """

    TENSORS: ClassVar = {
        "attended": Held(rows=None, trial=True),
        **{name: Held(rows=None, captured=False, trial=True) for name in ("from_host", "blocks")},
    }
    HOST: ClassVar = {**dict.fromkeys(_HOST, 0), "last_dense": False}

    @no_inference_mode
    def __init__(self, batch: int, heads: int, device: torch.device) -> None:
        super().__init__()
        for name in self.TENSORS:
            shape = (batch, heads) if name in ("attended", "from_host") else ()
            setattr(self, name, torch.zeros(shape, dtype=torch.int64, device=device))

    def reset(self) -> None:
        """Reset to zero in place, because captured graphs hold the addresses."""
        super().reset()
        for name in self.TENSORS:
            getattr(self, name).zero_()

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
        """Of these, read in host memory. Synchronises."""
        return int(self.from_host.sum())
