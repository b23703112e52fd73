"""Requests that were submitted and have not begun, and whether more are taken.

It is the part of the loop that other threads write to, so it alone has a lock. What they write wakes the loop's thread.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from .failures import described
from .in_flight import Request
from .request import Busy, Closed
from .stats import Counts

IDLE_S = 0.5  # seconds after which the idle loop looks around, whether or not it was woken


class Intake:
    """Takes requests, until it drains, is closed or has failed.

    Any thread may call it. Only the loop's thread may call :meth:`take`, :meth:`take_cancelled` and :meth:`begun`, and
    touch ``waiting``: other threads may ask for its length.

    Args:
        counts: of the engine; accepted requests are counted here.
        max_waiting: requests that may wait.

    Attributes:
        waiting: requests that the loop knows of and that have not begun, in the order of their arrival.
        closed: everything has to end.
        failed: what the model has failed with: no request is served any more.
    """

    def __init__(self, counts: Counts, max_waiting: int) -> None:
        self.counts, self.max_waiting = counts, max_waiting
        self.waiting: deque[Request] = deque()
        self._order = itertools.count()
        self._open: dict[int, Request] = {}  # whose end has not been told
        self._wake = threading.Condition()
        self._inbox: deque[Request] = deque()  # guarded by _wake, like what follows
        self._draining = self.closed = False
        self._looked = False  # something was cancelled, or has ended
        self.failed: BaseException | None = None
        self._interval = 0.0  # seconds from one prompt's beginning to the next one's, while some wait
        self._last = 0.0  # when the last prompt began

    # ------------------------------------------------------------------ from any thread

    @property
    def refusal(self) -> str | None:
        """Why no request is taken, as what the engine does; None: requests are taken."""
        if self.closed:
            return "is closed"
        if self.failed is not None:
            return f"has failed ({described(self.failed)})"
        return "drains" if self._draining else None

    @property
    def queued(self) -> int:
        """Requests that have not begun."""
        return len(self._inbox) + len(self.waiting)

    @property
    def wait_s(self) -> float:
        """Seconds that a request which comes now may wait: those before it, as quickly as the last ones began."""
        return self.queued * self._interval

    def submit(self, request: Request, begins_at_once: Callable[[Request], bool]) -> None:
        """Take a request.

        Args:
            begins_at_once: a request that finds the queue empty does not have to wait.

        Raises:
            Closed: no more are taken.
            Busy: as many wait as may.
        """
        with self._wake:
            if (why := self.refusal) is not None:
                raise Closed(f"the engine takes no requests: it {why}")
            waiting = self.queued
            if self.max_waiting == 0:
                if waiting or not begins_at_once(request):
                    raise Busy("no request may wait, and this one cannot start at once", self.wait_s)
            elif waiting >= self.max_waiting:
                raise Busy(f"{waiting} requests wait already, which is as many as may", self.wait_s)
            request.order = next(self._order)
            self._open[request.order] = request
            self._inbox.append(request)
            self.counts.requests += 1
            self._wake.notify()

    def look(self, *_: object) -> None:
        """Something has been cancelled, or has ended: look at it."""
        with self._wake:
            self._looked = True
            self._wake.notify()

    def drain(self) -> None:
        """Take no more requests."""
        with self._wake:
            self._draining = True

    def close(self) -> None:
        """Take no more requests, and end all that there are."""
        with self._wake:
            self.closed = True
            self._wake.notify()

    def fail(self, error: BaseException) -> BaseException:
        """No request is served from here on; gives what it has failed with first."""
        with self._wake:
            self.failed = error = self.failed or error
            self._inbox.clear()
            self._wake.notify()
        return error

    @property
    def empty(self) -> bool:
        """No request waits."""
        with self._wake:
            return not (self._inbox or self.waiting)

    @property
    def open(self) -> list[Request]:
        """Requests whose end has not been told."""
        return list(self._open.values())

    def told(self, request: Request) -> None:
        """Its end has been told."""
        self._open.pop(request.order, None)

    # ------------------------------------------------------------------ the loop's thread

    def take(self, wait: bool) -> bool:
        """Put new requests into the queue. True: some request was cancelled, or has ended.

        Args:
            wait: for a while, unless there is news.

        Raises:
            BaseException: what :meth:`fail` was given.
        """
        with self._wake:
            if wait and not (self._inbox or self._looked or self.closed):
                self._wake.wait(IDLE_S)
            arrived, self._inbox = self._inbox, deque()
            looked, self._looked = self._looked, False
            if self.failed is not None:
                raise self.failed
            self.waiting.extend(arrived)
        return looked

    def take_cancelled(self) -> list[Request]:
        """Requests that were cancelled leave the queue."""
        cancelled = [one for one in self.waiting if one.handle.cancelled.is_set()]
        for request in cancelled:
            self.waiting.remove(request)
        return cancelled

    def begun(self, request: Request) -> None:
        """The first request of the queue has begun: :attr:`wait_s` is estimated from how long that took."""
        waited = request.begun - max(self._last, request.arrived)
        self._interval = 0.7 * self._interval + 0.3 * waited if self._interval else waited
        self._last = request.begun
