"""Device copies of an offloaded cache's blocks: the device pools of a cache, and the page table of each layer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from hf_sparsekv_config.sparse import OffloadConfig

from ..tensors import no_inference_mode
from .device_pool import DevicePool, free_bytes

# Selections of one step that a pool holds by default. On the recorded real model, twice the blocks of a step hit 96 to
# 98 %, four times 99 % (benchmarks/results/attention_statistics.csv).
SELECTIONS = 4
# The same for tokens, which consecutive selections share less. Room for 4, 8 and 16 selections holds 89, 93 and 95 % of
# a step's tokens with one in 64 chosen. With one in 16 it is 94, 97 and 98 % (the same model;
# benchmarks/results/foreseen_queries.csv).
TOKEN_SELECTIONS = 8
SHARE = 0.5  # of the free device memory, at most, by default


class Blocks(Protocol):
    """The part of a layer's block pool that its page table needs.

    Attributes:
        kv: ``[capacity, H, block_size, Dk + Dv]``, in host memory.
        coded: arguments of ``ops.storage.block_copy`` for a ``kv`` of int8 codes.
        dtype: dtype of the pages.
        device: device on which the layer computes.
        capacity: current number of physical blocks.
    """

    kv: Tensor
    dtype: torch.dtype
    device: torch.device
    capacity: int

    @property
    def coded(self) -> dict: ...

    def register(self, user: LayerPages) -> None:
        """Notify ``user`` of blocks that are freed."""
        ...


class DevicePools:
    """The device pools of one cache: one for each shape and dtype of blocks, on each device.

    Attributes:
        layers: layers of the cache that fetch blocks.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config, self.layers = config, 1
        self.pools: dict[tuple, DevicePool | None] = {}
        # The layer of each pool whose fetch begins a step. Weak references, to avoid a reference cycle.
        self._leads: dict[int, weakref.ref[LayerPages]] = {}
        self._enabled: dict[torch.device, Tensor] = {}
        self._room: int | None = None  # for copies of chosen tokens

    def __deepcopy__(self, memo: dict) -> DevicePools:
        new = DevicePools(self.config)  # the copy steps independently: in a shared pool each could evict the other's
        new.layers = self.layers
        return new

    def pool(self, blocks: Blocks, entries: int) -> DevicePool | None:
        """The pool for a layer whose steps choose ``entries`` blocks (of one KV head); None without one."""
        size, width = blocks.kv.shape[2:]
        key = (size, width, blocks.dtype, blocks.device)
        if key not in self.pools:
            budget = self.config.device_pool
            most = None if budget is not None else SELECTIONS * self.layers * entries
            try:
                made = DevicePool.sized(SHARE if budget is None else budget, *key, most=most) if budget != 0 else None
            except (torch.OutOfMemoryError, ValueError) as error:
                made = None
                _refuse("offloaded blocks", error)
            self.pools[key] = made
        return self.pools[key]

    def leads(self, layer: LayerPages) -> bool:
        """Whether ``layer`` is the first one of its pool, whose fetch begins a step."""
        lead = self._leads.setdefault(id(layer.pool), weakref.ref(layer))
        return lead() is layer

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for trial runs: nothing is fetched and no step begins."""
        with ExitStack() as stack:
            for pool in self.pools.values():
                if pool is not None:
                    stack.enter_context(pool.paused())
            for enabled in self._enabled.values():
                stack.callback(enabled.fill_, 1)
                enabled.zero_()
            yield

    def resume(self) -> None:
        """End a pause whose own end was interrupted."""
        for pool in self.pools.values():
            if pool is not None:
                pool.resume()
        for enabled in self._enabled.values():
            enabled.fill_(1)

    @no_inference_mode
    def enabled(self, device: torch.device) -> Tensor:
        """int32 ``[1]`` on a device, 0 during trial runs, which must not copy tokens."""
        if device not in self._enabled:
            self._enabled[device] = torch.ones(1, dtype=torch.int32, device=device)
        return self._enabled[device]

    def tokens(self, chosen: int, there: int, each: int, device: torch.device, rows: int, least: int = 0) -> int:
        """Tokens per KV head that a layer may have copies of, all rows together. Layers share the memory equally.

        By default room for ``TOKEN_SELECTIONS`` selections, otherwise what the configured size allows, but no more than
        the rows can hold.

        Args:
            chosen: tokens of one step's selection in one row.
            there: most tokens in a row.
            each: bytes of one token, all KV heads.
            least: rows whose selections should fit; 0: all.
        """
        budget = self.config.device_pool
        if self._room is None:
            share = budget if isinstance(budget, float) else SHARE if budget is None else None
            self._room = int(budget if share is None else share * free_bytes(device))
            wanted = (least or rows) * chosen * each * self.layers
            if 0 < self._room < wanted:
                warnings.warn(
                    f"copies of the chosen tokens take {wanted} bytes of device memory, "
                    f"{self._room} are allowed: steps read the others in host memory, which is slower; see "
                    "OffloadConfig(device_pool=...)",
                    stacklevel=5,
                )
        wanted = there if budget is not None else min(there, TOKEN_SELECTIONS * chosen)
        return min(rows * wanted, self._room // (self.layers * each))

    def refuse(self, error: Exception) -> None:
        """Allow no further copies, after an allocation that :meth:`tokens` allowed has failed."""
        self._room = 0
        _refuse("chosen tokens", error)

    def counters(self) -> dict[str, int]:
        """The sum of the pools' counters, and ``bytes`` fetched. Synchronises."""
        total = {"needed": 0, "found": 0, "fetched": 0, "unserved": 0, "bytes": 0}
        for pool in self.pools.values():
            if pool is not None:
                found = pool.counters()
                for name, value in found.items():
                    total[name] += value
                total["bytes"] += found["fetched"] * self.link_bytes(pool)
        return total

    def link_bytes(self, pool: DevicePool) -> int:
        """Bytes that a block of one KV head transfers over the link; codes take one byte a number."""
        return pool.pages[0].nbytes if self.config.kv_dtype is None else pool.pages[0].numel()

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(pool.nbytes for pool in self.pools.values() if pool is not None)

    def clear(self) -> None:
        """Free the memory; the layers that use it must have dropped it."""
        for pool in self.pools.values():
            if pool is not None:
                pool.wait_for_copies()  # from layers that have not dropped the pool yet
        self.pools.clear()
        self._leads.clear()
        self._room = None

    def reset(self) -> None:
        """Forget all blocks, keep the memory."""
        for pool in self.pools.values():
            if pool is not None:
                pool.drop_all()


def _refuse(what: str, error: Exception) -> None:
    warnings.warn(
        f"no device memory for copies of {what} ({str(error).splitlines()[0]}): each step reads what it chooses from "
        "host memory, which is slower; see OffloadConfig(device_pool=...)",
        stacklevel=5,
    )


class LayerPages:
    """Blocks of one layer that have a copy on the device."""

    def __init__(self, pools: DevicePools, blocks: Blocks) -> None:
        self.pools, self.blocks = pools, blocks
        self.pool: DevicePool | None = None
        self.table: Tensor | None = None  # page table, int32 [num_blocks, H]
        self._number = self._entries = 0
        blocks.register(self)

    def enter(self, entries: int) -> bool:
        """Prepare pages and page table for steps that choose ``entries`` blocks (of one KV head). False without a pool.

        A captured step uses no tensor that is created later than this.
        """
        if self.pool is None:
            pool = self.pools.pool(self.blocks, entries)
            if pool is None:
                return False
            table = self._new_table()
            self._number = pool.add_layer(table)
            self.pool, self.table = pool, table
        elif len(self.table) < self.blocks.capacity:
            self.pool.wait_for_copies()  # an eviction by another layer writes into this table
            grown = self._new_table()
            grown[: len(self.table)] = self.table
            self.table = grown
            self.pool.moved(self._number, grown)
        return True

    @no_inference_mode
    def _new_table(self) -> Tensor:
        shape = (self.blocks.capacity, self.blocks.kv.shape[1])
        return torch.full(shape, -1, dtype=torch.int32, device=self.blocks.device)

    def fetch(
        self,
        ids: Tensor,
        block_table: Tensor,
        keep: int,
        begins: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        """Bring the blocks of a selection to the device; see :meth:`DevicePool.fetch`.

        ``begins``: this is the layer's first selection in this step.
        """
        if begins and self.pools.leads(self):
            self.pool.advance()
        return self.pool.fetch(self._number, ids, block_table, self.blocks.kv, keep, out, self.blocks.coded)

    def forget(self, physical_ids: Tensor) -> None:
        """Drop the pages of these blocks, which are about to be reused."""
        if self.pool is not None:
            known = physical_ids[physical_ids < len(self.table)]
            self.pool.forget(self._number, known)

    def leave(self) -> None:
        """Drop the pool, so that its memory is free for another one."""
        self.pool = self.table = None

    def clear(self) -> None:
        """Drop all pages: the layer's blocks are about to be reused."""
        if self.pool is not None:
            self.pool.forget(self._number, torch.arange(len(self.table), device=self.table.device))

    @property
    def nbytes(self) -> int:
        """Bytes of the page table, on the device."""
        return 0 if self.table is None else self.table.nbytes

    @property
    def addresses(self) -> tuple[int, ...]:
        """Changes when a tensor that a captured step uses has moved."""
        return () if self.pool is None else (self.table.data_ptr(), self.pool.pages.data_ptr())
