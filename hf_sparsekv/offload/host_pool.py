"""Host memory that grows in place, page-locked so that the GPU reads it where it is.

torch's pinned memory is rounded up to powers of two, is pinned at about 2 GB/s (measured on an H200 machine), and moves
when it grows. Here address space is reserved once, and its front is *committed* step by step: made writable, touched by
several threads (to be handed zeroed pages is what takes long), registered with CUDA. So a tensor over it never moves
while it grows, and captured steps go on reading it.

Each step is a registration of its own. A kernel reads across the border of two: they are one range of addresses. A
``cudaMemcpy`` must not: CUDA documents copies for regions that are registered entirely or not at all, and copies over
two registrations were seen to fail with ``invalid argument``. Steps are whole blocks, so the copy of a block never
meets a border; :meth:`HostArena.runs` cuts longer ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .host_limit import HostBudget

PAGE = mmap.PAGESIZE
_HUGE = 2 << 20
_MIN_RESERVE = 4 << 30  # of addresses, which cost nothing: a million tokens of one layer with 8 heads of 128 in bf16
_RESERVE_AHEAD = 8  # times what is needed; bounded, because all layers together must leave addresses to CUDA
_TOUCH_THREADS = 8
_TOUCH_PIECE = 32 << 20  # enough to be worth a thread, small enough to share out evenly
_NORESERVE, _NO_ACCESS, _READ_WRITE = 0x4000, 0, 3  # linux/mman.h; mmap has no names for all of them before 3.13
_DONTNEED, _DONTFORK, _DOFORK, _HUGEPAGE, _POPULATE_WRITE = 4, 10, 11, 14, 23
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister: pinned for every context, and readable by kernels


class _Cuda:
    """What is asked of CUDA; tests put an imitation into ``cuda``."""

    def register(self, address: int, size: int, device: torch.device) -> int:
        """Page-lock; returns an error code, 0 if it worked."""
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE | _MAPPED))
        if code:
            self._forget_error(device)
        return code

    def unregister(self, address: int, device: torch.device) -> int:
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostUnregister(address))
        if code:
            self._forget_error(device)
        return code

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @staticmethod
    def _forget_error(device: torch.device) -> None:
        """CUDA keeps the error for the next kernel launch to report: launch one that nobody waits for."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device).add_(1)


cuda = _Cuda()


# ---------------------------------------------------------------------- pages


@functools.cache
def _libc() -> ctypes.CDLL:
    """ctypes, because its calls release the GIL and mmap's do not; and because mmap objects unmap when they like."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for name, arguments in (("munmap", []), ("mprotect", [ctypes.c_int]), ("madvise", [ctypes.c_int])):
        getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t, *arguments]
    return libc


def _reserve(size: int) -> int | None:
    """Address of ``size`` bytes that cannot be used yet; None if there are not so many addresses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    address = _libc().mmap(None, size, _NO_ACCESS, flags, -1, 0)
    return None if address == ctypes.c_void_p(-1).value else address


def _unmap(address: int, size: int) -> None:
    _libc().munmap(address, size)


def _open(address: int, size: int) -> None:
    """Make reserved bytes usable.

    Raises:
        MemoryError: the system does not promise so much (``vm.overcommit_memory = 2``).
    """
    if _libc().mprotect(address, size, _READ_WRITE):
        raise MemoryError(f"the system refuses {size / 2**30:.2f} GiB of memory ({os.strerror(ctypes.get_errno())})")


def _close(address: int, size: int) -> None:
    """Return the pages, keep the addresses."""
    _libc().madvise(address, size, _DONTNEED)
    _libc().mprotect(address, size, _NO_ACCESS)


def _populate(address: int, size: int) -> None:
    """Have the kernel put zeroed pages under these addresses."""
    if _libc().madvise(address, size, _POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise MemoryError(f"the system has no {size >> 20} MiB of memory left ({os.strerror(code)})")
    ctypes.memset(address, 0, size)  # before Linux 5.14


def touch(address: int, size: int, threads: int = _TOUCH_THREADS, cpus: set[int] | None = None) -> None:
    """Populate with several threads, which run on ``cpus``: pages come from the memory beside the CPU that asks first.

    Raises:
        MemoryError: some pages could not be had. No thread is still at work then.
    """
    pieces = [(at, min(_TOUCH_PIECE, address + size - at)) for at in range(address, address + size, _TOUCH_PIECE)]

    def place() -> None:
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)  # of this thread only

    threads = min(threads, len(pieces), len(_own_cpus()))
    if threads == 1 and not cpus:
        for piece in pieces:
            _populate(*piece)
        return
    with ThreadPoolExecutor(threads, initializer=place) as workers:
        for _ in workers.map(lambda piece: _populate(*piece), pieces):
            pass


def _own_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


@functools.cache
def near_cpus(device: torch.device, root: Path = Path("/sys")) -> frozenset[int] | None:
    """CPUs of the GPU's NUMA node that this process may use; None if there is one node only, or nobody knows."""
    try:
        if len(list((root / "devices/system/node").glob("node[0-9]*"))) < 2:
            return None
        gpu = torch.cuda.get_device_properties(device)
        name = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((root / "bus/pci/devices" / name / "numa_node").read_text())  # -1: unknown
        listed = (root / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError, AttributeError, RuntimeError, AssertionError):
        return None
    cpus: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus & _own_cpus()) or None


# ---------------------------------------------------------------------- arena


@dataclass
class _Held:
    """What must be given back when nobody uses the memory any more."""

    mapped: tuple[int, int]  # address and size for munmap
    budget: HostBudget
    device: torch.device
    committed: int = 0
    registered: list[tuple[int, int]] = field(default_factory=list)  # address and size
    pid: int = field(default_factory=os.getpid)

    def unregister(self) -> None:
        """Nothing on the device may use the memory any more, so wait for it first."""
        if self.registered and self.pid == os.getpid():  # a forked child has no CUDA context
            with contextlib.suppress(RuntimeError):  # an earlier error of the device, which is not ours to report
                cuda.synchronize(self.device)
            while self.registered:
                address, size = self.registered.pop()
                with contextlib.suppress(RuntimeError):
                    cuda.unregister(address, self.device)
                _libc().madvise(address, size, _DOFORK)


_waiting: list[_Held] = []  # died while a graph was being captured


def _release(held: _Held) -> None:
    """Give everything back. Runs when the last tensor over an arena dies, possibly inside a garbage collection."""
    if held.registered and cuda.capturing():
        _waiting.append(held)  # waiting for the device would spoil the capture
        return
    held.unregister()
    _unmap(*held.mapped)
    held.budget.give(held.committed)


def _release_waiting() -> None:
    while _waiting and not cuda.capturing():
        _release(_waiting.pop())


class HostArena:
    """Host memory for one pool. Its first ``committed`` bytes can be used; more can be committed, in place.

    Tensors over it keep it alive. It is unregistered and unmapped when the arena and the last of them are gone, after
    waiting for the device. At the end of the process nothing is done: the system releases both, and a ``generate()`` in
    a daemon thread may still be reading.

    Args:
        size: bytes to commit at once.
        budget: counts the committed bytes.
        device: whose kernels will read the memory.
        pin: page-lock it. If that fails, all of it goes on pageable and one warning per cache says so; with
            ``OffloadConfig(pin_memory=True)`` it is an error.

    Raises:
        MemoryError: the budget or the system has no room.
        RuntimeError: pinning failed and was demanded.
    """

    def __init__(self, size: int, budget: HostBudget, device: torch.device, pin: bool) -> None:
        _release_waiting()
        budget.check(size)  # before the addresses: its message helps
        self.device, self.pinned = device, pin and not budget.pinning_failed
        self.borders: list[int] = []  # ends of the steps, in bytes
        least = -(-size // PAGE) * PAGE
        want = max(least, min(budget.limit, max(_MIN_RESERVE, _RESERVE_AHEAD * size)) // PAGE * PAGE)
        address = _reserve(want + _HUGE)
        while address is None and want > least:  # ulimit -v: less room to grow in place
            want = max(least, want // 2 // PAGE * PAGE)
            address = _reserve(want + _HUGE)
        if address is None:
            raise MemoryError(
                f"no address space for {least / 2**30:.2f} GiB of offloaded KV: raise the limit (ulimit -v)"
            )
        self.reserved = want
        self._start = -(-address // _HUGE) * _HUGE  # large pages start at their multiples
        self._held = _Held((address, want + _HUGE), budget, device)
        weakref.finalize(self, _release, self._held).atexit = False
        _libc().madvise(self._start, want, _HUGEPAGE)  # fewer pages to hand out and to pin; it may be refused
        self.commit(size)

    @property
    def committed(self) -> int:
        """Bytes that can be used, whole pages."""
        return self._held.committed

    @property
    def address(self) -> int:
        return self._start

    def commit(self, size: int) -> None:
        """Make the first ``size`` bytes usable; at most ``reserved``. What is there stays where it is.

        Raises:
            MemoryError, RuntimeError: as the constructor. Nothing has changed then.
        """
        _release_waiting()
        held = self._held
        end = -(-size // PAGE) * PAGE
        if end > self.reserved:
            raise ValueError(f"{end} bytes exceed the {self.reserved} that are reserved")
        if end <= held.committed:
            return
        step = self._start + held.committed, end - held.committed
        held.budget.take(step[1])
        try:
            _open(*step)
            if self.pinned:
                # Pageable memory is touched by whoever writes it first.
                touch(*step, cpus=near_cpus(self.device))
                self._pin(step)
        except BaseException:
            if step in held.registered:
                held.registered.remove(step)
                cuda.unregister(step[0], self.device)
            _close(*step)
            held.budget.give(step[1])
            raise
        held.committed = end
        self.borders.append(end)

    def _pin(self, step: tuple[int, int]) -> None:
        held = self._held
        held.registered.append(step)  # before it is true: an interrupt may come right after
        code = cuda.register(*step, self.device)
        if code == 0:
            # A fork would copy pinned pages at once, all of them; and the child could not use CUDA.
            _libc().madvise(*step, _DONTFORK)
            return
        held.registered.pop()
        problem = f"{step[1] / 2**30:.2f} GiB of host memory could not be pinned (cudaHostRegister: error {code})"
        if held.budget.config.pin_memory:
            raise RuntimeError(
                f"{problem}. Use OffloadConfig(pin_memory=None) to go on with pageable memory, or False not to try"
            )
        held.unregister()  # is_pinned() asks about the first bytes only: pin all of it or nothing
        self.pinned = False
        first, held.budget.pinning_failed = not held.budget.pinning_failed, True
        if first:
            warnings.warn(
                f"{problem}: offloaded blocks stay in pageable memory. The result is the same, but every step copies "
                "the selected tokens through the CPU, and decode steps are not captured. See docs/host-memory.md",
                stacklevel=2,
            )

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the first bytes. It keeps the arena alive, and so does every view of it."""
        size = dtype.itemsize
        for n in shape:
            size *= n
        if size > self.committed:
            raise ValueError(f"{size} bytes asked for, {self.committed} are committed")
        return torch.from_numpy(np.asarray(_Bytes(self, size))).view(dtype).view(shape)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut bytes ``start .. stop - 1`` where registrations meet: one ``cudaMemcpy`` may copy each part."""
        for border in self.borders:
            if start < min(border, stop):
                yield start, min(border, stop)
                start = border


class _Bytes:
    """The first bytes of an arena, for numpy, which keeps whom it got its memory from."""

    def __init__(self, arena: HostArena, size: int) -> None:
        self.arena = arena
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (arena.address, False)}
