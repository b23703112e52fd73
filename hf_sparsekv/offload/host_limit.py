"""The limit of host memory that a cache may take."""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil

from hf_sparsekv_config.sparse import OffloadConfig

DEFAULT_SHARE = 0.8  # of the machine or container; the rest is for weights in transit, tokenizers, the page cache
_STAYS = 1.0  # seconds for which a looked-up limit stays valid
_ROOT = Path("/")
_lock = (
    threading.RLock()
)  # of all budgets; memory may be returned in the middle of taking some, by a garbage collection


def _unlock() -> None:
    """Replace the lock in a forked child, where the thread that held it does not exist."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def host_memory_limit() -> int:
    """Most bytes of memory this process may use: the machine's memory, or a lower limit of its control group."""
    return min([_machine_bytes(), *_group_limits()])


def _machine_bytes() -> int:
    """Memory of the machine.

    MemTotal counts the memory that the kernel manages *now*. Virtual machines with lazy memory initialisation start
    with a quarter of it (measured: 31 of 128 GiB) and add the rest when it is used. A limit from MemTotal, let alone
    MemAvailable, would be too low. The zones report all present memory from the start. Memory taken by a balloon is
    present too, but cannot be used.
    """
    present = ballooned = 0
    for line in _lines("proc/zoneinfo"):
        name, _, value = line.strip().partition(" ")
        if name == "present":
            present += int(value) * mmap.PAGESIZE
    if present:
        counts = dict(line.split() for line in _lines("proc/vmstat"))
        inflated = int(counts.get("balloon_inflate", 0)) - int(counts.get("balloon_deflate", 0))
        ballooned = int(counts.get("nr_balloon_pages", max(inflated, 0))) * mmap.PAGESIZE
    return max(psutil.virtual_memory().total, present - ballooned)


def _group_limits() -> Iterator[int]:
    """Limits of this process's control group and of those around it, versions 1 and 2."""
    for line in ["0::/", "0:memory:/", *_lines("proc/self/cgroup")]:  # in a container the file may name a host's path
        _, controllers, path = line.strip().split(":", 2)
        if controllers == "":
            top, names = "sys/fs/cgroup", ("memory.max", "memory.high")
        elif "memory" in controllers.split(","):
            top, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes",)
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            for name in names:
                for value in _lines(_ROOT / top / folder / name):
                    if value.strip().isdigit():  # or "max"
                        yield int(value)


def _lines(path: str | Path) -> list[str]:
    try:
        return (_ROOT / path).read_text().splitlines()
    except OSError:  # no such controller, or not Linux
        return []


def readable(n: float) -> str:
    """Bytes as people read them: ``12.5 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


_budgets: weakref.WeakSet[HostBudget] = weakref.WeakSet()  # of this process


class HostBudget:
    """Host bytes that the layers of one cache may take together.

    ``max_host_bytes`` is a limit of this cache. The default limit is for the process: memory of its other caches counts
    too, because otherwise each cache would promise the same memory. Other processes are not considered.

    Attributes:
        used: bytes committed by its pools; reduced when their memory is released.
        pinning_failed: a pool of this cache could not be pinned, and a warning was issued.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self.used = 0
        self.pinning_failed = False
        self._looked_up: tuple[float, int] = (float("-inf"), 0)  # when, and what it was
        _budgets.add(self)

    @property
    def limit(self) -> int:
        """The limit in bytes. It is looked up again when memory grows, since a container's limit may be raised.

        A lookup takes a millisecond or more and is needed several times per layer of a prompt, so it is cached briefly.
        """
        if self.config.max_host_bytes:
            return self.config.max_host_bytes
        when, limit = self._looked_up
        if time.monotonic() - when > _STAYS:
            limit = int(DEFAULT_SHARE * host_memory_limit())
            self._looked_up = time.monotonic(), limit
        return limit

    def __deepcopy__(self, memo: dict) -> HostBudget:
        return self  # copies of a cache share its blocks, hence its budget

    def check(self, size: int) -> None:
        """Raise ``MemoryError`` if ``size`` more bytes are too many."""
        others, why = 0, ""
        if self.config.max_host_bytes is None:
            others = sum(other.used for other in list(_budgets) if other is not self)
            why = f" ({DEFAULT_SHARE:.0%} of what this machine or its container has)"
        if self.used + size + others <= self.limit:
            return
        self._looked_up = (float("-inf"), 0)  # the limit may have grown
        limit = self.limit
        if self.used + size + others <= limit:
            return
        drop = ""
        if others:
            why += f"; other caches of this process hold {readable(others)}"
            drop = "drop caches that are done, "
        raise MemoryError(
            f"the offloaded KV cache needs {readable(self.used + size)} of host memory, the limit is {readable(limit)}"
            f"{why}: {drop}shorten the context, lower the batch size, or raise OffloadConfig(max_host_bytes=...)"
        )

    def take(self, size: int) -> None:
        with _lock:
            self.check(size)
            self.used += size

    def give(self, size: int) -> None:
        with _lock:
            self.used -= size
