"""Offloaded blocks that a step brings to the device behind its attention, for the steps that follow."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..kv.state import Held, State
from ..kv.store import LayerStore
from ..tensors import no_inference_mode


class Behind(State):
    """What was brought decides where tokens are read, never which: a step chooses among all of them.

    Its tokens in pages are read there, the others in host memory. So no query has to be predicted, and nothing waits
    for a copy: steps that follow each other want nearly the same blocks.

    Attributes:
        since: int32 ``[1]``, the pool's step in which this layer brought blocks last.
    """

    TENSORS: ClassVar = {"since": Held(rows=None, trial=True)}

    @no_inference_mode
    def start(self, store: LayerStore) -> None:
        """The layer's first tokens have arrived."""
        self.since = torch.zeros(1, dtype=torch.int32, device=store.device)

    def places(self, store: LayerStore) -> Tensor:
        """Where all blocks of each row and KV head are, int32 ``[batch, H, blocks]``: see ``ops.residency.lookup``."""
        return store.pages.find(None, store.table, self.since)

    def bring(self, wanted: Tensor, store: LayerStore) -> None:
        """Bring ``wanted``, int32 ``[batch, H, n]``, the most important first or in ascending order, padded with -1.

        They stay on the device for the next step at least. There must be a pool (``store.pages.enter()``).
        """
        store.pages.fetch(wanted, store.table, 1)
        self.since.copy_(store.pages.pool.state.now)


def reads_here(made: Tensor) -> Tensor:
    """``made`` on a step's own stream, for work on the current one, which may be a side stream and come later."""
    if made.is_cuda:  # or its memory would be reused while it is read here
        made.record_stream(torch.cuda.current_stream(made.device))
    return made
