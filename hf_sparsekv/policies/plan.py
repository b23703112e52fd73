"""The work of one decode step of a layer, decided once, before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property


@dataclass(frozen=True)
class Plan:
    """Equal plans launch the same kernels: a graph that was captured for one serves the other.

    Args:
        attends: ``"dense"`` (all tokens), ``"every"`` (a selection among all full blocks), ``"chosen"`` (chosen before,
            or blocks that the step chooses), or a policy's own name for it.
        ahead: the step prepares the next one (:meth:`.base.Policy.look_ahead`).
        paged: chosen blocks or tokens are addressed by device page ids.
        brings: that decides where the next one reads, never what: chosen tokens are copied to the device. After a piece
            of a prompt it waits for the step, because another piece may follow.
        foresees: tokens are chosen for the query that the layer before expects in this very step.
        learns: label channels are being calibrated.
        pack: which of two buffers the step reads.
        captured: the step can be captured.
        crossover: it is dense because that is as quick as selecting; such a step's graph is that of any dense one.
    """

    attends: str = "dense"
    ahead: bool = False
    paged: bool = False
    brings: bool = False
    foresees: bool = False
    learns: bool = False
    pack: int = 0
    captured: bool = True
    crossover: bool = field(default=False, compare=False)

    @cached_property
    def dense(self) -> bool:
        """The step attends to all tokens."""
        return self.attends == "dense"


planned = cache(Plan)  # plans are few and are created once, because every layer needs one in every step
DENSE, CROSSOVER = planned(), planned(crossover=True)
