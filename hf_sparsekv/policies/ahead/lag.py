"""Blocks that the step before has chosen: AsyncTLS's fetching beside the computation (section 4.2).

The selection outlives its step. Crops, beams, files and captures must follow it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...kv.counters import Tally
from ...kv.state import Held
from ...kv.store import LayerStore
from ...tensors import no_inference_mode
from ..blocks import BlockPolicy
from ..plan import Plan, planned
from .chosen_before import ChosenBefore


class LaggingBlockPolicy(ChosenBefore, BlockPolicy):
    """State: the blocks chosen in the previous step, and where they are."""

    TENSORS: ClassVar = {
        "ids": Held(trial=True, dropped=True, file="previous", when="chosen"),  # BlockIds
        "page_ids": Held(trial=True, dropped=True),
    }

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.drafts = "exact"  # blocks are chosen by the query before, and each choice takes pages of those before

    @no_inference_mode
    def start(self, store: LayerStore, q_heads: int) -> None:
        super().start(store, q_heads)
        shape = (store.batch, store.heads, self.config.coarse_blocks)
        self.ids = torch.full(shape, -1, dtype=torch.int32, device=store.device)
        if self.fetches:
            self.page_ids = torch.full(shape, -1, dtype=torch.int32, device=store.device)

    def plan(self, store: LayerStore) -> Plan:
        if (plan := self.plan_all(store)) is not None:
            return plan  # nothing is chosen; sealing the block that ends it chooses again
        attends = "chosen" if self.chosen else "every" if self.labels is not None else "dense"
        return planned(attends, store.full_blocks > self.config.coarse_blocks, self.paged and self.chosen)

    def blocks_for(self, q: Tensor, store: LayerStore, plan: Plan) -> tuple[Tensor, Tensor | None]:
        return self.ids, self.page_ids if plan.paged else None

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        super().look_ahead(q, store, plan)
        if not plan.ahead:
            return
        self.chosen = True
        self.ids.copy_(self.choose_blocks(q, store))
        pages = self.enter_blocks(store)
        self.paged = pages is not None
        if pages is not None:
            pages.fetch(self.ids, store.table, 1, True, self.page_ids)

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().replayed(store, plan, tally)
        if plan.ahead:
            pages = store.pages if self.page_ids is not None else None
            self.chosen, self.paged = True, pages is not None and pages.pool is not None

    def blocks_scored(self, plan: Plan, tally: Tally) -> int:
        return tally.blocks + tally.sealed if plan.ahead else 0  # after what the step has sealed
