"""Pages of host memory: reserve addresses, back them with memory, and choose the NUMA node."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from .host_limit import readable
from .link import pci_folder

PAGE = mmap.PAGESIZE
HUGE = 2 << 20  # a large page of x86-64 and, mostly, arm64
DONTFORK, DOFORK, HUGEPAGE = 10, 11, 14  # linux/mman.h; Python's mmap has no names for all that is used here
_NORESERVE, _NO_ACCESS, _READ_WRITE, _DONTNEED, _POPULATE_WRITE = 0x4000, 0, 3, 4, 23
_TOUCH_THREADS = 8
_TOUCH_PIECE = 32 << 20  # large enough to be worth a thread, small enough to balance them


@functools.cache
def _libc() -> ctypes.CDLL:
    """libc, through ctypes: its calls release the GIL, ``mmap``'s do not, and ``mmap`` objects unmap themselves."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for name, arguments in (("munmap", []), ("mprotect", [ctypes.c_int]), ("madvise", [ctypes.c_int])):
        getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, *arguments]
    return libc


def reserve(size: int) -> int | None:
    """Address of ``size`` bytes that cannot be used yet; None if there is not enough address space."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    address = _libc().mmap(None, size, _NO_ACCESS, flags, -1, 0)
    return None if address == ctypes.c_void_p(-1).value else address


def unmap(address: int, size: int) -> None:
    """Give reserved address space back to the system."""
    _libc().munmap(address, size)


def open_pages(address: int, size: int) -> None:
    """Make reserved bytes usable.

    Raises:
        MemoryError: the system does not commit that much (``vm.overcommit_memory = 2``).
    """
    if _libc().mprotect(address, size, _READ_WRITE):
        raise MemoryError(f"the system refuses {readable(size)} of memory ({os.strerror(ctypes.get_errno())})")


def advise(address: int, size: int, advice: int) -> None:
    """madvise; ignored by systems that do not support the advice."""
    _libc().madvise(address, size, advice)


def close_pages(address: int, size: int) -> None:
    """Return the pages, keep the addresses."""
    advise(address, size, _DONTNEED)
    _libc().mprotect(address, size, _NO_ACCESS)


def populate(address: int, size: int) -> None:
    """Let the kernel back these addresses with zeroed pages."""
    if _libc().madvise(address, size, _POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise MemoryError(f"the system has no {size >> 20} MiB of memory left ({os.strerror(code)})")
    ctypes.memset(address, 0, size)  # before Linux 5.14


def touch(address: int, size: int, threads: int = _TOUCH_THREADS, cpus: set[int] | None = None) -> None:
    """Populate with several threads on ``cpus``: a page comes from the NUMA node that touches it first.

    Raises:
        MemoryError: the system has too few pages. All threads have ended by the time it is raised.
    """
    pieces = [(at, min(_TOUCH_PIECE, address + size - at)) for at in range(address, address + size, _TOUCH_PIECE)]

    def place() -> None:
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)  # of this thread only

    threads = min(threads, len(pieces), len(_own_cpus()))
    if threads == 1 and not cpus:
        for piece in pieces:
            populate(*piece)
        return
    with ThreadPoolExecutor(threads, initializer=place) as workers:
        for _ in workers.map(lambda piece: populate(*piece), pieces):
            pass


def _own_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@functools.cache
def near_cpus(device: torch.device, root: Path = Path("/sys")) -> frozenset[int] | None:
    """CPUs of the GPU's NUMA node that this process may use; None if there is one node only, or it is unknown."""
    try:
        if len(list((root / "devices/system/node").glob("node[0-9]*"))) < 2:
            return None
        node = int((pci_folder(device, root) / "numa_node").read_text())  # -1: unknown
        listed = (root / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError, AttributeError, RuntimeError, AssertionError):
        return None
    cpus: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus & _own_cpus()) or None
