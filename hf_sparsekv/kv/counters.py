"""What the decode steps of one layer read."""

from __future__ import annotations

import torch
from torch import Tensor

from .lasting import lasting


class Counters:
    """What decode steps read. Device counters are added to without synchronising; host ones cost nothing."""

    @lasting
    def __init__(self, batch: int, heads: int, device: torch.device) -> None:
        self.attended = torch.zeros(batch, heads, dtype=torch.int64, device=device)  # per row and KV head
        self.from_host = torch.zeros_like(self.attended)  # of these, read in host memory
        self.folded_from_host = torch.zeros((), dtype=torch.int64, device=device)
        self.folded = torch.zeros((), dtype=torch.int64, device=device)  # attended by rows that were regrouped
        self.blocks = torch.zeros((), dtype=torch.int64, device=device)
        # Rows with padding count on the device, others on the host.
        self.context = [torch.zeros((), dtype=torch.int64, device=device), 0]
        self.near = [torch.zeros((), dtype=torch.int64, device=device), 0]
        self.index_bytes = self.to_host_bytes = self.to_device_bytes = 0
        self.steps = self.sparse = self.dense = self.exact = self.materialised = 0
        self.crossover = 0  # of the dense ones: because that is as quick as selecting
        self.last_dense = False  # the last step attended to everything

    @lasting
    def copy(self) -> Counters:
        new = object.__new__(Counters)
        new.__dict__.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in self.__dict__.items()})
        new.context, new.near = ([v[0].clone(), v[1]] for v in (self.context, self.near))
        return new

    def clear(self) -> None:
        """Count anew, in place: a captured step knows the addresses."""
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor):
                value.zero_()
            elif isinstance(value, int):
                setattr(self, name, 0)
        for pair in (self.context, self.near):
            pair[0].zero_()
            pair[1] = 0

    @lasting
    def regroup(self, batch: int) -> None:
        self.folded += self.attended.sum()
        self.folded_from_host += self.from_host.sum()
        for name in ("attended", "from_host"):
            held = getattr(self, name)
            if batch == held.shape[0]:
                held.zero_()  # a captured step knows the address
            else:
                setattr(self, name, held.new_zeros(batch, held.shape[1]))

    @property
    def total_attended(self) -> int:
        """Tokens attended so far, over rows and KV heads. Synchronises."""
        return int(self.attended.sum() + self.folded)

    @property
    def total_from_host(self) -> int:
        """Of these, read in host memory. Synchronises."""
        return int(self.from_host.sum() + self.folded_from_host)

    @property
    def total_context(self) -> int:
        """Tokens that dense steps would have attended to. Synchronises."""
        return int(self.context[0]) + self.context[1]

    @property
    def total_near(self) -> int:
        """Of these, recent ones and sinks. Synchronises."""
        return int(self.near[0]) + self.near[1]
