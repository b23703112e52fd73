"""Blocks or tokens that an offloaded cache's decode steps needed, found on the device, and read over the link."""

from __future__ import annotations

from dataclasses import dataclass

from hf_sparsekv.cache import SparseCache
from hf_sparsekv.policies.measured import PackStats

from .report import Report


@dataclass(frozen=True)
class Traffic:
    """Traffic of the steps between two looks at a cache's counters.

    Args:
        steps: how many.
        hit_rate: share of what was chosen, blocks or tokens (of one KV head), that was on the device; None where
            nothing is kept there.
        missed: bytes a step of what was not. Where nothing is kept: the same as ``host``.
        host: bytes a step that crossed the link: blocks fetched, and tokens read in place.
    """

    steps: int
    hit_rate: float | None
    missed: float
    host: float

    def add_to(self, report: Report) -> None:
        """As rows, in MB (10^6 bytes) a step."""
        if self.hit_rate is not None:
            report.add("hit_rate", self.hit_rate, "share")
        report.add("missed_mb", self.missed / 1e6, "MB")
        report.add("host_mb", self.host / 1e6, "MB")


class Meter:
    """Reads a cache's counters, and tells what has changed since :meth:`restart`. Both wait for the device."""

    def __init__(self, cache: SparseCache) -> None:
        self.cache = cache
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self._before = self._totals()

    def _totals(self) -> tuple[int, int, int, int, int]:
        """Steps, host bytes, blocks or tokens needed and found, bytes of those not found."""
        stats, missed = self.cache.stats(), 0
        pools = self.cache.device_pools
        for pool in () if pools is None else pools.pools.values():
            if pool is not None:
                counted = pool.counters()
                missed += (counted["needed"] - counted["found"]) * pools.link_bytes(pool)
        for layer in self.cache.sparse_layers:
            missed += sum(one.bytes for one in layer.policy.measured() if isinstance(one, PackStats))
        return stats.decode_steps, stats.host_to_device_bytes, stats.needed, stats.found, missed

    def read(self) -> Traffic:
        """Since the restart.

        Raises:
            ValueError: there was no step.
        """
        steps, host, needed, found, missed = (b - a for a, b in zip(self._before, self._totals()))
        if not steps:
            raise ValueError("no decode step since the counters were looked at")
        if not needed:
            missed = host
        return Traffic(steps, found / needed if needed else None, missed / steps, host / steps)
