"""Lanes that generate take turns, one at a time, so that each step has the machine to itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class Stopped(Exception):
    """Somebody has pressed Stop."""


@dataclass(eq=False)
class Lane:
    """One generation among others.

    Args:
        run: what it belongs to; the lanes of a run share its turns.
        stop: set when it should end.
        seconds: of its own that it has taken in this race.
    """

    run: object
    stop: threading.Event
    seconds: float = 0.0


@dataclass
class _Run:
    lanes: int = 0
    seconds: float = 0.0
    waiting: list[Lane] = field(default_factory=list)


class Turns:
    """Hands out the machine, a turn at a time.

    Runs (browser tabs) get equal time. Within a run the turn goes to the lane that has used less time so far. Both
    clocks advance together, and the faster lane is ahead on tokens, as in a race on two machines.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._runs: dict[object, _Run] = {}
        self._holder: Lane | None = None

    @property
    def runs(self) -> int:
        """How many runs there are at the moment."""
        with self._condition:
            return len(self._runs)

    @contextmanager
    def turn(self, run: object) -> Iterator[None]:
        """One turn, waited for whatever happens: for work that is not part of a race."""
        lane = Lane(run, threading.Event())
        self.join(lane)
        try:
            self.take(lane)
            yield
        finally:
            self.leave(lane)

    def join(self, lane: Lane) -> None:
        """``lane`` will ask for turns, until it leaves."""
        with self._condition:
            if lane.run not in self._runs:
                least = min((run.seconds for run in self._runs.values()), default=0.0)
                self._runs[lane.run] = _Run(seconds=least)  # no credit for time before it came
            self._runs[lane.run].lanes += 1

    def leave(self, lane: Lane) -> None:
        """``lane`` is done; gives its turn back if it has it."""
        with self._condition:
            if self._holder is lane:
                self._holder = None
            run = self._runs[lane.run]
            run.lanes -= 1
            if not run.lanes:
                del self._runs[lane.run]
            self._condition.notify_all()

    def take(self, lane: Lane) -> None:
        """Wait for the turn.

        Raises:
            Stopped: ``lane.stop`` is set; it has no turn then.
        """
        with self._condition:
            run = self._runs[lane.run]
            run.waiting.append(lane)
            try:
                while not lane.stop.is_set():
                    if self._holder is None and self._next() is lane:
                        self._holder = lane
                        return
                    self._condition.wait(0.05)  # a stop sends no notification
                raise Stopped
            finally:
                run.waiting.remove(lane)

    def give(self, lane: Lane, seconds: float) -> None:
        """The turn is over, after ``seconds``."""
        with self._condition:
            lane.seconds += seconds
            self._runs[lane.run].seconds += seconds
            if self._holder is lane:
                self._holder = None
            self._condition.notify_all()

    def _next(self) -> Lane:
        run = min((run for run in self._runs.values() if run.waiting), key=lambda run: run.seconds)
        return min(run.waiting, key=lambda lane: lane.seconds)
