"""The captured step, as its layers see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kv.rows import Rows, Taken
from ..policies.shared import Shared


class DraftRows(NamedTuple):
    """A captured pass over drafts, as layers see it.

    Attributes:
        taken: its rows.
        queries: each of the only row's tokens as a row, on the host; those after the last draft hold nothing.
        there: the same on the device, int32 ``[n, 2]``: another number of drafts in each replay.
        due: the rows before and after each block that may have to be sealed, int32 ``[batch, 2]`` each.
        at_once: they attend to everything: ``queries`` and ``there`` are the rows before them.
    """

    taken: Taken
    queries: Rows
    there: Tensor
    due: Sequence[Tensor]
    at_once: bool = False


class Replay:
    """A step that is being captured, as layers see it.

    Args:
        valid: bool ``[batch, 1]`` at a fixed address, validity of the new column; None if no row is padded.
        side: the stream for work that the step's own attention does not wait for; None where there are no streams.
        shared: of the cache: what it has begun elsewhere from ``side`` comes back with :meth:`join`.

    Attributes:
        drafts: of a pass over drafts; None: it is a step.
    """

    def __init__(self, valid: Tensor | None, side: torch.cuda.Stream | None, shared: Shared) -> None:
        self.valid, self.side, self.shared = valid, side, shared
        self.drafts: DraftRows | None = None
        self._forked = False
        self._behind: list[Callable[[], None]] = []
        self._late: list[Callable[[], None]] = []
        self._kept: list[Callable[[], None]] = []

    def on_side_stream(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the side stream; :meth:`join` before the step ends."""
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
            self._forked = True
        with torch.cuda.stream(self.side):
            work()
            works, self._behind = self._behind, []
            self._kept += works  # the step's own stream must not reuse what they read
            for one in works:
                one()

    def ahead(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work`` concurrently with the rest of the step, which waits for it once the result is called."""
        if self.side is None:
            self.on_side_stream(work)
            return lambda: None
        done = torch.cuda.Event()

        def marked() -> None:
            work()
            done.record(self.side)

        self.on_side_stream(marked)
        return lambda: torch.cuda.current_stream().wait_event(done)

    def behind(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the side stream after what is launched there next: nothing in this step waits for it.

        It needs no fork of its own. Tensors that it holds live until the step ends.
        """
        self._behind.append(work)

    def late(self, work: Callable[[], None]) -> None:
        """Run ``work`` with :meth:`run_late`: nothing but the next step waits for it."""
        self._late.append(work)

    def run_late(self) -> None:
        """The last layer has attended: what was left for later runs beside what follows, the model's head."""
        works, self._late = self._late, []

        def work() -> None:
            for one in works:
                one()

        if works:
            self.on_side_stream(work)

    def join(self) -> None:
        """Launch what is waiting, and wait for all work on the side stream."""
        if self._behind:
            self.on_side_stream(lambda: None)
        self.come_back()

    def come_back(self) -> None:
        """Join the side stream, so that a failed capture can end."""
        if self._forked:
            assert self.side is not None
            self.shared.rejoin(self.side)
            torch.cuda.current_stream().wait_stream(self.side)
