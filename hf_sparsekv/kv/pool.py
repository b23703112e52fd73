"""The block pool: storage for the full blocks of one cache layer."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..offload.copy_streams import Pending
from ..offload.host_limit import HostBudget
from ..offload.host_pages import PAGE
from ..offload.host_pool import HostArena
from ..ops.storage.block_copy import block_copy, gather_blocks
from ..ops.storage.quantise import quantise
from ..tensors import no_inference_mode
from .block_ids import BlockIds, bucket
from .memory import new_memory


def _pins(host: HostBudget, device: torch.device) -> bool:
    """Host blocks of this device are to be page-locked."""
    return device.type == "cuda" and host.config.pin_memory is not False


def room(blocks: int, device: torch.device) -> int:
    """Capacity of a pool that is to hold so many blocks.

    On a GPU 16 at least: captured steps are captured again when a pool has grown. On a CPU a short prompt takes little.
    """
    return bucket(blocks, least=1) if device.type == "cpu" else bucket(blocks)


class User(Protocol):
    """A user of a pool: the device pages of a layer."""

    def forget(self, ids: Tensor) -> None:
        """Drop what is kept about these blocks, int64 ``[n]`` in the CPU's memory: they mean nothing any more."""


class BlockPool:
    """Block pool of one layer. A block holds ``block_size`` tokens of one row, for all KV heads.

    A block is written once, when it is full, and never changed: rows, beams and copies of a cache share blocks by
    holding the same ids in their block tables (:mod:`.block_ids` says which ids are free).

    Attributes:
        kv: ``[capacity, H, block_size, Dk + Dv]``: each token's key, then its value. Side by side because the
            token-level kernels read both: twice the in-place read rate from host memory. On the device, or in host
            memory (pinned where there is a GPU) when offloaded; host blocks stay where they are when the pool grows.
            With ``OffloadConfig(kv_dtype="int8")`` codes, whose scales are the field ``"scales"``
            (``[H, 2 Dk + block_size]`` float16 a block, see ``ops.storage.quantise``). These are on the device, so that
            rows in host memory stay aligned and are read with few requests.
        dtype: of keys and values, which codes become again.
        split: entries of a key.
        fields: what is kept per physical block beside it, always on the device: what the selection policy asks for
            with :meth:`add_field`.
    """

    def __init__(
        self,
        *,
        heads: int,
        block_size: int,
        token_dim: int,
        split: int,
        dtype: torch.dtype,
        device: torch.device,
        host: HostBudget | None,
        capacity: int,
        ids: BlockIds,
    ) -> None:
        self.device, self.host, self.ids, self.dtype, self.split = device, host, ids, dtype, split
        coded = host is not None and host.config.kv_dtype is not None
        kept = torch.int8 if coded else dtype
        self.fields: dict[str, Tensor] = {}
        self._addresses: tuple[int, ...] | None = None
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self._pending = Pending()
        self._block_bytes = heads * block_size * token_dim * kept.itemsize
        self._arena: HostArena | None = None
        self.capacity = self._whole_pages(capacity)
        self.kv = self._new_kv(self.capacity, (heads, block_size, token_dim), kept, 0)
        if coded:
            self.add_field("scales", (heads, 2 * split + block_size), torch.float16)
        ids.register(self)

    def __deepcopy__(self, memo: dict) -> BlockPool:
        return self  # full blocks never change: copies of a cache share them

    def _whole_pages(self, capacity: int) -> int:
        """``capacity`` rounded up to whole host pages: memory is committed, counted and pinned by the page.

        The physical blocks of the usual models are whole pages themselves.
        """
        if self.host is None:
            return capacity
        step = math.lcm(self._block_bytes, PAGE) // self._block_bytes
        return -(-capacity // step) * step

    @no_inference_mode
    def _new_kv(self, capacity: int, shape: tuple[int, ...], dtype: torch.dtype, kept: int) -> Tensor:
        """Room for ``capacity`` physical blocks; the first ``kept`` keep their contents."""
        arena, size = None, capacity * self._block_bytes
        if self.host is None:
            new = new_memory("blocks", (capacity, *shape), dtype, self.device)
        else:
            # The steps are those of the capacity, a quarter to a seventh of what is there. A minimum in bytes would
            # be multiplied by the number of layers, which grow together.
            if self._arena is not None and size <= self._arena.reserved:
                self._arena.commit(size)
                return self._arena.tensor((capacity, *shape), dtype)
            arena = HostArena(size, self.host, self.device, _pins(self.host, self.device))
            new = arena.tensor((capacity, *shape), dtype)
        if kept:
            if self.host is not None and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a kernel may still be writing a block in place
            new[:kept] = self.kv[:kept]
        self._arena = arena
        return new

    @no_inference_mode
    def add_field(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Keep a tensor ``[capacity, *shape]`` on the device beside the blocks."""
        self.fields[name] = new_memory(name, (self.capacity, *shape), dtype, self.device)
        self._addresses = None

    def register(self, user: User) -> None:
        """Register ``user``, who reads this pool until it is deleted."""
        self._users.add(user)

    def in_use_until(self, event: torch.cuda.Event) -> None:
        """A copy stream reads or writes blocks or fields until ``event``, also if its user is deleted before."""
        self._pending.add(event)

    def wait_for_copies(self) -> None:
        """Make the current stream wait until no copy stream uses blocks or fields."""
        self._pending.wait(self.device)

    def forget(self, ids: Tensor) -> None:
        """These blocks mean nothing any more, and other rows may get them.

        A prompt that was dropped may still be on its way to them. Its writes must not follow those of the next owner,
        which another copy stream makes: that stream waits for the current one.
        """
        self.wait_for_copies()
        for user in list(self._users):
            user.forget(ids)

    def fit(self) -> None:
        """Make room for all ids that were given out.

        Raises:
            MemoryError: the pool is in host memory and would exceed its limit. The pool is unchanged.
        """
        if self.ids.used > self.capacity:
            self._grow(room(self.ids.used, self.device))

    def reserve(self, blocks: int) -> None:
        """Make room for so many blocks at once. Raises as :meth:`fit` does."""
        if blocks > self.capacity:
            self._grow(blocks)

    def copy_blocks(self, old: Tensor, new: Tensor) -> None:
        """Copy blocks ``old`` to ``new``, int64 ``[n]`` each, in the CPU's memory."""
        self.fit()
        self.wait_for_copies()
        if self.direct:
            torch.cuda.synchronize(self.device)  # a kernel may still be writing a block in place
        for held in (self.kv, *self.fields.values()):
            at = old.to(held.device), new.to(held.device)
            held[at[1]] = held[at[0]]

    @no_inference_mode
    def _grow(self, capacity: int) -> None:
        capacity = self._whole_pages(capacity)
        self.wait_for_copies()  # another stream may still read the fields
        fields = {}
        for name, field in self.fields.items():
            fields[name] = new_memory(name, (capacity, *field.shape[1:]), field.dtype, self.device)
            fields[name][: self.capacity] = field
        # The last call that can fail; nothing has changed before it.
        self.kv = self._new_kv(capacity, self.kv.shape[1:], self.kv.dtype, self.capacity)
        self.fields, self.capacity = fields, capacity
        self._addresses = None
        self.ids.moves += 1

    @property
    def coded(self) -> dict:
        """Further arguments of operators that read :attr:`kv`: scales, and how many entries the first one is for."""
        return {"scales": self.fields.get("scales"), "split": self.split}

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the pool's tensors. The fields move when the pool grows, host blocks do not."""
        if self._addresses is None:  # cached, because every step reads it
            self._addresses = (self.kv.data_ptr(), *(field.data_ptr() for field in self.fields.values()))
        return self._addresses

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut blocks ``start .. stop - 1`` into ranges for one ``cudaMemcpy`` each, see :mod:`..offload.host_pool`."""
        if self._arena is None:
            yield start, stop
            return
        size = self._block_bytes
        for first, last in self._arena.runs(start * size, stop * size):
            yield first // size, last // size

    @property
    def direct(self) -> bool:
        """Blocks lie in host memory that the GPU reads and writes in place."""
        return self._arena is not None and self._arena.pinned and self.device.type == "cuda"

    def write(self, physical_ids: Tensor | None, kv: Tensor, first: int | None = None) -> None:
        """Fill blocks with ``kv [n, H, block_size, Dk + Dv]`` from the device, in the order of the current stream.

        Codes are made of it on the device, before it goes over the link.

        The host waits only if memory is not pinned.

        Args:
            physical_ids: int32 ``[n]`` on the device. None: ``first`` says it, and the pool has no scales.
            first: the first physical block, if they follow each other: then one large copy does it.
        """
        if "scales" in self.fields:
            kv, scales = quantise(kv, self.split)
            assert physical_ids is not None
            self.note(physical_ids, scales=scales)
        n = len(kv)
        if not self.direct:
            home = self.kv.device
            if first is not None:
                self.kv[first : first + n] = kv.to(home)
            else:
                assert physical_ids is not None
                self.kv[physical_ids.to(home).long()] = kv.to(home)
        elif first is not None:
            for start, stop in self.runs(first, first + n):  # 55 GB/s by the copy engine, an H200's link
                self.kv[start:stop].copy_(kv[start - first : stop - first], non_blocking=True)
        else:  # 51 GB/s by a kernel
            assert physical_ids is not None
            heads = torch.arange(self.kv.shape[1], dtype=torch.int32, device=kv.device)
            source = torch.arange(kv.shape[0] * kv.shape[1], dtype=torch.int32, device=kv.device)
            target = (physical_ids[:, None] * self.kv.shape[1] + heads).flatten()
            copies = torch.stack((source, target.int()), dim=1)
            block_copy(kv.contiguous(), self.kv.flatten(0, 1), copies, copies.new_full((1,), len(copies)))

    def launch_once(self) -> None:
        """Launch the kernel of :meth:`write` over no block, so that later ones need not wait for a compiler."""
        if self.direct:
            kv = self.kv.new_empty((1, *self.kv.shape[1:]), device=self.device)
            nothing = torch.zeros(1, 2, dtype=torch.int32, device=self.device)
            block_copy(kv, self.kv.flatten(0, 1), nothing, nothing.new_zeros(1))

    def note(self, physical_ids: Tensor, **fields: Tensor) -> None:
        """Fill named fields of physical blocks: ``[n, ...]`` on the device."""
        for name, value in fields.items():
            self.fields[name][physical_ids.long()] = value.to(self.fields[name].dtype)

    def read(self, physical_ids: Tensor, out: Tensor) -> None:
        """Copy blocks to the device, in the order of the current stream.

        Args:
            physical_ids: int32 ``[batch, n]`` on the device. The result for -1, or for a block that is not here yet,
                is undefined.
            out: ``[batch, H, m, block_size, Dk + Dv]``, m >= n, contiguous; its first ``n`` blocks are written.
        """
        if physical_ids.shape[1]:
            gather_blocks(self.kv, physical_ids, out, **self.coded)

    def nbytes(self) -> tuple[int, int]:
        """Bytes allocated on the device and in host memory."""
        on_device = sum(f.nbytes for f in self.fields.values())
        return (on_device, self.kv.nbytes) if self.host is not None else (on_device + self.kv.nbytes, 0)
