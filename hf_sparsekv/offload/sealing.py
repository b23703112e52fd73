"""Sealing: blocks that have become old move from the ring into slots, with what a selection keeps of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..ops.seal import Index, seal
from .pool import bucket

if TYPE_CHECKING:
    from .store import LayerStore

VALID, SINK = 1, 2  # bits of a token's flag
INDEX_FIELDS = ("bounds", "part_fill", "codes", "qparams")  # of the pool, in an Index


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
                self._seal(self.near_kv[:, :, at], self.near_valid[:, at], indexer)
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
            self.near_valid[:, self._ring_index(span.start, span.stop)] = False

    def _columns(
        self, lo: int, hi: int, ring_start: int, old: int, k: Tensor, v: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Columns of blocks ``lo .. hi - 1`` as ``[batch, H, n, Dk + Dv]`` and validity, from ring and new tokens."""
        start, end = lo * self.block_size, hi * self.block_size
        new_from = ring_start + old  # first column of k and v
        parts, oks = [], []
        if start < new_from:
            at = self._ring_index(start, min(end, new_from))
            parts.append(self.near_kv[:, :, at])
            oks.append(self.near_valid[:, at])
        if end > new_from:
            span = slice(max(start, new_from) - new_from, end - new_from)
            parts.append(torch.cat((k[:, :, span], v[:, :, span]), dim=-1))
            n = span.stop - span.start
            ok = torch.ones(self.batch, n, dtype=torch.bool, device=self.device) if valid is None else valid[:, span]
            oks.append(ok)
        if len(parts) == 1:
            return parts[0], oks[0]
        return torch.cat(parts, dim=2), torch.cat(oks, dim=1)

    def _seal(self, kv: Tensor, valid: Tensor, indexer: Indexer) -> None:
        """Move the next blocks into slots: ``kv [batch, H, n * block_size, Dk + Dv]``, ``valid [batch, ...]``."""
        size = self.block_size
        n = kv.shape[2] // size
        count = valid.int().cumsum(1, dtype=torch.int32)
        rank = self.seen[:, None] + count - 1  # of a valid token among its row's valid tokens
        is_sink = valid & (rank < self.sinks)
        if self.sinks and (self.padded or self.sealed * size < self.sinks):
            self._keep_sinks(kv, is_sink, rank)
        flags = valid.to(torch.uint8) * VALID + is_sink.to(torch.uint8) * SINK
        flags = flags.view(self.batch, n, size).transpose(0, 1)
        blocks = kv.view(self.batch, self.heads, n, size, -1).permute(2, 0, 1, 3, 4)
        fields = indexer.index(blocks, flags)
        self._reserve(n)
        if self.pool.host is not None:
            self.counters.to_host_bytes += blocks.numel() * blocks.itemsize
        with self.pool.lock:  # until the table names the slots, another copy of the cache could take them
            self.slots[:, self.sealed : self.sealed + n] = self._to_slots(blocks, flags, fields)
        self.seen += count[:, -1]
        self.sealed += n

    def _to_slots(self, blocks: Tensor, flags: Tensor, fields: dict[str, Tensor]) -> Tensor:
        """Write blocks ``[n, batch, ...]`` and their fields into new slots, int32 ``[batch, n]``."""
        slots = self.pool.allocate(blocks.shape[0] * self.batch)
        self.pool.write(
            slots,
            blocks.flatten(0, 1),
            flags=flags.flatten(0, 1),
            fill=(flags == VALID).sum(-1).flatten(),
            **{name: value.flatten(0, 1) for name, value in fields.items()},
        )
        return slots.view(-1, self.batch).T

    def _keep_sinks(self, kv: Tensor, is_sink: Tensor, rank: Tensor) -> None:
        """Copy the sinks among the sealed tokens to the front of the near buffer."""
        where = rank.masked_fill(~is_sink, self.sinks).long()  # position `sinks` collects the rest
        column = torch.arange(kv.shape[2], device=self.device).expand(self.batch, -1)
        source = torch.full((self.batch, self.sinks + 1), -1, device=self.device).scatter(1, where, column)
        source = source[:, : self.sinks]
        found = source >= 0
        index = source.clamp_min(0)[:, None, :, None].expand(-1, self.heads, -1, kv.shape[3])
        front = self.near_kv[:, :, : self.sinks]
        self.near_kv[:, :, : self.sinks] = torch.where(found[:, None, :, None], kv.gather(2, index), front)
        self.near_valid[:, : self.sinks] |= found
