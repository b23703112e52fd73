"""The selection for the next step: whether one exists, and which events end it.

All policies that choose for the next step share this.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ...kv.counters import Tally
from ...kv.store import LayerStore
from ..base import Policy
from ..plan import Plan


class ChosenBefore(Policy):
    """A policy whose steps choose what the next one attends to. A step that does not look ahead voids that."""

    HOST: ClassVar = {
        "chosen": False,  # the last step has chosen what the next one attends to
        "paged": False,  # and has brought it to the device
    }
    OWN: ClassVar[tuple[str, ...]] = ("paged",)  # a copy's device pages hold nothing yet

    def reopened(self) -> None:
        super().reopened()
        self.chosen = False

    def look_ahead(self, q: Tensor, store: LayerStore, plan: Plan) -> None:
        super().look_ahead(q, store, plan)
        if not plan.ahead:
            self.chosen = self.paged = False

    def replayed(self, store: LayerStore, plan: Plan, tally: Tally) -> None:
        super().replayed(store, plan, tally)
        if not plan.ahead:
            self.chosen = self.paged = False
