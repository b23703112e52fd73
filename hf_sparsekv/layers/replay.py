"""What layers know of the captured step that they are part of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..policies.shared import Shared


class Replay:
    """What layers need to know while a step is being captured.

    Args:
        valid: bool ``[batch, 1]`` at a fixed address, validity of the new column; None if no row is padded.
        side: the stream for work that the step's own attention does not wait for; None where there are no streams.
        shared: of the cache: what it has begun elsewhere from ``side`` comes back with :meth:`join`.
    """

    def __init__(self, valid: Tensor | None, side: torch.cuda.Stream | None, shared: Shared) -> None:
        self.valid, self.side, self.shared = valid, side, shared
        self._forked = False
        self._waiting: list[Callable[[], None]] = []

    def fork(self, work: Callable[[], None], bundle: int = 1) -> None:
        """Run ``work`` beside what follows, once there are ``bundle`` such; :meth:`join` before the step ends."""
        self._waiting.append(work)
        if len(self._waiting) >= bundle:
            self._run()

    def beside(self, work: Callable[[], None]) -> None:
        """Run ``work`` beside what follows, whatever is waiting for others."""
        if self.side is None:
            work()
            return
        self.side.wait_stream(torch.cuda.current_stream())
        self._forked = True
        with torch.cuda.stream(self.side):
            work()

    def _run(self) -> None:
        bundle, self._waiting = self._waiting, []

        def work() -> None:
            for one in bundle:
                one()

        self.beside(work)

    def join(self) -> None:
        """What was forked is done from here on."""
        if self._waiting:
            self._run()
        self.come_back()

    def come_back(self) -> None:
        """Wait for what was forked, and only that: a capture that has failed can end then, and torch tidies up."""
        if self._forked:
            self.shared.rejoin(self.side)
            torch.cuda.current_stream().wait_stream(self.side)
