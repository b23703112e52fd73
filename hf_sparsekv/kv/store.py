"""What one cache layer holds: sealed blocks in slots, recent tokens in a ring, sinks beside it.

Columns are positions of the attention mask: all rows of a padded batch fill and seal a block at the same step, and
padding is a matter of validity, not of place. Block ``b`` is columns ``b * block_size ..``; blocks ``0 .. sealed - 1``
are in slots, younger columns in the ring, where column ``c`` lives at ``c % ring``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..config import SparseConfig
from ..offload.copy_streams import Lane, Lanes, wait
from ..offload.page_table import FramePools, Residents
from ..ops.append import append
from ..ops.seal import Index, seal
from ..ops.sparse_decode import sparse_decode
from ..tensors import DeviceLength, lasting
from ..types import AttentionSpec
from .counters import Counters
from .pool import BlockPool, HostBudget, bucket
from .state import Held, State

VALID, SINK = 1, 2  # bits of a token's flag
INDEX_FIELDS = ("bounds", "part_fill", "codes", "qparams")  # of the pool, in an Index
_SEAL_BYTES = 1 << 26  # blocks are sealed in pieces of about this size, which bounds the temporaries of a long prompt


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


class LayerStore(State):
    """KV of one layer for ``batch`` rows.

    Attributes:
        length: columns cached (host int).
        sealed: blocks in slots (host int).
        padded: some column may be padding.
        slots: int32 ``[batch, cap]``, slot of each sealed block of each row; -1 elsewhere.
        near_kv: ``[batch, H, sinks + ring, Dk + Dv]``.
        latent: a token is a latent with its rotary part (MLA): the whole row is the key, its first part the value.
        key_dim, value_dim: widths that attention sees.
        split, width: of a token's row, whose part from ``split`` on is what ``update()`` calls its value.
        near_valid: bool ``[batch, sinks + ring]``: entries to attend to. Sealing a block clears its entries.
        seen: int32 ``[batch]``, valid tokens in sealed blocks.
    """

    TENSORS: ClassVar = {
        "slots": Held(),
        "near_kv": Held(),  # what a trial step writes there, the replay writes again
        "near_valid": Held(captured=False, trial=True),
        "seen": Held(captured=False),
    }
    HOST: ClassVar = {"length": 0, "sealed": 0, "padded": False}
    PARTS: ClassVar = ("counters",)

    keeps_blocks = True  # their keys and values; of a LeadingStore another device does

    @lasting
    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        config: SparseConfig,
        host: HostBudget | None,
        clock: DeviceLength,
        frames: FramePools | None = None,
        lanes: Lanes | None = None,
        latent: bool = False,
    ) -> None:
        self.config, self.clock, self.lanes = config, clock, lanes
        self._saved: torch.cuda.Event | None = None  # blocks are on their way to the host until then
        self.batch, self.heads, _, self.split = k.shape
        self.width, self.latent = self.split + v.shape[3], latent
        self.key_dim, self.value_dim = (self.width, self.split) if latent else (self.split, v.shape[3])
        self.dtype, self.device = k.dtype, k.device
        self.block_size, self.sinks, self.ring = config.block_size, config.sinks, ring_tokens(config)
        self.length = self.sealed = 0
        self.padded = False
        self.fixed = False  # a step is being captured: shapes may not depend on what is cached
        exact = config.max_length is not None  # what is announced gets no room to grow
        expected = -(-(config.max_length or k.shape[2]) // self.block_size)
        self.pool = BlockPool(
            heads=self.heads,
            block_size=self.block_size,
            token_dim=self.width if self.keeps_blocks else 0,
            dtype=self.dtype,
            device=self.device,
            host=host,
            capacity=expected * self.batch if exact else bucket(expected * self.batch),
        )
        self.slots = self._ints((self.batch, expected if exact else bucket(expected)), -1)
        near = self.sinks + self.ring
        self.near_kv = k.new_zeros(self.batch, self.heads, near, self.width)
        self.near_valid = torch.zeros(self.batch, near, dtype=torch.bool, device=self.device)
        self.seen = self._ints((self.batch,), 0)
        self.residents = None if frames is None else Residents(frames, self.pool)
        self.pool.register(self)
        self.counters = Counters(self.batch, self.heads, self.device)

    @lasting
    def _ints(self, shape: tuple[int, ...], value: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)

    # ------------------------------------------------------------------ writing

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        """Put a few new tokens into the ring: ``k, v [batch, H, q, D]``, ``valid [batch, q]`` bool or None."""
        length = self.clock.held(self.device) if self.fixed else self.clock.at(self.device, self.length)
        append(k, v, valid, self.near_kv, self.near_valid, length, self.sinks)
        self.padded |= valid is not None
        self.length += k.shape[2]

    def sealable(self, length: int) -> int:
        """Blocks that are older than window and drafts once ``length`` columns are cached."""
        recent = self.config.window + self.config.max_draft
        return max(self.sealed, (length - recent) // self.block_size, 0)

    def extend(self, k: Tensor, v: Tensor, valid: Tensor | None, indexer: Indexer) -> None:
        """Cache any number of new tokens, sealing what has become old on the way."""
        end = self.length + k.shape[2]
        target = self.sealable(end)
        if valid is not None:
            self.padded = True
        self.settle()
        shape = (self.batch, self.heads, self.block_size, self.width)
        piece = max(1, _SEAL_BYTES // (math.prod(shape) * k.itemsize))
        start = self.sealed
        for lo in range(start, target, piece):
            hi = min(lo + piece, target)
            lane = self.lane  # the first piece may have found out that memory cannot be pinned
            make = torch.empty if lane is None else lane.take
            blocks = make((hi - lo, *shape), dtype=self.dtype, **({"device": self.device} if lane is None else {}))
            ok = self._blocks_of(lo, hi, self.length, k, v, valid, blocks)
            self._seal(blocks, ok, indexer, lane)
        # What remains goes to the ring; older columns that stay unsealed are there already.
        first = max(target * self.block_size, self.length)
        skip = first - self.length
        self._clear(start, target)
        self.length = first
        if skip < k.shape[2]:
            self.append(k[:, :, skip:], v[:, :, skip:], None if valid is None else valid[:, skip:])

    def _ring_index(self, start: int, end: int) -> Tensor:
        """Near-buffer positions of columns ``start .. end - 1``."""
        return self.sinks + torch.arange(start, end, device=self.device) % self.ring

    # ------------------------------------------------------------------ sealing

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

    # ------------------------------------------------------------------ a step

    @property
    def table(self) -> Tensor:
        """Slots of the sealed blocks, ``[batch, sealed]``; with ``fixed`` shapes ``[batch, cap]``, -1 for none."""
        return self.slots if self.fixed else self.slots[:, : self.sealed]

    @property
    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """KV and flags of all slots, and the :attr:`table`: what a step may attend to beside the near tokens."""
        return self.pool.kv, self.pool.fields["flags"], self.table

    @property
    def near_length(self) -> int:
        """Columns in the ring."""
        return self.length - self.sealed * self.block_size

    @property
    def lane(self) -> Lane | None:
        """The way to the host; None if blocks stay on the device, or the host has to copy them itself."""
        return self.lanes.out(self.device) if self.lanes is not None and self.pool.direct else None

    def settle(self) -> None:
        """What follows on the current stream finds all blocks in place. Not for use inside a capture."""
        if self._saved is not None:
            if self._saved.query():
                self._saved = None
            else:
                wait(self._saved, self.device)

    @contextmanager
    def after_saving(self, query: Tensor) -> Iterator[Tensor]:
        """Run what is inside behind blocks that are on their way to the host, if there are any, with ``query``."""
        if self._saved is None:
            yield query
            return
        query = query.clone()  # of a view into the prompt's queries, which would be kept alive
        lane = self.lanes.out(self.device)  # though memory may have turned out since that cannot be pinned
        with lane.behind():
            try:
                yield query
            finally:
                self._saved = lane.mark()
                if query.is_cuda:
                    query.record_stream(lane.stream)
                if self.residents is not None and self.residents.pool is not None:
                    self.residents.pool.beside(self._saved)  # other layers share it

    def forget(self, slots: Tensor) -> None:
        """The pool gives these slots to other blocks; nobody has named them for a while."""
        if self.residents is not None:
            self.residents.forget(slots)

    def attend(
        self,
        q: Tensor,
        ids: Tensor | None,
        granularity: str,
        spec: AttentionSpec,
        placed: bool = False,
        places: Tensor | None = None,
        frames: Tensor | None = None,
    ) -> Tensor:
        """Attention of one query per row over the near tokens and ``ids`` (see :func:`..ops.sparse_decode`).

        ``placed``: the ids are places in the frames of :attr:`residents`, or ``places`` are those of the ids.
        ``frames``: the ids are places in these.
        """
        self.count_padded(granularity)
        return sparse_decode(
            q,
            *self.blocks,
            ids,
            self.near_kv,
            self.near_valid,
            granularity=granularity,
            value_dim=self.value_dim,
            sinks=self.sinks,
            scale=spec.scale,
            softcap=spec.softcap,
            sink_logits=spec.sink_logits,
            attended=self.counters.attended,
            frames=self.residents.pool.frames if placed else frames,
            places=places,
            from_host=None if self.pool.host is None else self.counters.from_host,
        )

    def count_padded(self, granularity: str) -> None:
        """The device's count of a step of padded rows; of others the host knows enough."""
        if self.padded:
            counters = self.counters
            ring = self.near_valid[:, self.sinks :].sum()
            counters.context += self.heads * (self.seen.sum() + ring)
            counters.near += self.heads * (ring if granularity == "all" else self.near_valid.sum())

    def count_step(self, granularity: str) -> None:
        """The host's count of a step that attended with this granularity."""
        counters, dense = self.counters, granularity == "all"
        counters.steps += 1
        counters.last_dense = dense
        counters.dense += dense
        counters.sparse += not dense
        if not self.padded:
            sinks = 0 if dense else min(self.sinks, self.sealed * self.block_size)
            counters.context_host += self.batch * self.heads * self.length
            counters.near_host += self.batch * self.heads * (self.near_length + sinks)

    def count_blocks(self, ids: Tensor) -> None:
        """The coarse level kept ``ids``."""
        self.counters.blocks += (ids >= 0).sum()

    def count_index(self, size: int) -> None:
        """``size`` bytes of bounds or labels were read."""
        self.counters.index_bytes += size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value, one KV head."""
        return self.width * self.dtype.itemsize

    def add_addresses(self, found: list[int]) -> None:
        found.extend(self.pool.addresses)
        super().add_addresses(found)
        if self.residents is not None:
            found.extend(self.residents.addresses)

    # ------------------------------------------------------------------ reading back

    def gathered_shape(self, columns: int) -> tuple[int, ...]:
        """Of a buffer that holds ``columns`` columns in blocks: ``[batch, H, blocks, block_size, Dk + Dv]``."""
        return (self.batch, self.heads, -(-columns // self.block_size), self.block_size, self.width)

    def read_blocks(self, out: Tensor) -> None:
        """Copy the sealed blocks to the device, into the front of ``out`` (see :meth:`gathered_shape`)."""
        self._read(0, self.sealed, out)
        if self.pool.host is not None:
            self.counters.to_device_bytes += self.batch * self.heads * self.sealed * self.block_size * self.token_bytes

    def _read(self, first: int, end: int, out: Tensor) -> None:
        """Copy sealed blocks ``first .. end - 1`` into the front of ``out`` (see :meth:`gathered_shape`)."""
        self.settle()
        self.pool.read(self.slots[:, first:end], out)

    def materialise(self, k: Tensor | None = None, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All cached keys and values on the device, followed by ``k, v [batch, H, q, D]``, which are not cached yet.

        Returns:
            ``[batch, H, length + q, Dk]`` and ``[..., Dv]``: views of one tensor, which the next but one call of a
            later chunk may overwrite.
        """
        size, columns = self.block_size, self.length + (0 if k is None else k.shape[2])
        out = None if k is None or self.lanes is None else self.lanes.arrived(self)
        if out is None:
            out = torch.empty(self.gathered_shape(columns), dtype=self.dtype, device=self.device)
            self.read_blocks(out)
        kv = out.flatten(2, 3)
        near = slice(self.sealed * size, self.length)
        kv[:, :, near] = self.near_kv[:, :, self._ring_index(near.start, near.stop)]
        if k is not None:
            kv[:, :, self.length : columns, : self.split] = k
            kv[:, :, self.length : columns, self.split :] = v
        kv = kv[:, :, :columns]
        return kv[..., : self.split], kv[..., self.split :]

    def valid_columns(self) -> Tensor:
        """Validity of all cached columns, bool ``[batch, length]``."""
        flags = self.pool.fields["flags"][self.table.long()].flatten(1, 2)
        ring = self.near_valid[:, self._ring_index(self.sealed * self.block_size, self.length)]
        return torch.cat(((flags & VALID) > 0, ring), dim=1)

    def sealed_blocks(self) -> tuple[Tensor, Tensor]:
        """Sealed blocks on the device, ``[sealed, batch, H, block_size, Dk + Dv]``, and their flags."""
        out = torch.empty(self.gathered_shape(self.sealed * self.block_size), dtype=self.dtype, device=self.device)
        self._read(0, self.sealed, out)
        return out.permute(2, 0, 1, 3, 4), self.pool.fields["flags"][self.table.T.long()]

    # ------------------------------------------------------------------ changing

    def reindex(self, indexer: Indexer) -> None:
        """Index the sealed blocks anew, in slots of this store's own: what is shared keeps its index."""
        kv, flags = self.sealed_blocks()
        with self.pool.lock:
            self.slots[:, : self.sealed] = self._to_slots(kv, flags, indexer.index(kv, flags))

    @lasting
    def crop(self, length: int) -> None:
        """Keep the first ``length`` columns.

        A block that would leave the window short is taken back into the ring; its slot is left to whoever shares it.
        """
        if length >= self.length:
            return
        self.settle()
        size = self.block_size
        sealed = min(self.sealed, max(0, (length - self.config.window) // size))
        if sealed < self.sealed:
            end = min(self.sealed * size, length)
            if end > sealed * size:
                at = self.slots[:, sealed : -(-end // size)]
                blocks = torch.empty(self.gathered_shape(at.shape[1] * size), dtype=self.dtype, device=self.device)
                self._read(sealed, sealed + at.shape[1], blocks)
                kv = blocks.flatten(2, 3)
                ok = (self.pool.fields["flags"][at.long()].flatten(1, 2) & VALID) > 0
                ring = self._ring_index(sealed * size, end)
                self.near_kv[:, :, ring] = kv[:, :, : end - sealed * size]
                self.near_valid[:, ring] = ok[:, : end - sealed * size]
            kept = (self.pool.fields["flags"][self.slots[:, :sealed].long()] & VALID) > 0
            self.seen.copy_(kept.flatten(1).sum(1, dtype=torch.int32))  # a captured step knows the address
            self.slots[:, sealed:] = -1
            place = torch.arange(self.sinks, device=self.device)
            self.near_valid[:, : self.sinks] = place < self.seen[:, None]
            self.sealed = sealed
            self.pool.loosened = True
        self.near_valid.index_fill_(1, self._ring_index(length, self.sealed * size + self.ring), False)
        self.length = length

    @lasting
    def map_rows(self, index: Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was. Sealed blocks are shared, not copied."""
        self.settle()
        super().map_rows(index)
        self.batch = index.shape[0]
        self.pool.loosened = True
        self.counters.regroup(self.batch)

    def fits(self, k: Tensor, v: Tensor, latent: bool = False) -> bool:
        """This store could have been made for ``k, v [batch, H, q, D]``."""
        held = (self.slots, self.near_kv, self.near_valid, self.seen, self.counters.attended, self.counters.from_host)
        if any(len(t) != self.batch for t in held):
            return False  # a change of rows stopped half-way
        mine = (self.batch, self.heads, self.split, self.width - self.split, self.latent, self.dtype, self.device)
        return mine == (k.shape[0], k.shape[1], k.shape[3], v.shape[3], latent, k.dtype, k.device)

    def reset(self) -> None:
        """Forget everything but keep the memory."""
        self.settle()
        super().reset()
        self.slots.fill_(-1)
        self.near_valid.fill_(False)
        self.seen.zero_()
        if self.residents is not None:
            self.residents.clear()
        self.pool.loosened = True
        if not self.pool.shared:
            self.pool.release_all()

    @lasting
    def copy(self, clock: DeviceLength, frames: FramePools | None = None, lanes: Lanes | None = None) -> LayerStore:
        """An independent store that shares the sealed blocks."""
        self.settle()
        new = super().copy()
        new.clock, new.lanes = clock, lanes
        new.residents = None if frames is None else Residents(frames, new.pool)
        new.pool.register(new)
        return new

    second_bytes = 0  # allocated on a second device

    def nbytes(self) -> tuple[int, int]:
        """Bytes allocated on the device and in host memory."""
        own = sum(getattr(self, name).nbytes for name in self.TENSORS)
        own += 0 if self.residents is None else self.residents.nbytes
        device, host = self.pool.nbytes()
        return device + own, host
