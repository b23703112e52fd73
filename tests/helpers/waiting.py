"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time


def wait_until(true, seconds: float = 10.0) -> None:
    """Wait for a condition, or fail."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it has not come true"
        time.sleep(0.005)
