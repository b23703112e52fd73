"""The block table of one cache: which blocks the rows are in, on the host and on each device that reads it.

The table is memory: it is changed in place, after all readers, and its ids are reference-counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from ..offload.copy_streams import Pending
from ..ops._layout import whole
from ..tensors import no_inference_mode, sent
from .block_ids import BlockIds, bucket

Within = Callable[[], AbstractContextManager[object]]


def table_width(blocks: int) -> int:
    """Entries of each row of a table that has room for ``blocks`` blocks: kernels want rows :func:`whole`."""
    return whole(blocks)


class TableUploads(dict[torch.device, Tensor]):
    """The table on each device that has asked for it.

    Args:
        held: the table on the host, in a list of its own.
        orders: by device, the context to write in.
    """

    def __init__(self, held: list[np.ndarray], orders: dict[torch.device, Within]) -> None:
        super().__init__()
        self._held, self._orders = held, orders

    @no_inference_mode
    def __missing__(self, device: torch.device) -> Tensor:
        with self._orders.get(device, nullcontext)():
            made = self[device] = sent(self._held[0].copy(), torch.int32, device)
        return made


class BlockTable:
    """Ids of the blocks of each row.

    Attributes:
        ids: of blocks, counted.
        on: by device: :attr:`host` there.
        moved: grows whenever the memory that captured steps read has moved.
    """

    def __init__(self, ids: BlockIds) -> None:
        self.ids, self.moved = ids, 0
        self._held: list[np.ndarray] = [np.zeros((0, 0), dtype=np.int32)]
        self._old: list[Tensor] = []
        self._orders: dict[torch.device, Within] = {}
        self.on = TableUploads(self._held, self._orders)
        self._pending: dict[torch.device, Pending] = {}
        weakref.finalize(self, self.ids.drop_later, self._held).atexit = False

    def copy(self) -> BlockTable:
        """Another table that shares the blocks."""
        new = BlockTable(self.ids)
        host = self.host.copy()
        self.ids.share(host)
        new._held[0], new._orders = host, self._orders
        new.on = TableUploads(new._held, self._orders)
        return new

    @property
    def host(self) -> np.ndarray:
        """int32 ``[batch, capacity]``, id of each block of each row, -1 for none. Not every one is filled yet."""
        return self._held[0]

    @property
    def capacity(self) -> int:
        """Blocks of a row that there is room for."""
        return self.host.shape[1]

    @property
    def nbytes(self) -> dict[torch.device, int]:
        """Bytes of :attr:`host` on each device that has it. The lengths, a few bytes a row, are not counted."""
        return {device: held.nbytes for device, held in self.on.items()}

    # ------------------------------------------------------------------ its memory

    def replace(self, host: np.ndarray) -> None:
        """The table is ``host`` from here on, in other memory."""
        self.moved += 1
        devices = list(self.on)
        self._old += self.on.values()  # copy streams may still read them
        self.on.clear()
        self._held[0] = host
        for device in devices:
            self.on[device]  # in the order of this stream, before others need it

    def grow(self, capacity: int) -> None:
        """Have room for ``capacity`` blocks of each row."""
        capacity = table_width(capacity)
        self.replace(np.pad(self.host, ((0, 0), (0, capacity - self.capacity)), constant_values=-1))

    def _change(self, here: Callable[[], object], there: Callable[[Tensor], object]) -> None:
        """Change the table on the host and, in place, where it has copies: captured graphs hold their addresses.

        References are counted around it so that an interrupt in between leaves some too many: what is named has one.
        """
        try:
            here()
            for device, held in self.on.items():
                with self._orders.get(device, nullcontext)():
                    if (pending := self._pending.get(device)) is not None:
                        pending.wait(device)
                    there(held)
        except BaseException:  # copies are made again
            self.moved += 1
            self._old += self.on.values()
            self.on.clear()
            raise

    def in_use_until(self, event: torch.cuda.Event, device: torch.device) -> None:
        """A copy stream of ``device`` reads the table there until ``event``: it changes after that."""
        self._pending.setdefault(device, Pending()).add(event)

    def order(self, device: torch.device, within: Within) -> None:
        """On this device the table is written in the context ``within()``, in the order of who reads it there."""
        self._orders[device] = within

    # ------------------------------------------------------------------ its entries

    def reserve(self, rows: Sequence[int], first: Sequence[int], end: Sequence[int]) -> None:
        """Have ids ready for blocks ``first .. end - 1`` of these rows: their own, not shared."""
        if max(end, default=0) > self.capacity:
            self.grow(bucket(max(end)))
        with self.ids.lock:
            pairs = [(row, block) for row, lo, hi in zip(rows, first, end) for block in range(lo, hi)]
            wanted = np.array(pairs, dtype=np.int64).reshape(-1, 2)
            held = self.host[wanted[:, 0], wanted[:, 1]]
            shared = self.ids.shared(held)
            missing = wanted[(held < 0) | shared]
            if not len(missing):
                return
            # Blocks of all rows beside each other: those of a piece of a prompt are then one range.
            missing = missing[np.lexsort((missing[:, 0], missing[:, 1]))]
            self._write(missing, self.ids.take(len(missing)))
            self.ids.drop(held[shared])

    def _write(self, at: np.ndarray, ids: np.ndarray) -> None:
        def here() -> None:
            self.host[at[:, 0], at[:, 1]] = ids

        def there(held: Tensor) -> None:
            if len(at) <= 2:
                # Not held[row, block] = one, which copies the number from ordinary memory and so waits for the GPU.
                for (row, block), one in zip(at.tolist(), ids.tolist()):
                    held[row, block].fill_(one)
            else:
                row, block = sent(at.T.copy(), torch.long, held.device)
                held[row, block] = sent(ids, torch.int32, held.device)

        self._change(here, there)

    def write_row(self, row: int, ids: np.ndarray, on: Callable[[Tensor], Tensor]) -> None:
        """The first blocks of row ``row`` are these; ``on(held)``: the same ids, for a copy of the table.

        Ids from the copy's own device do not make the host wait.
        """
        n = len(ids)

        def here() -> None:
            self.host[row, :n] = ids

        self._change(here, lambda held: held[row, :n].copy_(on(held)[:n]))

    def empty_row(self, row: int) -> None:
        """Row ``row`` names no block from here on."""
        if (self.host[row] >= 0).any():
            named = self.host[row].copy()
            self._change(lambda: self.host[row].fill(-1), lambda held: held[row].fill_(-1))
            self.ids.drop(named)

    def clear(self) -> None:
        """No row names a block. The memory is kept."""
        held = self.host.copy()
        self._change(lambda: self.host.fill(-1), lambda on: on.fill_(-1))
        self.ids.drop(held)
        self._old.clear()

    def trim(self, keep: np.ndarray) -> None:
        """Let go the blocks after the first ``keep [batch]`` of each row."""
        after = (np.arange(self.capacity) >= keep[:, None]) & (self.host >= 0)
        at = np.argwhere(after)
        if len(at):
            named = self.host[after]
            self._write(at, np.full(len(at), -1, dtype=np.int32))
            self.ids.drop(named)

    def load(self, table: np.ndarray) -> np.ndarray:
        """Take over rows from a file; ``table [batch, blocks]`` counts their blocks from 0, -1 for none.

        Returns:
            The ids that these have here, int32.
        """
        if table.shape[1] > self.capacity:
            self.grow(bucket(table.shape[1]))
        with self.ids.lock:
            ids = self.ids.take(int(table.max(initial=-1)) + 1)
            at = np.argwhere(table >= 0)
            named = ids[table[table >= 0]]
            self.ids.share(named)
            self.ids.drop(ids)
            if len(at):
                self._write(at, named)
        return ids

    def map_rows(self, index: Sequence[int], sealed: Sequence[int]) -> None:
        """Row ``i`` names the first ``sealed[i]`` blocks that row ``index[i]`` did: blocks are shared, not copied."""
        with self.ids.lock:
            before = self.host.copy()
            host = before[np.asarray(index, dtype=np.int64)].copy()
            host[np.arange(self.capacity) >= np.array(sealed)[:, None]] = -1
            self.ids.share(host)
            if host.shape == before.shape:
                self._change(
                    lambda: np.copyto(self.host, host), lambda held: held.copy_(sent(host, torch.int32, held.device))
                )
            else:
                self.replace(host)
            self.ids.drop(before)

    def unshare(self, row: int | None = None) -> None:
        """Give every row, or ``row``, blocks of its own, with the same contents in all layers."""
        with self.ids.lock:
            at = np.argwhere(self.ids.shared(self.host))
            if row is not None:
                at = at[at[:, 0] == row]
            if not len(at):
                return
            old = self.host[at[:, 0], at[:, 1]].copy()
            new = self.ids.take(len(old))
            try:
                for pool in self.ids.pools:
                    pool.copy_blocks(torch.from_numpy(old).long(), torch.from_numpy(new).long())
            except BaseException:
                self.ids.drop(new)
                raise
            self._write(at, new)
            self.ids.drop(old)
