"""Several queries of one row, as rows of a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ..tensors import reads_here
from .rows import Rows
from .store import LayerStore


class QueryRows(LayerStore):
    """The only row of a store once for each of several queries, in the same memory: each ends with its own token.

    To score, to choose and to attend with. Nothing is stored through it.
    """

    _there: Tensor | None

    @classmethod
    @contextmanager
    def of(cls, store: LayerStore, queries: Rows, there: Tensor | None = None) -> Iterator[LayerStore]:
        """``store`` for ``queries`` (:attr:`.rows.Drafts.queries`). Their reads count as the one row's.

        ``there``: int32 ``[n, 2]``, the queries of a captured pass. One that holds no tokens attends to nothing.
        """
        n = queries.batch
        new = object.__new__(cls)
        new.__dict__.update(store.__dict__)
        new.batch, new._rows, new._there = n, queries, there
        new.recent_kv = store.recent_kv.expand(n, -1, -1, -1)
        counters = new.counters = copy.copy(store.counters)
        counted = store.counters.attended.new_zeros(2, n + n % 2, store.heads)[:, :n]  # both begin at 16 bytes
        counters.attended, counters.from_host = counted
        yield new
        for held, more in zip((store.counters.attended, store.counters.from_host), counted.sum(1, keepdim=True)):
            held += more

    @property
    def rows(self) -> Tensor:
        return reads_here(self.held.on[self.device]) if self._there is None else self._there

    @property
    def block_table(self) -> Tensor:
        return self.table_of_rows.blocks.on[self.device].expand(self.batch, -1)

    @property
    def table(self) -> Tensor:
        # A row for each query: references would broadcast one row, and kernels would read beyond it.
        held = self.block_table
        return held if self.capturing else held[:, : self.full_blocks]
