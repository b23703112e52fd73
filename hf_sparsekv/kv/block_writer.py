"""Writing full blocks of one layer to its pool, and the waits for copies of them to the host.

All streams and events of a layer are here, so that their order is seen in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..offload.copy_streams import CopyStream, CopyStreams, wait
from ..offload.page_table import LayerPages
from .pool import BlockPool
from .row_table import RowTable


class BlockWriter:
    """Writes full blocks of one layer to its pool.

    Attributes:
        saved: ends the last copy to the host; None: all have ended.
    """

    def __init__(self, pool: BlockPool, table: RowTable, copy_streams: CopyStreams | None) -> None:
        self.pool, self.table_of_rows, self.copy_streams = pool, table, copy_streams
        self.device = pool.device
        self.saved: torch.cuda.Event | None = None

    def copy(self, table: RowTable, copy_streams: CopyStreams | None) -> BlockWriter:
        """For a copy of the cache, which shares the pool."""
        new = BlockWriter(self.pool, table, copy_streams)
        new.saved = self.saved
        return new

    @property
    def copy_stream(self) -> CopyStream | None:
        """The copy stream to the host; None if blocks stay on the device, or the CPU has to copy them."""
        return self.copy_streams.out(self.device) if self.copy_streams is not None and self.pool.direct else None

    def write(
        self, blocks: Tensor, rows: slice, start: int, block_table: Tensor, copy_stream: CopyStream | None
    ) -> None:
        """Write blocks ``start ..`` of some rows, ``[n, rows, H, block_size, Dk + Dv]``, to where the pool has them.

        ``block_table``: of all rows. ``copy_stream``: the blocks are in a buffer of this copy stream, which copies them
        to the host.
        """
        blocks, end = blocks[..., : self.pool.kv.shape[-1]], start + len(blocks)  # nothing of what another device keeps
        ids = self.table_of_rows.blocks.host[rows, start:end].T.flatten()
        first = int(ids[0]) if (ids[1:] - ids[:-1] == 1).all() else None
        scales = self.pool.fields.get("scales")
        physical_ids = None
        if first is None or scales is not None:
            # A copy, never a view of the table, which changes in place before a copy stream reads it.
            physical_ids = block_table[rows, start:end].T.clone(memory_format=torch.contiguous_format).flatten()
        if copy_stream is None:
            self.pool.write(physical_ids, blocks.flatten(0, 1), first)
        else:
            for used in (physical_ids, scales):  # read and written there: not freed before that
                if used is not None and used.is_cuda:
                    used.record_stream(copy_stream.stream)
            self.saved = copy_stream.run(lambda: self.pool.write(physical_ids, blocks.flatten(0, 1), first))
            self.pool.in_use_until(self.saved)

    def wait(self) -> None:
        """Make the current stream wait until all blocks are in host memory. Not allowed inside a capture."""
        if self.saved is not None:
            if self.saved.query():
                self.saved = None
            else:
                wait(self.saved, self.device)

    def in_use_until(self, event: torch.cuda.Event) -> None:
        """A copy stream reads the block table and blocks until ``event``."""
        self.pool.in_use_until(event)
        self.table_of_rows.blocks.in_use_until(event, self.device)

    @contextmanager
    def after_saving(self, query: Tensor, pages: LayerPages | None) -> Iterator[Tensor]:
        """Run the body after pending copies to the host, on their stream; yields ``query``.

        ``pages``: of the layer. Other layers wait for the blocks that the body copies there.
        """
        if self.saved is None:
            yield query
            return
        query = query.clone()  # of a view into the prompt's queries, which would be kept alive
        # Not self.copy_stream: memory may have turned out since then that cannot be pinned.
        assert self.copy_streams is not None
        copy_stream = self.copy_streams.out(self.device)
        with copy_stream.after_current_stream():
            try:
                yield query
            finally:
                self.saved = copy_stream.mark()
                self.in_use_until(self.saved)
                if query.is_cuda:
                    query.record_stream(copy_stream.stream)
                if pages is not None and pages.pool is not None:
                    pages.pool.busy_until(self.saved)  # other layers share it
