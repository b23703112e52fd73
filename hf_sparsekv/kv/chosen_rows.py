"""The rows of a store with only some of their recent tokens, those that were chosen.

Apart from the store, because other methods attend to all recent tokens. An indexer's choice leaves most of them out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .store import LayerStore


class ChosenRows(LayerStore):
    """A store, in the same memory, whose ring holds only chosen tokens. For attention; nothing is stored through it."""

    _there: Tensor

    @classmethod
    def of(cls, store: LayerStore, tokens: Tensor) -> ChosenRows:
        """``store`` with those of ``tokens [batch, k]`` that are not in full blocks; -1 for none.

        They are copied to a ring of their own, in the order in which they were chosen, as the first tokens after the
        full blocks. There are no sinks: these are in full blocks as well.
        """
        ring, sealed = store.ring, store.rows[:, 1:]
        recent = tokens >= sealed
        n = recent.sum(1, keepdim=True, dtype=torch.int32)
        place = (sealed + recent.cumsum(1) - 1) % ring.tokens
        source = tokens.new_zeros(len(tokens), ring.tokens + 1)  # the last entry takes what is not recent
        source.scatter_(1, torch.where(recent, place, ring.tokens), ring.sinks + tokens % ring.tokens)
        source = source[:, None, : ring.tokens, None].expand(-1, store.heads, -1, store.width)
        new = object.__new__(cls)
        new.__dict__.update(store.__dict__)
        new.recent_kv, new.sinks = store.recent_kv.gather(2, source), 0
        new._there = torch.cat((sealed + n, sealed), dim=1)
        return new

    @property
    def rows(self) -> Tensor:
        return self._there
