"""Device pages for blocks in host memory: one slab, shared by all layers and rows of a cache.

Pages are assigned on the device, without the host: ``ops.storage.residency`` keeps the page tables,
``ops.storage.block_copy`` brings the blocks. Sinks and the recent window are never in the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor

from ..ops.storage.block_copy import block_copy
from ..ops.storage.residency import COUNTERS, FREE, WINDOW, PageState, residency
from ..tensors import no_inference_mode, sent
from .copy_streams import wait

BOOKKEEPING = 12  # bytes a page beside its content: owner and stamp


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on ``device``, including torch's unused reserved memory."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


class DevicePool:
    """Device pages for the blocks of all layers, and their page tables.

    A block may be evicted once it has not been chosen in the current step nor in the ``keep`` steps before it. Calls
    that change pages must run in order: on one stream, or on a side stream announced by :meth:`busy_until`.

    Attributes:
        pages: ``[F, B, W]``: a page holds one block of one KV head of one layer.
        state: owners, stamps and page tables, see ``PageState``.
        window: pages that are compared when the oldest are looked for, see ``ops.storage.residency``.
    """

    @no_inference_mode
    def __init__(
        self,
        pages: int,
        block_size: int,
        token_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if pages < 1:
            raise ValueError(f"a device pool needs at least one frame, got {pages}")
        self.window = WINDOW
        self.pages = torch.empty(pages, block_size, token_dim, dtype=dtype, device=device)
        self.device = self.pages.device
        self._paused = False
        self._busy_until: torch.cuda.Event | None = None
        self.state = PageState.empty(pages, self.device)
        self._lists: dict[int, tuple[Tensor, Tensor]] = {}  # copies and their number, by the entries of a call

    @classmethod
    def sized(
        cls,
        budget: int | float,
        block_size: int,
        token_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        most: int | None = None,
    ) -> DevicePool:
        """A pool within a budget.

        Args:
            budget: bytes (int), or the share of the device's free memory (float, below 1).
            most: largest useful number of pages.
        """
        device = torch.device(device)
        if isinstance(budget, float):
            if not 0 < budget < 1:
                raise ValueError(f"a share of the free memory lies between 0 and 1, got {budget}")
            budget = int(budget * free_bytes(device))
        size = block_size * token_dim * dtype.itemsize + BOOKKEEPING
        pages = budget // size
        if pages < 1:
            raise ValueError(f"a device pool of {budget} bytes has no room for a block of {size} bytes")
        return cls(min(pages, most or pages), block_size, token_dim, dtype, device)

    def __deepcopy__(self, memo: dict) -> DevicePool:
        return self  # copies of a cache share physical blocks, hence page tables

    # ------------------------------------------------------------------ order

    def busy_until(self, event: torch.cuda.Event) -> None:
        """Announce that a side stream changes pages until ``event``."""
        self._busy_until = event

    def wait_for_copies(self) -> None:
        """Make the current stream wait until no side stream changes pages or page tables.

        Captured steps skip this: every layer has waited before the replay.
        """
        if self._busy_until is None or self._paused:
            return
        if self._busy_until.query():
            self._busy_until = None
        else:
            wait(self._busy_until, self.device)

    # ------------------------------------------------------------------ layers

    @no_inference_mode
    def add_layer(self, page_table: Tensor) -> int:
        """Number of a new layer; ``page_table``: int32 ``[num_blocks, H]``, all -1, owned by the caller."""
        layer = len(self.state.page_tables)
        self.state.set_table(layer, page_table)
        return layer

    def moved(self, layer: int, page_table: Tensor) -> None:
        """Replace the layer's page table by ``page_table``, a larger copy with -1 in the new entries."""
        self.state.set_table(layer, page_table)

    def page_table(self, layer: int) -> Tensor:
        """The layer's page table: int32 ``[num_blocks, H]``, the page of each block and KV head, -1 if it has none."""
        return self.state.page_tables[layer]

    def forget(self, layer: int, physical_ids: Tensor) -> None:
        """Drop the pages of the layer's ``physical_ids`` (int ``[n]``, no -1), which are reused. Never synchronises."""
        self.wait_for_copies()
        table, state = self.page_table(layer), self.state
        physical_ids = sent(physical_ids, torch.long, self.device)
        page = table[physical_ids].flatten().long()
        gone = torch.zeros(len(state.stamp) + 1, dtype=torch.bool, device=self.device)
        # Indexed assignment of a number would synchronise. The extra entry is for blocks without a page.
        gone.index_fill_(0, torch.where(page >= 0, page, len(state.stamp)), True)
        gone = gone[:-1]
        state.owner.masked_fill_(gone[:, None], -1)
        state.stamp.masked_fill_(gone, FREE)
        table.index_fill_(0, physical_ids, -1)

    def drop_all(self) -> None:
        """Empty all pages; reset page tables, counters and step number."""
        self.wait_for_copies()
        state = self.state
        for table in state.page_tables:
            table.fill_(-1)
        state.owner.fill_(-1)
        state.stamp.fill_(FREE)
        state.hand.zero_()
        state.now.fill_(1)
        state.counters.zero_()

    # ------------------------------------------------------------------ a step

    def advance(self) -> None:
        """Begin the next step. Does nothing while the pool is paused."""
        self.wait_for_copies()
        self.state.now += self.state.enabled

    def fetch(
        self,
        layer: int,
        block_ids: Tensor,
        block_table: Tensor,
        kv: Tensor,
        keep: int,
        out: Tensor | None = None,
        coded: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Bring chosen blocks into pages, on the current stream.

        Args:
            block_ids: ``BlockIds`` int32 ``[batch, H, K]``, ascending or by importance.
            block_table: int32 ``[batch, cap]``, physical id of each block of each row.
            kv: ``[num_blocks, H, B, W]``, the layer's blocks.
            keep: preceding steps whose pages may still be in use: 1 if blocks are chosen a step ahead, else 0.
            coded: arguments of ``ops.storage.block_copy`` for a ``kv`` of int8 codes; None for other dtypes.

        Returns:
            page ids int32 ``[batch, H, K]``, in ``out`` if given: page ``f``, ``-(physical_id + 2)`` for a block to
            read from host memory, -1 for no block. Valid in this step and the ``keep`` steps after it.
        """
        if kv.shape[1] != self.page_table(layer).shape[1]:
            raise ValueError(f"kv has {kv.shape[1]} KV heads, the page table {self.page_table(layer).shape[1]}")
        self.wait_for_copies()
        copies, n_copies = self._list(block_ids)
        page_ids, _, _ = residency(
            block_ids, block_table, self.state, layer, keep, self.window, page_ids=out, copies=copies, n_copies=n_copies
        )
        block_copy(kv, self.pages, copies, n_copies, **(coded or {}))
        return page_ids

    @no_inference_mode
    def _list(self, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers for the copies of a call. Calls of one size share them, at addresses that captured graphs hold."""
        n = block_ids.numel()
        if n not in self._lists:
            copies = torch.zeros(n, 2, dtype=torch.int32, device=self.device)
            self._lists[n] = copies, torch.zeros(1, dtype=torch.int32, device=self.device)
        return self._lists[n]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which :meth:`fetch` and :meth:`advance` change nothing; missing blocks are read from host memory.

        For a capture and its trial run: no state needs to be restored, and no page in use is overwritten. Must not
        begin or end inside a capture.
        """
        self.wait_for_copies()
        try:
            self.state.enabled.zero_()
            self._paused = True
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """Enable fetching again."""
        self._paused = False
        self.state.enabled.fill_(1)

    # ------------------------------------------------------------------ numbers

    def counters(self) -> dict[str, int]:
        """Blocks (of one KV head) needed, found in a page, fetched, and left in host memory so far. Synchronises.

        The rest of the needed blocks were fetched for another row of the same call. Blocks fetched for a predicted
        query count as fetched immediately, and as needed and found only when a step needs them.
        """
        return dict(zip(COUNTERS, self.state.counters.tolist()))

    @property
    def nbytes(self) -> int:
        """Bytes on the device, page tables excepted."""
        lists = sum(copies.nbytes for copies, _ in self._lists.values())
        return self.pages.nbytes + self.state.owner.nbytes + self.state.stamp.nbytes + lists
