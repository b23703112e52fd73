"""Frames on the device for blocks that lie in host memory: one slab, shared by all layers and rows of a cache.

Who gets a frame is decided on the device, without the host: ``ops.residency`` keeps the page tables, ``ops.block_copy``
brings the blocks. Sinks and recent tokens have their own place and are never in the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from ..ops.block_copy import block_copy
from ..ops.residency import COUNTERS, FREE, WINDOW, FrameState, lookup, residency
from ..tensors import lasting
from .copy_streams import wait

BOOKKEEPING = 12  # bytes a frame beside its content: owner and stamp


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on ``device``, what torch holds in reserve included."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


class DevicePool:
    """Frames for the blocks of all layers, and who lies in them.

    A block may be evicted once it has not been chosen in the current step nor in the ``keep`` steps before it. All
    calls that change frames run one after the other: on one stream, or on another one that :meth:`beside` tells of.

    Attributes:
        frames: ``[F, B, W]``: a frame holds one block of one KV head of one layer.
        state: owners, stamps and page tables, see ``FrameState``.
        window: frames that are compared when the oldest are looked for, see ``ops.residency``.
    """

    @lasting
    def __init__(
        self,
        frames: int,
        block_size: int,
        token_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if frames < 1:
            raise ValueError(f"a device pool needs at least one frame, got {frames}")
        self.window = WINDOW
        self.frames = torch.empty(frames, block_size, token_dim, dtype=dtype, device=device)
        self.device = self.frames.device
        self._paused = False
        self._beside: torch.cuda.Event | None = None
        self.state = FrameState.empty(frames, self.device)
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
            most: frames that are of any use.
        """
        device = torch.device(device)
        if isinstance(budget, float):
            if not 0 < budget < 1:
                raise ValueError(f"a share of the free memory lies between 0 and 1, got {budget}")
            budget = int(budget * free_bytes(device))
        size = block_size * token_dim * dtype.itemsize + BOOKKEEPING
        frames = budget // size
        if frames < 1:
            raise ValueError(f"a device pool of {budget} bytes has no room for a block of {size} bytes")
        return cls(min(frames, most or frames), block_size, token_dim, dtype, device)

    def __deepcopy__(self, memo: dict) -> DevicePool:
        return self  # copies of a cache share slots, hence page tables

    # ------------------------------------------------------------------ order

    def beside(self, event: torch.cuda.Event) -> None:
        """Frames are changed on a stream beside the current one, until ``event``."""
        self._beside = event

    def settle(self) -> None:
        """What follows on the current stream finds frames and page tables that nobody else is changing.

        Captured steps do not ask: all layers have been settled before.
        """
        if self._beside is None or self._paused:
            return
        if self._beside.query():
            self._beside = None
        else:
            wait(self._beside, self.device)

    # ------------------------------------------------------------------ layers

    @lasting
    def add_layer(self, frame_of: Tensor) -> int:
        """Number of a new layer with the page table ``frame_of``: int32 ``[slots, H]``, all -1, kept by the caller."""
        layer = len(self.state.page_tables)
        self.state.set_table(layer, frame_of)
        return layer

    def moved(self, layer: int, frame_of: Tensor) -> None:
        """The layer's page table has been copied into ``frame_of``, which is larger; -1 in what is new."""
        self.state.set_table(layer, frame_of)

    def resident(self, layer: int) -> Tensor:
        """The layer's page table: int32 ``[slots, H]``, the frame of each block and KV head, -1 if it has none."""
        return self.state.page_tables[layer]

    def forget(self, layer: int, slots: Tensor) -> None:
        """The layer's ``slots`` (int ``[n]``, no -1) hold other blocks from now on. Nothing synchronises."""
        self.settle()
        table, state = self.resident(layer), self.state
        slots = slots.to(self.device).long()
        frame = table[slots].flatten().long()
        gone = torch.zeros(len(state.stamp) + 1, dtype=torch.bool, device=self.device)
        # Indexed assignment of a number would wait for the device. One more entry for blocks without a frame.
        gone.index_fill_(0, torch.where(frame >= 0, frame, len(state.stamp)), True)
        gone = gone[:-1]
        state.owner.masked_fill_(gone[:, None], -1)
        state.stamp.masked_fill_(gone, FREE)
        table.index_fill_(0, slots, -1)

    def drop_all(self) -> None:
        """Nothing lies in any frame; page tables, counters and step count start anew."""
        self.settle()
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
        """The next step begins. Does nothing while the pool is paused."""
        self.settle()
        self.state.now += self.state.enabled

    def fetch(
        self, layer: int, block_ids: Tensor, slots: Tensor, kv: Tensor, keep: int, out: Tensor | None = None
    ) -> Tensor:
        """Bring chosen blocks into frames, on the current stream.

        Args:
            block_ids: ``BlockIds`` int32 ``[batch, H, K]``, in ascending order or in that of their importance.
            slots: int32 ``[batch, cap]``, slot of each block of each row.
            kv: ``[slots, H, B, W]``, the layer's blocks.
            keep: steps before this one whose frames may still be in use: 1 if blocks are chosen a step ahead, or 0.

        Returns:
            places int32 ``[batch, H, K]``, in ``out`` if given: frame ``f``, ``-(slot + 2)`` for a block that is to
            be read in host memory, -1 for no block. To be used in this step, and in the ``keep`` steps after it.
        """
        if kv.shape[1] != self.resident(layer).shape[1]:
            raise ValueError(f"kv has {kv.shape[1]} KV heads, the page table {self.resident(layer).shape[1]}")
        self.settle()
        copies, n_copies = self._list(block_ids)
        places, _, _ = residency(
            block_ids, slots, self.state, layer, keep, self.window, places=out, copies=copies, n_copies=n_copies
        )
        block_copy(kv, self.frames, copies, n_copies)
        return places

    def find(
        self, layer: int, block_ids: Tensor, slots: Tensor, out: Tensor | None = None, since: Tensor | None = None
    ) -> Tensor:
        """Places of blocks as they are now; nothing is fetched or counted, nor kept from being evicted.

        ``since``: int32 ``[1]``, count only frames chosen in this step, see ``ops.residency.lookup``.
        """
        return lookup(block_ids, slots, self.resident(layer), self.state.stamp, since, out=out)

    @lasting
    def _list(self, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where the copies of a call are listed. Calls of one size share it, and a captured one knows the address."""
        n = block_ids.numel()
        if n not in self._lists:
            copies = torch.zeros(n, 2, dtype=torch.int32, device=self.device)
            self._lists[n] = copies, torch.zeros(1, dtype=torch.int32, device=self.device)
        return self._lists[n]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, :meth:`fetch` and :meth:`advance` change nothing: what is in no frame is read in host memory.

        For a capture and its trial run: there is nothing to be put back afterwards, and no frame is overwritten
        whose block somebody still counts on. It must neither begin nor end inside a capture.
        """
        self.settle()
        try:
            self.state.enabled.zero_()
            self._paused = True
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """Fetch from here on."""
        self._paused = False
        self.state.enabled.fill_(1)

    # ------------------------------------------------------------------ numbers

    def counters(self) -> dict[str, int]:
        """Blocks (of one KV head) needed, found in a frame, fetched, and left in host memory so far. Synchronises.

        The rest of those needed were fetched for another row of the same call.
        """
        return dict(zip(COUNTERS, self.state.counters.tolist()))

    @property
    def nbytes(self) -> int:
        """Bytes on the device, page tables excepted."""
        lists = sum(copies.nbytes for copies, _ in self._lists.values())
        return self.frames.nbytes + self.state.owner.nbytes + self.state.stamp.nbytes + lists
