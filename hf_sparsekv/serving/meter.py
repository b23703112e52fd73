"""Counts for metrics that wait for the device, so that the loop's thread takes them, and only on request.

Any thread asks for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

EACH_S = 1.0  # seconds between two counts, at least: the host waits for the device, then reads from each layer

T = TypeVar("T")


class Meter(Generic[T]):
    """The last result of ``count``, which is called at most once a second.

    Args:
        count: called on the loop's thread.
        first: the result until then.
    """

    def __init__(self, count: Callable[[], T], first: T) -> None:
        self._take, self._last = count, first
        self._asked, self._next = False, 0.0

    def last(self) -> T:
        """The last count; it requests a new one. Any thread may call this."""
        self._asked = True
        return self._last

    def count(self) -> None:
        """Count if :meth:`last` was called since. On the loop's thread."""
        if self._asked and time.monotonic() >= self._next:
            self._asked, self._next = False, time.monotonic() + EACH_S
            self._last = self._take()
