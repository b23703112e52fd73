"""Blocks of memory: reserved by requests in the batch, or kept by the prefix cache.

Reserved and kept blocks share one limit, so one object counts both. Other code decides which request is next.
"""

from __future__ import annotations

from .in_flight import Request
from .prefix import PrefixIndex
from .work import Work


class Blocks:
    """Reserves blocks for requests, and keeps full ones for prompts with the same prefix.

    Only the loop's thread may call it, except :meth:`fits`, which any thread may.

    Args:
        work: operations on the model and its rows.
        total: limit of the blocks that requests have reserved and of those that are kept, together.

    Attributes:
        index: the kept blocks. None: none are kept.
        used: blocks that requests have reserved, without those of the index.
    """

    def __init__(self, work: Work, total: int) -> None:
        self.work, self.rows, self.total = work, work.rows, total
        size, alike = self.rows.cache.row_table.block_size, self.rows.alike_tokens
        self.index = None
        if work.serving.prefix_cache and alike is not None and (work.keeps_snapshots or not self.rows.keeps_more):
            self.index = PrefixIndex(work, size, alike, self.rows.max_rows if self.rows.keeps_more else None)
        self.used = 0

    def fits(self, request: Request, others: int = 0) -> bool:
        """Whether a request and ``others`` blocks fit, if the index evicts all blocks that no request uses."""
        reserved = self.used + others
        if self.index is None:
            return reserved + request.blocks <= self.total
        if request.known[0] != self.index.changes:
            request.known = self.index.changes, *self.index.known(request.keys)
        _, shared, unused = request.known
        new = request.blocks - shared
        pinned = self.index.pinned + unused  # kept blocks that requests use, or that this one would pin
        return reserved + new + pinned <= self.total

    def reserve(self, request: Request) -> None:
        """Reserve memory for a request, and pin the kept blocks of its prefix."""
        if self.index is not None:
            request.match = self.index.match(request.keys)
            request.blocks -= len(request.match.blocks)
            over = self.used + request.blocks + len(self.index) - self.total
            if over > 0:
                self.index.evict(over)
        self.used += request.blocks
        if request.match.blocks:
            request.channels = request.match.blocks[0].channels
            request.cached = len(request.match.blocks) * self.rows.cache.config.block_size

    def keep(self, request: Request, reading: Request | None) -> None:
        """Keep a row's full blocks in the index. They stay at least as long as the row.

        Args:
            reading: the request in prefill, if there is one.
        """
        if self.index is None or request.provisional:  # a prompt that continues them would inherit provisional channels
            return
        if reading is not None and reading is not request and _begin_alike(request, reading):
            return  # keep that prompt's blocks after its prefill instead: none may follow blocks with other channels
        if request.channels is None:
            request.channels = self.work.channels(request.row)
        ids, known = self.rows.blocks(request.row), request.ids + request.tokens
        if self.work.serving.exact and not request.exact:  # sparse steps' keys are not those of exact requests
            known = request.ids
        n = min(len(ids), len(known) // self.rows.cache.config.block_size)
        if n > len(request.keys):
            request.keys += self.index.keys(known, n, request.keys)
        new = self.index.keep(request.keys[:n], ids[:n], request.channels, request.match)
        request.blocks -= new  # the index counts them from here on
        self.used -= new
        if request.held is not None:
            (tokens, snapshot), request.held = request.held, None
            self.index.hold(request.keys[: tokens // self.rows.cache.config.block_size], snapshot)

    def release(self, request: Request) -> None:
        """Free the memory of a request."""
        self.used -= request.blocks
        if self.index is not None:
            self.index.release(request.match)

    def withdraw(self, request: Request) -> None:
        """Remove a request's blocks from the index: they may be wrong, and prompts that share them would fail too."""
        if self.index is not None:
            self.index.withdraw(request.keys)


def _begin_alike(request: Request, reading: Request) -> bool:
    """Whether a request has the first block that the prompt in prefill will add to those it shares."""
    shared = len(reading.match.blocks)
    return len(reading.keys) > shared and request.keys[: shared + 1] == reading.keys[: shared + 1]
