"""The latest queries of a layer, on its device, and the next one that they predict (AsyncSpade section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...kv.state import Held, State
from ...ops.selection.query_predict import query_predict
from ...ops.selection.query_ring import push
from ...tensors import no_inference_mode
from ..memory import Request

# Predecessors that the regression has, and the strength of its ridge. Windows of 4 to 32 and strengths of 0.1 to 1 do
# alike: docs/studies/predicted-queries.md.
WINDOW, EPSILON = 16, 0.1
SLOTS = WINDOW + 1  # the newest query and its predecessors


class QueryRing(State):
    """A ring of queries of each row: the query of its token ``t`` is stored at ``t % R``.

    So a step needs no count of earlier queries, and repeating a step changes nothing.

    Attributes:
        held: ``[batch, Hq, R, D]``, with ``R`` = :data:`SLOTS`.
        count: int32 ``[batch]``, queries of each row that are known.
        position: int32 ``[batch]``, where the next one goes.
        first: int32 ``[batch]``, the token from which on they are known.
        end: tokens of each row whose queries were stored (host).
    """

    TENSORS: ClassVar = {
        "held": Held(counted=True, file="queries"),
        "first": Held(counted=True, file="queries_from"),
        "count": Held(counted=True),
        "position": Held(counted=True),
    }
    HOST: ClassVar = {"end": None}

    @no_inference_mode
    def __init__(self, batch: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.held = torch.zeros(batch, heads, SLOTS, dim, dtype=dtype, device=device)
        self.first, self.count, self.position = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(3))
        self.end = (0,) * batch

    def fits(self, batch: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """This ring could have been made so."""
        shape = (batch, heads, SLOTS, dim)
        return (tuple(self.held.shape), self.held.dtype, self.held.device) == (shape, dtype, device)

    def push(self, q: Tensor, valid: Tensor | None, past: Tensor) -> None:
        """A step's queries ``q [batch, Hq, 1, D]``, see :func:`...ops.selection.query_ring.push`."""
        push(q, valid, past, self.held, self.first, self.count, self.position)

    def predict(self, out: Tensor | None = None) -> Tensor:
        """The next query of each row and head ``[batch, Hq, D]``: the average of all windows' regressions."""
        return query_predict(self.held, self.position, self.count, WINDOW, EPSILON, out=out)

    def store(
        self,
        q: Tensor,
        start: Sequence[int],
        end: Sequence[int],
        picks: Sequence[slice | Tensor] | None = None,
        columns: int | None = None,
    ) -> None:
        """Store the queries of tokens ``start .. end - 1`` of each row.

        Args:
            q: ``[batch, Hq, n, D]``, of all ``columns``, or of the last ones only.
            picks: which of the columns are a row's tokens; None: all.
        """
        self.rewind(start)
        missing = 0 if columns is None else columns - q.shape[2]
        rows = [slice(None)] if picks is None and len(set(zip(start, end))) == 1 else range(len(start))
        for row in rows:
            first = 0 if isinstance(row, slice) else row
            one = row if isinstance(row, slice) else slice(row, row + 1)
            mine, tokens = q[one], end[first] - start[first]
            if picks is not None:
                at = picks[first]
                at = torch.arange(at.start, at.stop, device=q.device) if isinstance(at, slice) else at.to(q.device)
                mine = mine[:, :, at[at >= missing] - missing]
            n = min(mine.shape[2], tokens, SLOTS)
            held = [x[one] for x in (self.held, self.first, self.count, self.position)]
            if mine.shape[2] < tokens:
                held[1].clamp_min_(end[first] - mine.shape[2])
            past = torch.full_like(held[1], end[first] - n)
            push(mine[:, :, mine.shape[2] - n :], None, past, *held)
        self.end = tuple(end)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.held.device)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Tokens from ``lengths`` on were removed; older queries that theirs have overwritten are gone as well."""
        if any(end > length for end, length in zip(self.end, lengths)):
            end, length = self._ints(self.end), self._ints(lengths)
            gone = end > length
            known = torch.minimum(torch.maximum(self.first, end - SLOTS), length)  # those that follow are known
            self.first.copy_(torch.where(gone, known, self.first))
            self.end = tuple(min(both) for both in zip(self.end, lengths))
            self._count()

    def _count(self) -> None:
        end = self._ints(self.end)
        self.count.copy_((end - self.first).clamp(0, SLOTS))
        self.position.copy_(end % SLOTS)

    def forget(self, lengths: Sequence[int]) -> None:
        """The rows hold ``lengths`` tokens, and no query of these is known."""
        self.end = tuple(lengths)
        self.first.copy_(self._ints(lengths))
        self._count()

    @no_inference_mode
    def map_rows(self, index: Tensor) -> None:
        super().map_rows(index)
        self.end = tuple(self.end[i] for i in index.tolist())

    def to_file(self, lengths: Sequence[int]) -> dict[str, Tensor]:
        self.rewind(lengths)  # a crop() leaves that to the next step
        return super().to_file(lengths)

    def from_file(self, found: dict[str, Tensor], device: torch.device, lengths: Sequence[int]) -> None:
        """Take over what another ring knew at these lengths; the file of a cache that predicted by layer has none."""
        self.forget(lengths)
        super().from_file(found, device, lengths)
        self._count()

    def clear(self) -> None:
        """Nothing is cached."""
        self.forget((0,) * len(self.held))


def queries_bytes(request: Request) -> int:
    """Bytes of the latest queries, all layers."""
    each = (request.query_heads * SLOTS * layer.query_dim * request.item + 12 for layer in request.layers)
    return request.batch * sum(each)
