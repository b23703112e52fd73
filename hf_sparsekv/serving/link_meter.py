"""Bytes over the link between host and device, for metrics.

Counting waits for the device. So the loop's thread counts, and only on request.
"""

from __future__ import annotations

import time

from .work import Work

LINK_S = 1.0  # seconds between two counts, at least: the host waits for the device, then reads from each layer


class LinkMeter:
    """Counts bytes over the link since it was made, at most once a second.

    Args:
        work: operations on the model and its rows, which move the bytes.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._before = work.link_bytes()  # moved by trial steps
        self._counted, self._asked, self._next = 0, False, 0.0

    def bytes(self) -> int:
        """The last count; it requests a new one. Any thread may call this."""
        self._asked = True
        return self._counted

    def count(self) -> None:
        """Count if :meth:`bytes` was called since. On the loop's thread."""
        if self._asked and time.monotonic() >= self._next:
            self._asked, self._next = False, time.monotonic() + LINK_S
            self._counted = self._work.link_bytes() - self._before
