"""Several queries of one row, as rows of a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .rows import Rows
from .store import LayerStore


class QueryRows(LayerStore):
    """The only row of a store once for each of several queries, in the same memory: each ends with its own token.

    To score, to choose and to attend with. Nothing is stored through it.
    """

    @classmethod
    @contextmanager
    def of(cls, store: LayerStore, queries: Rows) -> Iterator[LayerStore]:
        """``store`` for ``queries`` (:attr:`.rows.Drafts.queries`). What they attend to is counted as the one row's."""
        n = queries.batch
        if n == store.batch:
            yield store
            return
        new = object.__new__(cls)
        new.__dict__.update(store.__dict__)
        new.batch, new._rows = n, queries
        new.recent_kv = store.recent_kv.expand(n, -1, -1, -1)
        counters = new.counters = copy.copy(store.counters)
        counters.attended, counters.from_host = counted = store.counters.attended.new_zeros(2, n, store.heads)
        yield new
        for held, more in zip((store.counters.attended, store.counters.from_host), counted.sum(1, keepdim=True)):
            held += more

    @property
    def block_table(self) -> Tensor:
        return self.table_of_rows.on(self.device).expand(self.batch, -1)
