"""How many replicas there should be, by what their engines say. Ray Serve pickles this module by value.

A replica's capacity is not a number of requests: rows of 4k tokens fit by the dozen, of 128k perhaps nine. So each
replica tells how many rows it has found to fit (:class:`Fitting`), which shows when requests wait or are held back.
"""

from __future__ import annotations

from typing import Any


class Fitting:
    """How many rows an engine has found to decode together.

    Args:
        max_rows: that it may decode; what is assumed until requests have waited.
    """

    def __init__(self, max_rows: int) -> None:
        self.rows = self._most = max_rows

    def seen(self, running: int, waiting: int, held: int, prefilling: int) -> int:
        """Learn from what an engine does now; gives the rows that fit."""
        busy = running + prefilling
        if waiting or held:  # memory for blocks, working sets or the time for prompts is used up
            self.rows = min(self._most, max(1, busy))
        else:
            self.rows = max(self.rows, min(self._most, busy))
        return self.rows


class ByRows:
    """As many replicas as decode all requests together, those that wait or are held back included.

    Args:
        target: share of the rows that fit which should be in use, in (0, 1].
    """

    def __init__(self, target: float = 0.8) -> None:
        if not 0 < target <= 1:
            raise ValueError(f"target must be in (0, 1], got {target!r}")
        self._target = target

    def __call__(self, ctx) -> tuple[float, dict[str, Any]]:
        """Replicas wanted, and no state; bounds, delays and smoothing are Ray's (``autoscaling_config``)."""
        metrics = ctx.aggregated_metrics or {}
        asked, fits = metrics.get("asked") or {}, metrics.get("fits") or {}
        if not asked or not fits:  # no replica has told yet
            return ctx.target_num_replicas, {}
        rows = sum(asked.values()) + ctx.total_queued_requests
        return rows * len(fits) / (self._target * sum(fits.values())), {}
