"""Times of a device's work, without a wait: the host runs ahead of a GPU, so its own clock says little of a step.

Apart from the loop because segments of ``generate()``'s own loop are timed as well.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Moments in the work of ``device``. Read what lies between them when it is done."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"

    def now(self) -> Any:
        """This moment in the device's work."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # which need not be on the current device
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Seconds."""
        return 1e-3 * begin.elapsed_time(end) if self._on_gpu else end - begin
