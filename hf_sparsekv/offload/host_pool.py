"""Host memory that grows in place, page-locked so that the GPU reads it where it is.

torch's pinned memory is rounded up to powers of two, is pinned at 3.8 GB/s (an H200 machine,
benchmarks/NOTES.md), and moves when it grows. Here address space is reserved once, and its front is *committed* step by
step. A step is made writable, touched by several threads (the kernel's zeroing of pages is the slow part), and
registered with CUDA. A tensor over the arena never moves while it grows, so captured steps stay valid.

Each step is a separate registration. Kernels may read across two registrations, because their addresses are contiguous.
A ``cudaMemcpy`` may not: CUDA documents copies for regions that are registered entirely or not at all. Copies over two
registrations failed with ``invalid argument``. Steps are whole blocks, so the copy of one block never crosses a border;
:meth:`HostArena.runs` splits longer copies.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .host_limit import HostBudget, readable
from .host_pages import (
    DOFORK,
    DONTFORK,
    HUGE,
    HUGEPAGE,
    PAGE,
    advise,
    close_pages,
    near_cpus,
    open_pages,
    reserve,
    touch,
    unmap,
)

_MIN_RESERVE = 4 << 30  # bytes of addresses, which are free: a million tokens of a layer with 8 heads of 128 in bf16
_RESERVE_AHEAD = 8  # multiple of the needed size; bounded, because all layers together must leave addresses to CUDA
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister: pinned for every context, and readable by kernels


class _Cuda:
    """The CUDA calls that are needed; tests replace ``cuda`` by a fake."""

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
        """Clear CUDA's error, which the next kernel launch would report: launch one without waiting for it."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device).add_(1)


cuda = _Cuda()


@dataclass
class _Held:
    """Resources that are released when the last tensor over the memory is deleted."""

    mapped: tuple[int, int]  # address and size for munmap
    budget: HostBudget
    device: torch.device
    committed: int = 0
    registered: list[tuple[int, int]] = field(default_factory=list)  # address and size
    pid: int = field(default_factory=os.getpid)

    def unregister(self) -> None:
        """Unregister the memory, after waiting for the device, which may still use it."""
        if self.registered and self.pid == os.getpid():  # a forked child has no CUDA context
            with contextlib.suppress(RuntimeError):  # an earlier error of the device, which is reported elsewhere
                cuda.synchronize(self.device)
            while self.registered:
                address, size = self.registered.pop()
                with contextlib.suppress(RuntimeError):
                    cuda.unregister(address, self.device)
                advise(address, size, DOFORK)


_waiting: list[_Held] = []  # deleted while a graph was being captured


def _release(held: _Held) -> None:
    """Release everything. Runs when the last tensor over an arena is deleted, possibly in a garbage collection."""
    if held.pid != os.getpid() and held.registered:
        held.budget.give(held.committed)
        return  # a forked child may have other memory at these addresses: pinned ranges are not inherited
    if held.registered and cuda.capturing():
        _waiting.append(held)  # waiting for the device would invalidate the capture
        return
    held.unregister()
    unmap(*held.mapped)
    held.budget.give(held.committed)


def _release_waiting() -> None:
    while _waiting and not cuda.capturing():
        _release(_waiting.pop())


class HostArena:
    """Host memory for one pool. Its first ``committed`` bytes can be used; more can be committed, in place.

    Tensors over it keep it alive. It is unregistered and unmapped when the arena and the last such tensor are deleted,
    after waiting for the device. At the end of the process nothing is released explicitly: the system does that, and a
    ``generate()`` in a daemon thread may still be reading.

    Args:
        size: bytes to commit at once.
        budget: counts the committed bytes.
        device: device whose kernels read the memory.
        pin: page-lock the memory. If that fails, all of it is pageable, with one warning per cache. With
            ``OffloadConfig(pin_memory=True)`` a failure is an error.

    Raises:
        MemoryError: the budget or the system has no room.
        RuntimeError: pinning failed and was required.
    """

    def __init__(self, size: int, budget: HostBudget, device: torch.device, pin: bool) -> None:
        _release_waiting()
        budget.check(size)  # before the addresses: its message helps
        self.device, self.pinned = device, pin and not budget.pinning_failed
        self.borders: list[int] = []  # ends of the steps, in bytes
        least = -(-size // PAGE) * PAGE
        want = max(least, min(budget.limit, max(_MIN_RESERVE, _RESERVE_AHEAD * size)) // PAGE * PAGE)
        address = reserve(want + HUGE)
        while address is None and want > least:  # ulimit -v: less room to grow in place
            want = max(least, want // 2 // PAGE * PAGE)
            address = reserve(want + HUGE)
        if address is None:
            raise MemoryError(f"no address space for {readable(least)} of offloaded KV: raise the limit (ulimit -v)")
        self.reserved = want
        self._start = -(-address // HUGE) * HUGE  # large pages start at their multiples
        self._held = _Held((address, want + HUGE), budget, device)
        weakref.finalize(self, _release, self._held).atexit = False
        advise(self._start, want, HUGEPAGE)  # fewer pages to hand out and to pin; it may be refused
        self.commit(size)

    @property
    def committed(self) -> int:
        """Bytes that can be used, whole pages."""
        return self._held.committed

    @property
    def address(self) -> int:
        return self._start

    def commit(self, size: int) -> None:
        """Make the first ``size`` bytes usable; at most ``reserved``. Existing content does not move.

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
            open_pages(*step)
            if self.pinned:
                # Pageable memory is committed by its first write.
                touch(*step, cpus=near_cpus(self.device))
                self._pin(step)
        except BaseException:
            if step in held.registered:
                held.registered.remove(step)
                with contextlib.suppress(RuntimeError):
                    cuda.unregister(step[0], self.device)
            close_pages(*step)
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
            advise(*step, DONTFORK)
            return
        held.registered.pop()
        problem = f"{readable(step[1])} of host memory could not be pinned (cudaHostRegister: error {code})"
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
    """The first bytes of an arena, for numpy, which keeps a reference to the owner of its memory."""

    def __init__(self, arena: HostArena, size: int) -> None:
        self.arena = arena
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (arena.address, False)}
