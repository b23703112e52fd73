"""Slots for full blocks: the storage under one cache layer."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..offload.host_limit import HostBudget, host_memory_limit
from ..offload.host_pages import PAGE
from ..offload.host_pool import HostArena
from ..ops.block_copy import block_copy

__all__ = ["BlockPool", "HostBudget", "bucket", "host_memory_limit"]

_MIN_SLOTS = 16


def bucket(n: int) -> int:
    """Smallest capacity of the form {4, 5, 6, 7} x 2^k (at least 16) that holds ``n`` items.

    Four sizes an octave: at most a quarter is unused, and growing item by item copies each item about four times
    in all.
    """
    n = max(n, _MIN_SLOTS)
    step = 1 << max((n - 1).bit_length() - 3, 0)
    return -(-n // step) * step


def _pins(host: HostBudget, device: torch.device) -> bool:
    """Host blocks of this device are to be page-locked."""
    return device.type == "cuda" and host.config.pin_memory is not False


class User(Protocol):
    """Who names slots of a pool.

    Attributes:
        slots: int32, -1 for none.
    """

    slots: Tensor

    def forget(self, slots: Tensor) -> None:
        """These slots are about to hold other blocks."""

    def settle(self) -> None:
        """What follows on the current stream comes after this user's work on others."""


class BlockPool:
    """Block slots of one layer. A slot holds one block of one row, for all KV heads.

    A slot is written once, when its block is sealed, and never changed after: rows, beams and copies of a cache
    share slots by naming the same slot in their tables. What nobody names any more is found again when the pool
    would have to grow.

    Attributes:
        kv: ``[capacity, H, block_size, Dk + Dv]``: each token's key, then its value. Side by side because the
            token-level kernels read both: twice the in-place read rate from host memory. On the device, or in host
            memory (pinned where there is a GPU) when offloaded; host blocks stay where they are when the pool grows.
        fields: what is kept per slot beside it, always on the device: ``flags`` uint8 ``[capacity, block_size]``
            (0 padding, 1 selectable, 3 sink), ``fill`` int32 ``[capacity]`` (number of selectable tokens), and the
            index fields that the selection policy asks for with :meth:`add_field`.
        loosened: a table may have stopped naming slots since somebody looked for free ones. Tables say so.
    """

    def __init__(
        self,
        *,
        heads: int,
        block_size: int,
        token_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        host: HostBudget | None,
        capacity: int,
    ) -> None:
        self.device, self.host = device, host
        self.used = 0
        self.fields: dict[str, Tensor] = {}
        self._addresses: tuple[int, ...] | None = None
        self._free: Tensor | None = None  # slots below `used` that nobody names, int32 on the device
        self._users: weakref.WeakSet = weakref.WeakSet()
        self._registered = self._gone = 0  # users there ever were, and how many had died at the last search
        self.loosened = False
        self.lock = threading.RLock()  # held from taking slots until a table names them
        self._slot_bytes = heads * block_size * token_dim * dtype.itemsize
        self._arena: HostArena | None = None
        self.capacity = self._whole_pages(capacity)
        self.kv = self._new_kv(self.capacity, (heads, block_size, token_dim), dtype)
        self.add_field("flags", (block_size,), torch.uint8)
        self.add_field("fill", (), torch.int32)

    def __deepcopy__(self, memo: dict) -> BlockPool:
        return self  # full blocks never change: copies of a cache share them

    def _whole_pages(self, capacity: int) -> int:
        """Slots that fill the host pages of ``capacity`` slots: pages are what is committed, counted and pinned.

        The slots of the usual models are whole pages themselves.
        """
        if self.host is None:
            return capacity
        step = math.lcm(self._slot_bytes, PAGE) // self._slot_bytes
        return -(-capacity // step) * step

    @torch.inference_mode(False)  # what lasts and is written in place is no inference tensor
    def _new_kv(self, capacity: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for ``capacity`` slots, the first ``used`` of which keep their contents."""
        arena, size = None, capacity * self._slot_bytes
        if self.host is None:
            new = torch.empty(capacity, *shape, dtype=dtype, device=self.device)
        else:
            # The steps are those of the capacity, a quarter to a seventh of what is there. A minimum in bytes would
            # be multiplied by the number of layers, which grow together.
            if self._arena is not None and size <= self._arena.reserved:
                self._arena.commit(size)
                return self._arena.tensor((capacity, *shape), dtype)
            arena = HostArena(size, self.host, self.device, _pins(self.host, self.device))
            new = arena.tensor((capacity, *shape), dtype)
        if self.used:
            if self.host is not None and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a kernel may still be writing a block in place
            new[: self.used] = self.kv[: self.used]
        self._arena = arena
        return new

    @torch.inference_mode(False)  # what lasts and is written in place is no inference tensor
    def add_field(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Keep a tensor ``[capacity, *shape]`` on the device beside the blocks."""
        self.fields[name] = torch.empty(self.capacity, *shape, dtype=dtype, device=self.device)
        self._addresses = None

    def register(self, user: User) -> None:
        """``user`` names slots of this pool for as long as it lives."""
        self._users.add(user)
        self._registered += 1

    @property
    def shared(self) -> bool:
        """More than one table names slots of this pool."""
        return len(self._users) > 1

    def release_all(self) -> None:
        """Forget all blocks; only for a pool that is not shared."""
        self.used, self._free = 0, None

    def allocate(self, n: int) -> Tensor:
        """Take ``n`` slots; grows the pool if it must. See :meth:`take`."""
        return self.take(n)[0]

    def take(self, n: int) -> tuple[Tensor, int | None]:
        """Take ``n`` slots; grows the pool if it must.

        Returns:
            int32 ``[n]`` on the device, and the first of them if they follow each other.

        Raises:
            MemoryError: the pool lies in host memory and would exceed its limit. The pool is unchanged.
        """
        with self.lock:
            if self.used + n > self.capacity:
                if self._free is None or len(self._free) < n:
                    self._find_free()
                # A search is worth it only if it makes room for a while; else grow.
                if len(self._free) >= max(n, self.capacity // 8):
                    slots, self._free = self._free[:n], self._free[n:]
                    for user in list(self._users):
                        user.forget(slots)
                    return slots, None
                self.loosened |= len(self._free) > 0  # these few are found again
                self._free = None
                self._grow(bucket(self.used + n))
            start = self.used
            self.used += n
            return torch.arange(start, start + n, dtype=torch.int32, device=self.device), start

    def _find_free(self) -> None:
        """Synchronises, so only when the pool is full and slots may have been left."""
        gone = self._registered - len(self._users)
        if not self.loosened and gone == self._gone:
            self._free = torch.empty(0, dtype=torch.int32, device=self.device)
            return
        self.loosened, self._gone = False, gone
        named = torch.zeros(self.used, dtype=torch.bool, device=self.device)
        for user in list(self._users):
            named[user.slots[user.slots >= 0].long()] = True
        self._free = (~named).nonzero().flatten().int()

    @torch.inference_mode(False)  # what lasts and is written in place is no inference tensor
    def _grow(self, capacity: int) -> None:
        capacity = self._whole_pages(capacity)
        for user in list(self._users):
            user.settle()  # a stream beside this one may still read the fields
        fields = {}
        for name, field in self.fields.items():
            fields[name] = torch.empty(capacity, *field.shape[1:], dtype=field.dtype, device=self.device)
            fields[name][: self.used] = field[: self.used]
        # Whatever fails has failed by the end of this line, and nothing has changed.
        self.kv = self._new_kv(capacity, self.kv.shape[1:], self.kv.dtype)
        self.fields, self.capacity = fields, capacity
        self._addresses = None

    @property
    def addresses(self) -> tuple[int, ...]:
        """Changes when a tensor has moved. The fields move when the pool grows, host blocks do not."""
        if self._addresses is None:  # every step asks
            self._addresses = (self.kv.data_ptr(), *(field.data_ptr() for field in self.fields.values()))
        return self._addresses

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut slots ``start .. stop - 1`` into ranges for one ``cudaMemcpy`` each, see :mod:`..offload.host_pool`."""
        if self._arena is None:
            yield start, stop
            return
        size = self._slot_bytes
        for first, last in self._arena.runs(start * size, stop * size):
            yield first // size, last // size

    @property
    def direct(self) -> bool:
        """Blocks lie in host memory that the GPU reads and writes in place."""
        return self._arena is not None and self._arena.pinned and self.device.type == "cuda"

    def write(self, slots: Tensor, kv: Tensor, first: int | None = None) -> None:
        """Fill slots with ``kv [n, H, block_size, Dk + Dv]`` from the device, in the order of the current stream.

        Only for memory that is not pinned does the host wait.

        Args:
            first: the first slot, if they follow each other: then one large copy does it.
        """
        n = len(slots)
        if not self.direct:
            home = self.kv.device
            if first is not None:
                self.kv[first : first + n] = kv.to(home)
            else:
                self.kv[slots.to(home).long()] = kv.to(home)
        elif first is not None:
            for start, stop in self.runs(first, first + n):  # 55 GB/s by the copy engine, an H200's link
                self.kv[start:stop].copy_(kv[start - first : stop - first], non_blocking=True)
        else:  # 51 GB/s by a kernel
            heads = torch.arange(self.kv.shape[1], dtype=torch.int32, device=kv.device)
            source = torch.arange(kv.shape[0] * kv.shape[1], dtype=torch.int32, device=kv.device)
            target = (slots[:, None] * self.kv.shape[1] + heads).flatten()
            copies = torch.stack((source, target.int()), dim=1)
            block_copy(kv.contiguous(), self.kv.flatten(0, 1), copies, copies.new_full((1,), len(copies)))

    def note(self, slots: Tensor, **fields: Tensor) -> None:
        """Fill named fields of slots: ``[n, ...]`` on the device."""
        for name, value in fields.items():
            self.fields[name][slots.long()] = value.to(self.fields[name].dtype)

    def read(self, slots: Tensor, out: Tensor) -> None:
        """Copy blocks to the device, in the order of the current stream.

        Args:
            slots: int32 ``[batch, n]`` on the device.
            out: ``[batch, H, m, block_size, Dk + Dv]``, m >= n, contiguous; its first ``n`` blocks are written.
        """
        batch, n = slots.shape
        heads, room = self.kv.shape[1], out.shape[2]
        if not n:
            return
        each = torch.arange(heads, dtype=torch.int32, device=slots.device)
        source = slots[:, None] * heads + each[:, None]  # [batch, H, n]
        rows = torch.arange(batch * heads, dtype=torch.int32, device=slots.device).view(batch, heads, 1)
        target = rows * room + torch.arange(n, dtype=torch.int32, device=slots.device)
        copies = torch.stack((source.flatten(), target.flatten()), dim=1).int()
        block_copy(self.kv, out.view(-1, *out.shape[3:]), copies, copies.new_full((1,), len(copies)))

    def nbytes(self) -> tuple[int, int]:
        """Bytes allocated on the device and in host memory."""
        on_device = sum(f.nbytes for f in self.fields.values())
        return (on_device, self.kv.nbytes) if self.host is not None else (on_device + self.kv.nbytes, 0)
