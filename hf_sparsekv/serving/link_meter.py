"""Bytes over the link between host and device, as an operator asks for them.

Counting waits for the device. So it is done on the loop's thread, and only where somebody has asked.
"""

from __future__ import annotations

import time

from .work import Work

LINK_S = 1.0  # bytes over the link are counted no more often: the host waits for the device, then reads from each layer


class LinkMeter:
    """Counts bytes over the link since it was made, at most once a second.

    Args:
        work: what moves them.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._before = work.link_bytes()  # that trials have moved
        self._counted, self._asked, self._next = 0, False, 0.0

    def bytes(self) -> int:
        """As last counted; has them counted again. Any thread may ask."""
        self._asked = True
        return self._counted

    def count(self) -> None:
        """Count if somebody has asked since. On the loop's thread."""
        if self._asked and time.monotonic() >= self._next:
            self._asked, self._next = False, time.monotonic() + LINK_S
            self._counted = self._work.link_bytes() - self._before
