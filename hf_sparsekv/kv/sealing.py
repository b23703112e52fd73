"""Sealing: blocks that have become old move from the ring into slots, with what a selection keeps of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..ops.seal import Index, seal
from .pool import bucket

if TYPE_CHECKING:
    from ..config import SparseConfig
    from ..offload.copy_streams import Lane
    from .store import LayerStore

VALID, SINK = 1, 2  # bits of a token's flag
INDEX_FIELDS = ("bounds", "part_fill", "codes", "qparams")  # of the pool, in an Index


def ring_tokens(config: SparseConfig) -> int:
    """Tokens that the ring of recent tokens holds: window and drafts, and a block that fills up behind them."""
    recent = config.window + config.max_draft
    return (-(-recent // config.block_size) + 1) * config.block_size


class Indexer(Protocol):
    """Makes what a selection policy keeps per block (bounds, labels)."""

    def index(self, kv: Tensor, flags: Tensor) -> dict[str, Tensor]:
        """Fields of blocks ``kv [n, batch, H, block_size, Dk + Dv]``, ``flags [n, batch, block_size]``."""
        ...

    def sealing(self, store: LayerStore) -> Index | None:
        """Where these fields are kept, for the kernel that seals one block; None if it cannot."""
        ...


class Sealing:
    """How a :class:`LayerStore` seals its blocks."""

    def seal_due(self, indexer: Indexer) -> bool:
        """Seal the ring's blocks that have become old. True if there were any."""
        target = self.sealable(self.length)
        if target == self.sealed:
            return False
        index = indexer.sealing(self)
        while self.sealed < target:
            start = self.sealed * self.block_size
            if index is None:
                at = self._ring_index(start, start + self.block_size)
                block = self.near_kv[:, :, at].unsqueeze(0)  # [1, batch, H, block_size, Dk + Dv]
                self._seal(block, self.near_valid[:, at], indexer)
                self._clear(self.sealed - 1, self.sealed)
            else:
                self._seal_one(self.sinks + start % self.ring, index)
        return True

    def _seal_one(self, at: int, index: Index) -> None:
        """Seal the block at position ``at`` of the near buffer, as :meth:`_seal` does, by few kernels."""
        self._reserve(1)
        with self.pool.lock:  # until the table names the slots, another copy of the cache could take them
            slots = self.pool.allocate(self.batch)
            fields = self.pool.fields
            index = replace(index, **{name: fields[name] for name in INDEX_FIELDS if getattr(index, name) is not None})
            seal(
                self.near_kv,
                self.near_valid,
                at,
                self.sinks,
                self.seen,
                slots,
                self.pool.kv,
                fields["flags"],
                fields["fill"],
                index,
            )
            self.slots[:, self.sealed] = slots
        if self.pool.host is not None:
            self.counters.to_host_bytes += self.batch * self.heads * self.block_size * self.token_bytes
        self.sealed += 1

    def _reserve(self, n: int) -> None:
        """Room for ``n`` more blocks in the table."""
        if self.sealed + n > self.slots.shape[1]:
            grown = self._ints((self.batch, bucket(self.sealed + n)), -1)
            grown[:, : self.sealed] = self.slots[:, : self.sealed]
            self.slots = grown

    def _clear(self, start: int, end: int) -> None:
        """Blocks ``start .. end - 1`` have left the ring."""
        if end > start:
            span = range(start * self.block_size, min(end * self.block_size, start * self.block_size + self.ring))
            self.near_valid.index_fill_(1, self._ring_index(span.start, span.stop), False)

    def _blocks_of(
        self, lo: int, hi: int, new_from: int, k: Tensor, v: Tensor, valid: Tensor | None, out: Tensor
    ) -> Tensor:
        """Lay out blocks ``lo .. hi - 1``, of the ring's columns and of new ones (from column ``new_from`` on).

        Args:
            out: ``[hi - lo, batch, H, block_size, Dk + Dv]``, written.

        Returns:
            Validity of the columns, bool ``[batch, (hi - lo) * block_size]``.
        """
        size, start, end = self.block_size, lo * self.block_size, hi * self.block_size
        first = min(max(lo, -(-new_from // size)), hi)  # the first block of new columns only
        oks = []
        if first > lo:
            border = min(new_from, first * size)
            at = self._ring_index(start, border)
            head = torch.cat((k[:, :, : first * size - border], v[:, :, : first * size - border]), dim=-1)
            mixed = torch.cat((self.near_kv[:, :, at], head), dim=2)  # [batch, H, columns, Dk + Dv]
            out[: first - lo] = mixed.unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4)
            oks.append(self.near_valid[:, at])
        if first < hi:
            span = slice(first * size - new_from, end - new_from)
            for x, to in ((k, out[first - lo :, ..., : self.split]), (v, out[first - lo :, ..., self.split :])):
                to.copy_(x[:, :, span].unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4))
        if end > new_from:
            span = slice(max(start, new_from) - new_from, end - new_from)
            n = span.stop - span.start
            ok = torch.ones(self.batch, n, dtype=torch.bool, device=self.device) if valid is None else valid[:, span]
            oks.append(ok)
        return oks[0] if len(oks) == 1 else torch.cat(oks, dim=1)

    def _seal(self, blocks: Tensor, valid: Tensor, indexer: Indexer, lane: Lane | None = None) -> None:
        """Move the next blocks into slots.

        Args:
            blocks: ``[n, batch, H, block_size, Dk + Dv]``.
            valid: bool ``[batch, n * block_size]``.
            lane: the blocks lie in a buffer of this lane, which takes them to the host.
        """
        n, size = blocks.shape[0], self.block_size
        count = valid.int().cumsum(1, dtype=torch.int32)
        rank = self.seen[:, None] + count - 1  # of a valid token among its row's valid tokens
        is_sink = valid & (rank < self.sinks)
        if self.sinks and (self.padded or self.sealed * size < self.sinks):
            self._keep_sinks(blocks, is_sink, rank)
        flags = valid.to(torch.uint8) * VALID + is_sink.to(torch.uint8) * SINK
        flags = flags.view(self.batch, n, size).transpose(0, 1)
        fields = indexer.index(blocks, flags)
        self._reserve(n)
        if self.pool.host is not None:
            self.counters.to_host_bytes += blocks.numel() * blocks.itemsize
        with self.pool.lock:  # until the table names the slots, another copy of the cache could take them
            self.slots[:, self.sealed : self.sealed + n] = self._to_slots(blocks, flags, fields, lane)
        self.seen += count[:, -1]
        self.sealed += n

    def _to_slots(self, blocks: Tensor, flags: Tensor, fields: dict[str, Tensor], lane: Lane | None = None) -> Tensor:
        """Write blocks ``[n, batch, ...]`` and their fields into new slots, int32 ``[batch, n]``."""
        slots, first = self.pool.take(blocks.shape[0] * self.batch)
        fields = {name: value.flatten(0, 1) for name, value in fields.items()}
        self.pool.note(slots, flags=flags.flatten(0, 1), fill=(flags == VALID).sum(-1).flatten(), **fields)
        if lane is None:
            self.pool.write(slots, blocks.flatten(0, 1), first)
        else:
            if first is None and slots.is_cuda:
                slots.record_stream(lane.stream)  # read there
            self._saved = lane.run(lambda: self.pool.write(slots, blocks.flatten(0, 1), first))
        return slots.view(-1, self.batch).T

    def _keep_sinks(self, blocks: Tensor, is_sink: Tensor, rank: Tensor) -> None:
        """Copy the sinks among the tokens of ``blocks`` to the front of the near buffer."""
        where = rank.masked_fill(~is_sink, self.sinks).long()  # position `sinks` collects the rest
        column = torch.arange(rank.shape[1], device=self.device).expand(self.batch, -1)
        source = torch.full((self.batch, self.sinks + 1), -1, device=self.device).scatter(1, where, column)
        source = source[:, : self.sinks]
        found, at = source >= 0, source.clamp_min(0)
        rows = torch.arange(self.batch, device=self.device)[:, None]
        # [batch, sinks, H, Dk + Dv]: the index that is split by a slice comes first
        kept = blocks[at // self.block_size, rows, :, at % self.block_size].transpose(1, 2)
        front = self.near_kv[:, :, : self.sinks]
        self.near_kv[:, :, : self.sinks] = torch.where(found[:, None, :, None], kept, front)
        self.near_valid[:, : self.sinks] |= found
