"""The queue of submitted requests that have not begun, and whether the engine takes more.

It is the part of the loop that other threads write to, so it alone has a lock. Each write wakes the loop's thread.
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

STARTS = 64  # of prompts, whose mean interval tells how fast the queue drains
IDLE_S = 0.5  # seconds after which the idle loop looks around, whether or not it was woken


class Intake:
    """Takes requests, until it drains, is closed or has failed.

    Any thread may call it. Only the loop's thread may call :meth:`take`, :meth:`take_cancelled` and :meth:`begun`, and
    use ``waiting``, except for its length.

    Args:
        counts: the engine's counters; it counts accepted requests.
        max_waiting: most requests that may wait.

    Attributes:
        waiting: requests that the loop has taken and that have not begun, in the order of their arrival.
        closed: whether all requests have to end.
        failed: the model's error, after which no request is served.
    """

    def __init__(self, counts: Counts, max_waiting: int) -> None:
        self.counts, self.max_waiting = counts, max_waiting
        self.waiting: deque[Request] = deque()
        self._order = itertools.count()
        self._open: dict[int, Request] = {}  # requests whose end has not been delivered
        self._wake = threading.Condition()
        self._inbox: deque[Request] = deque()  # guarded by _wake, like the attributes below
        self._draining = self.closed = False
        self._looked = False  # something was cancelled, or has ended
        self.failed: BaseException | None = None
        self._intervals: deque[float] = deque(maxlen=STARTS)  # seconds between two starts, while some wait
        self._last = 0.0  # when the last prompt started

    # ------------------------------------------------------------------ from any thread

    @property
    def refusal(self) -> str | None:
        """Why the engine takes no request, as a verb phrase. None: it takes requests."""
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
        """Expected wait of a new request in seconds, if queued requests start as fast as the last ones did.

        Rows end together, and then several requests start at once. So the rate is that of many starts.
        """
        taken = list(self._intervals)
        return self.queued * sum(taken) / len(taken) if taken else 0.0

    def submit(self, request: Request, begins_at_once: Callable[[Request], bool]) -> None:
        """Queue a request.

        Args:
            begins_at_once: whether a request can start now if the queue is empty.

        Raises:
            Closed: the engine takes no more requests.
            Busy: the queue is full.
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
        """Wake the loop, because a request was cancelled or has ended."""
        with self._wake:
            self._looked = True
            self._wake.notify()

    def drain(self) -> None:
        """Take no more requests."""
        with self._wake:
            self._draining = True

    def close(self) -> None:
        """Take no more requests, and end all requests in the engine."""
        with self._wake:
            self.closed = True
            self._wake.notify()

    def fail(self, error: BaseException) -> BaseException:
        """Serve no request from here on. Returns the first error that it was given."""
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
        """Requests whose end has not been delivered."""
        return list(self._open.values())

    def told(self, request: Request) -> None:
        """Note that a request's end has been delivered."""
        self._open.pop(request.order, None)

    # ------------------------------------------------------------------ the loop's thread

    def take(self, wait: bool) -> bool:
        """Put new requests into the queue. Returns whether some request was cancelled, or has ended.

        Args:
            wait: wait for a while if there is no news.

        Raises:
            BaseException: the error that :meth:`fail` was given.
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
        """Remove cancelled requests from the queue, and return them."""
        cancelled = [one for one in self.waiting if one.handle.cancelled.is_set()]
        for request in cancelled:
            self.waiting.remove(request)
        return cancelled

    def begun(self, request: Request) -> None:
        """Note that the first request of the queue has started, for the estimate :attr:`wait_s`."""
        self._intervals.append(request.begun - max(self._last, request.arrived))
        self._last = request.begun
