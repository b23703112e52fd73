"""Times of a device's work, without a wait: the host runs ahead of a GPU, so its own clock says little of a step.

The loops of ``generate()`` and of an engine time their steps alike.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Measures the time between two points of a device's work."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"

    def mark(self) -> Any:
        """Mark a point in time: now, or on a GPU when it has done the work launched so far."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))  # which need not be on the current device
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks that the device has reached."""
        return 1e-3 * begin.elapsed_time(end) if self.cuda else end - begin

    def between(self, begin: Any, end: Any) -> float | None:
        """Milliseconds between two marks; None: the GPU has not reached the second one."""
        return None if self.cuda and not end.query() else 1e3 * self.seconds(begin, end)
