"""The latest queries of a layer, on its device."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..kv.state import Held, State
from ..ops.query_ring import push
from ..tensors import no_inference_mode


class QueryRing(State):
    """A ring of queries, addressed by column: the query of column ``c`` is stored at ``c % R``.

    So a step needs no count of earlier queries, and repeating a step changes nothing.

    Attributes:
        held: ``[batch, Hq, R, D]``.
        count: int32 ``[batch]``, queries of each row that are known.
        position: int32 ``[1]``, where the next one goes.
        first: int32 ``[batch]``, the column from which on they are known.
        end: columns whose queries were stored (host).
    """

    TENSORS: ClassVar = {
        "held": Held(counted=True, file="queries"),
        "first": Held(counted=True, file="queries_from"),
        "count": Held(counted=True),
        "position": Held(rows=None, counted=True),
    }
    HOST: ClassVar = {"end": 0}

    @no_inference_mode
    def __init__(self, batch: int, heads: int, size: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.held = torch.zeros(batch, heads, size, dim, dtype=dtype, device=device)
        self.first = torch.zeros(batch, dtype=torch.int32, device=device)
        self.count = torch.zeros_like(self.first)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def size(self) -> int:
        """Queries that it holds at most."""
        return self.held.shape[2]

    def fits(self, batch: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """This ring could have been made so."""
        shape = (batch, heads, self.size, dim)
        return (tuple(self.held.shape), self.held.dtype, self.held.device) == (shape, dtype, device)

    def push(self, q: Tensor, valid: Tensor | None, column: Tensor) -> None:
        """Store ``q [batch, Hq, n, D]``, see :func:`..ops.query_ring.push`."""
        push(q, valid, column, self.held, self.first, self.count, self.position)

    def store(self, q: Tensor, valid: Tensor | None, start: int, end: int) -> None:
        """Store the queries of columns ``start .. end - 1``, of which ``q`` may be the last ones only."""
        self.rewind(start)
        n = min(q.shape[2], end - start, self.size)
        if q.shape[2] < end - start:
            self.forget(end - q.shape[2])
        column = torch.full((1,), end - n, dtype=torch.int32, device=self.held.device)
        self.push(q[:, :, q.shape[2] - n :], None if valid is None else valid[:, valid.shape[1] - n :], column)
        self.end = end

    def rewind(self, length: int) -> None:
        """Columns from ``length`` on were removed; older queries that theirs have overwritten are gone as well."""
        if self.end > length:
            self.first.clamp_min_(self.end - self.size).clamp_max_(length)  # those that follow are known
            self.count.copy_((length - self.first).clamp(0, self.size))
            self.position.fill_(length % self.size)
            self.end = length

    def forget(self, length: int) -> None:
        """Queries of columns before ``length`` are not known."""
        self.first.clamp_min_(length)
        self.count.copy_((self.end - self.first).clamp(0, self.size))

    def to_file(self, length: int) -> dict[str, Tensor]:
        self.rewind(length)  # a crop() leaves that to the next step
        return super().to_file(length)

    def from_file(self, found: dict[str, Tensor], device: torch.device, length: int) -> None:
        """Take over what another ring, which may have held more or fewer, knew at ``length`` columns."""
        if "queries" not in found:  # of a cache whose predictor needed none
            self.end = length
            self.forget(length)
            return
        held, first = (found[name].to(device) for name in ("queries", "queries_from"))
        n = min(held.shape[2], length)
        columns = torch.arange(length - n, length, device=device) % held.shape[2]
        self.first.copy_(first.clamp_min(length - n))
        self.end = length - n
        self.store(held[:, :, columns], None, length - n, length)

    def clear(self) -> None:
        """Nothing is cached."""
        self.first.zero_()
        self.count.zero_()
        self.position.zero_()
        self.end = 0
