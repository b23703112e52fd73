"""What one cache layer holds: full blocks in a block pool, the recent window in a ring, sinks before it.

Columns are positions of the attention mask: all rows of a padded batch fill and seal a block at the same step, and
padding is a validity flag and moves no token. Block ``b`` is columns ``b * block_size ..``; blocks
``0 .. full_blocks - 1`` are in the block pool, younger columns in the ring, where column ``c`` is stored at
``c % ring``.
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
from ..offload.copy_streams import CopyStream, CopyStreams, wait
from ..offload.page_table import DevicePools, LayerPages
from ..ops.append import append
from ..ops.seal import Index, running_means, seal
from ..ops.sparse_decode import sparse_decode
from ..tensors import SeqLenTensor, no_inference_mode
from ..types import AttentionParams
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
    """Computes what a selection policy stores per block (bounds, labels)."""

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
        full_blocks: blocks in the block pool (host int).
        padded: some column may be padding.
        block_table: int32 ``[batch, cap]``, physical block of each full block of each row; -1 elsewhere.
        recent_kv: ``[batch, H, sinks + ring, Dk + Dv]``.
        latent: a token is a latent with its rotary part (MLA): the whole row is the key, its first part the value.
        key_dim, value_dim: widths that attention sees.
        mean_tokens: columns of which one mean is kept, see :meth:`keep_means`; 0: none are.
        split, width: of a token's row, whose part from ``split`` on is what ``update()`` calls its value.
        recent_valid: bool ``[batch, sinks + ring]``: entries to attend to. Sealing a block clears its entries.
        seen: int32 ``[batch]``, valid tokens in full blocks.
    """

    TENSORS: ClassVar = {
        "block_table": Held(),
        "recent_kv": Held(),  # not saved for trial runs: the replay overwrites what they write
        "recent_valid": Held(captured=False, trial=True),
        "seen": Held(captured=False),
    }
    HOST: ClassVar = {"length": 0, "full_blocks": 0, "padded": False}
    PARTS: ClassVar = ("counters",)

    mean_tokens = 0
    keeps_blocks = True  # their keys and values; those of a PrimaryStore are on another device

    @no_inference_mode
    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        config: SparseConfig,
        host: HostBudget | None,
        seq_len: SeqLenTensor,
        pools: DevicePools | None = None,
        copy_streams: CopyStreams | None = None,
        latent: bool = False,
    ) -> None:
        self.config, self.seq_len, self.copy_streams = config, seq_len, copy_streams
        self._saved: torch.cuda.Event | None = None  # blocks are on their way to the host until then
        self.batch, self.heads, _, self.split = k.shape
        self.width, self.latent = self.split + v.shape[3], latent
        self.key_dim, self.value_dim = (self.width, self.split) if latent else (self.split, v.shape[3])
        self.dtype, self.device = k.dtype, k.device
        self.block_size, self.sinks, self.ring = config.block_size, config.sinks, ring_tokens(config)
        self.length = self.full_blocks = 0
        self.padded = False
        self.capturing = False  # a step is being captured: shapes may not depend on what is cached
        exact = config.max_length is not None  # a known length needs no spare capacity
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
        self.block_table = self._ints((self.batch, expected if exact else bucket(expected)), -1)
        recent = self.sinks + self.ring
        self.recent_kv = k.new_zeros(self.batch, self.heads, recent, self.width)
        self.recent_valid = torch.zeros(self.batch, recent, dtype=torch.bool, device=self.device)
        self.seen = self._ints((self.batch,), 0)
        self.pages = None if pools is None else LayerPages(pools, self.pool)
        self.pool.register(self)
        self.counters = Counters(self.batch, self.heads, self.device)

    @no_inference_mode
    def _ints(self, shape: tuple[int, ...], value: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=self.device)

    def keep_means(self, tokens: int) -> None:
        """Keep the mean key and value of every ``tokens`` columns, a multiple of the block size, for sparse attention.

        In the pool's field ``means``, of each block a running mean: :func:`..ops.seal.running_means`. To be called
        before blocks are stored.
        """
        self.mean_tokens = tokens
        if "means" not in self.pool.fields:
            self.pool.add_field("means", (self.heads, self.width), self.dtype)

    # ------------------------------------------------------------------ writing

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        """Put a few new tokens into the ring: ``k, v [batch, H, q, D]``, ``valid [batch, q]`` bool or None."""
        length = self.seq_len.held(self.device) if self.capturing else self.seq_len.at(self.device, self.length)
        append(k, v, valid, self.recent_kv, self.recent_valid, length, self.sinks)
        self.padded |= valid is not None
        self.length += k.shape[2]

    def sealable(self, length: int) -> int:
        """Blocks that are older than window and drafts once ``length`` columns are cached."""
        recent = self.config.window + self.config.max_draft
        return max(self.full_blocks, (length - recent) // self.block_size, 0)

    def extend(self, k: Tensor, v: Tensor, valid: Tensor | None, indexer: Indexer) -> None:
        """Cache any number of new tokens, sealing what has become old on the way."""
        end = self.length + k.shape[2]
        target = self.sealable(end)
        if valid is not None:
            self.padded = True
        self.wait_for_copies()
        shape = (self.batch, self.heads, self.block_size, self.width)
        piece = max(1, _SEAL_BYTES // (math.prod(shape) * k.itemsize))
        start = self.full_blocks
        for lo in range(start, target, piece):
            hi = min(lo + piece, target)
            copy_stream = self.copy_stream  # the first piece may have found out that memory cannot be pinned
            make = torch.empty if copy_stream is None else copy_stream.take
            blocks = make(
                (hi - lo, *shape), dtype=self.dtype, **({"device": self.device} if copy_stream is None else {})
            )
            ok = self._blocks_of(lo, hi, self.length, k, v, valid, blocks)
            self._seal(blocks, ok, indexer, copy_stream)
        # What remains goes to the ring; older columns that stay unsealed are there already.
        first = max(target * self.block_size, self.length)
        skip = first - self.length
        self._clear(start, target)
        self.length = first
        if skip < k.shape[2]:
            self.append(k[:, :, skip:], v[:, :, skip:], None if valid is None else valid[:, skip:])

    def _ring_index(self, start: int, end: int) -> Tensor:
        """Recent-buffer positions of columns ``start .. end - 1``."""
        return self.sinks + torch.arange(start, end, device=self.device) % self.ring

    # ------------------------------------------------------------------ sealing

    def seal_due(self, indexer: Indexer) -> bool:
        """Seal the ring's blocks that have become old. True if there were any."""
        target = self.sealable(self.length)
        if target == self.full_blocks:
            return False
        index = indexer.sealing(self)
        while self.full_blocks < target:
            start = self.full_blocks * self.block_size
            if index is None:
                at = self._ring_index(start, start + self.block_size)
                block = self.recent_kv[:, :, at].unsqueeze(0)  # [1, batch, H, block_size, Dk + Dv]
                self._seal(block, self.recent_valid[:, at], indexer)
                self._clear(self.full_blocks - 1, self.full_blocks)
            else:
                self._seal_one(self.sinks + start % self.ring, index)
        return True

    def _seal_one(self, at: int, index: Index) -> None:
        """Seal the block at position ``at`` of the recent buffer, as :meth:`_seal` does, by few kernels."""
        self._reserve(1)
        with self.pool.lock:  # until the blocks are in the table, another copy of the cache could take them
            physical_ids = self.pool.allocate(self.batch)
            fields = self.pool.fields
            if self.mean_tokens:
                index = replace(index, means=fields["means"], earlier=self._earlier(self.full_blocks))
            index = replace(index, **{name: fields[name] for name in INDEX_FIELDS if getattr(index, name) is not None})
            seal(
                self.recent_kv,
                self.recent_valid,
                at,
                self.sinks,
                self.seen,
                physical_ids,
                self.pool.kv,
                fields["flags"],
                fields["fill"],
                index,
            )
            self.block_table[:, self.full_blocks] = physical_ids
        if self.pool.host is not None:
            self.counters.to_host_bytes += self.batch * self.heads * self.block_size * self.token_bytes
        self.full_blocks += 1

    def _reserve(self, n: int) -> None:
        """Room for ``n`` more blocks in the table."""
        if self.full_blocks + n > self.block_table.shape[1]:
            grown = self._ints((self.batch, bucket(self.full_blocks + n)), -1)
            grown[:, : self.full_blocks] = self.block_table[:, : self.full_blocks]
            self.block_table = grown

    def _clear(self, start: int, end: int) -> None:
        """Blocks ``start .. end - 1`` have left the ring."""
        if end > start:
            span = range(start * self.block_size, min(end * self.block_size, start * self.block_size + self.ring))
            self.recent_valid.index_fill_(1, self._ring_index(span.start, span.stop), False)

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
            mixed = torch.cat((self.recent_kv[:, :, at], head), dim=2)  # [batch, H, columns, Dk + Dv]
            out[: first - lo] = mixed.unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4)
            oks.append(self.recent_valid[:, at])
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

    def _seal(self, blocks: Tensor, valid: Tensor, indexer: Indexer, copy_stream: CopyStream | None = None) -> None:
        """Move the next blocks into physical blocks.

        Args:
            blocks: ``[n, batch, H, block_size, Dk + Dv]``.
            valid: bool ``[batch, n * block_size]``.
            copy_stream: the blocks are in a buffer of this copy stream, which copies them to the host.
        """
        n, size = blocks.shape[0], self.block_size
        count = valid.int().cumsum(1, dtype=torch.int32)
        nth = self.seen[:, None] + count - 1  # of a valid token among its row's valid tokens
        is_sink = valid & (nth < self.sinks)
        if self.sinks and (self.padded or self.full_blocks * size < self.sinks):
            self._keep_sinks(blocks, is_sink, nth)
        flags = valid.to(torch.uint8) * VALID + is_sink.to(torch.uint8) * SINK
        flags = flags.view(self.batch, n, size).transpose(0, 1)
        fields = {**indexer.index(blocks, flags), **self._means(blocks, flags, self.full_blocks)}
        self._reserve(n)
        if self.pool.host is not None:
            self.counters.to_host_bytes += blocks.numel() * blocks.itemsize
        with self.pool.lock:  # until the blocks are in the table, another copy of the cache could take them
            self.block_table[:, self.full_blocks : self.full_blocks + n] = self._store_blocks(
                blocks, flags, fields, copy_stream
            )
        self.seen += count[:, -1]
        self.full_blocks += n

    def _earlier(self, block: int) -> Tensor:
        """Physical blocks of those before ``block`` in its span, int32 ``[batch, n]``."""
        return self.block_table[:, block - block % (self.mean_tokens // self.block_size) : block]

    def _means(self, blocks: Tensor, flags: Tensor, start: int) -> dict[str, Tensor]:
        """The field ``means``, if it is kept, of blocks ``start ..``: see :meth:`_seal`."""
        if not self.mean_tokens:
            return {}
        means, fill, earlier = self.pool.fields["means"], self.pool.fields["fill"], self._earlier(start).long()
        first = earlier.shape[1]
        before = means[earlier[:, -1]] if first else means.new_zeros(self.batch, *means.shape[1:])
        span = self.mean_tokens // self.block_size
        found = running_means(blocks, flags == VALID, before, fill[earlier].sum(-1), first=first, span=span)
        return {"means": found}

    def _store_blocks(
        self, blocks: Tensor, flags: Tensor, fields: dict[str, Tensor], copy_stream: CopyStream | None = None
    ) -> Tensor:
        """Write blocks ``[n, batch, ...]`` and their fields into new physical blocks, int32 ``[batch, n]``."""
        physical_ids, first = self.pool.take(blocks.shape[0] * self.batch)
        fields = {name: value.flatten(0, 1) for name, value in fields.items()}
        self.pool.note(physical_ids, flags=flags.flatten(0, 1), fill=(flags == VALID).sum(-1).flatten(), **fields)
        if copy_stream is None:
            self.pool.write(physical_ids, blocks.flatten(0, 1), first)
        else:
            if first is None and physical_ids.is_cuda:
                physical_ids.record_stream(copy_stream.stream)  # read there
            self._saved = copy_stream.run(lambda: self.pool.write(physical_ids, blocks.flatten(0, 1), first))
        return physical_ids.view(-1, self.batch).T

    def _keep_sinks(self, blocks: Tensor, is_sink: Tensor, nth: Tensor) -> None:
        """Copy the sinks among the tokens of ``blocks`` to the front of the recent buffer."""
        where = nth.masked_fill(~is_sink, self.sinks).long()  # position `sinks` collects the rest
        column = torch.arange(nth.shape[1], device=self.device).expand(self.batch, -1)
        source = torch.full((self.batch, self.sinks + 1), -1, device=self.device).scatter(1, where, column)
        source = source[:, : self.sinks]
        found, at = source >= 0, source.clamp_min(0)
        rows = torch.arange(self.batch, device=self.device)[:, None]
        # [batch, sinks, H, Dk + Dv]: the index that is split by a slice comes first
        kept = blocks[at // self.block_size, rows, :, at % self.block_size].transpose(1, 2)
        front = self.recent_kv[:, :, : self.sinks]
        self.recent_kv[:, :, : self.sinks] = torch.where(found[:, None, :, None], kept, front)
        self.recent_valid[:, : self.sinks] |= found

    # ------------------------------------------------------------------ a step

    @property
    def table(self) -> Tensor:
        """The block table's used part, ``[batch, full_blocks]``; while :attr:`capturing` all of it, -1 for none."""
        return self.block_table if self.capturing else self.block_table[:, : self.full_blocks]

    @property
    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """KV and flags of all blocks, and the :attr:`table`: what a step may attend to beside the recent tokens."""
        return self.pool.kv, self.pool.fields["flags"], self.table

    @property
    def recent_length(self) -> int:
        """Columns in the ring."""
        return self.length - self.full_blocks * self.block_size

    @property
    def copy_stream(self) -> CopyStream | None:
        """The copy stream to the host; None if blocks stay on the device, or the CPU has to copy them."""
        return self.copy_streams.out(self.device) if self.copy_streams is not None and self.pool.direct else None

    def wait_for_copies(self) -> None:
        """Make the current stream wait until all blocks are in host memory. Not allowed inside a capture."""
        if self._saved is not None:
            if self._saved.query():
                self._saved = None
            else:
                wait(self._saved, self.device)

    @contextmanager
    def after_saving(self, query: Tensor) -> Iterator[Tensor]:
        """Run the body after pending copies to the host, on their stream; yields ``query``."""
        if self._saved is None:
            yield query
            return
        query = query.clone()  # of a view into the prompt's queries, which would be kept alive
        # Not self.copy_stream: memory may have turned out since then that cannot be pinned.
        copy_stream = self.copy_streams.out(self.device)
        with copy_stream.after_current_stream():
            try:
                yield query
            finally:
                self._saved = copy_stream.mark()
                if query.is_cuda:
                    query.record_stream(copy_stream.stream)
                if self.pages is not None and self.pages.pool is not None:
                    self.pages.pool.busy_until(self._saved)  # other layers share it

    def forget(self, physical_ids: Tensor) -> None:
        """Drop device pages of these blocks, which the pool is about to reuse."""
        if self.pages is not None:
            self.pages.forget(physical_ids)

    def attend(
        self,
        q: Tensor,
        ids: Tensor | None,
        granularity: str,
        params: AttentionParams,
        paged: bool = False,
        page_ids: Tensor | None = None,
        pages: Tensor | None = None,
        used: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """Attention of one query per row over the recent tokens and ``ids`` (see :func:`..ops.sparse_decode`).

        If means are kept and the ids are tokens, means stand for the tokens of full blocks that are not among them.

        ``paged``: the ids refer to device pages of :attr:`pages`, or ``page_ids`` are the page ids of the ids.
        ``pages``: the ids refer to these pages instead. ``used``: how many of the ids there are. ``columns``: of ids
        that refer to pages, where means are kept.
        """
        self.count_padded(granularity)
        means = {}
        if self.mean_tokens and granularity == "token":
            fields = self.pool.fields
            means = {"means": fields["means"], "fill": fields["fill"], "mean_tokens": self.mean_tokens}
        return sparse_decode(
            q,
            *self.blocks,
            ids,
            self.recent_kv,
            self.recent_valid,
            granularity=granularity,
            value_dim=self.value_dim,
            sinks=self.sinks,
            scale=params.scale,
            softcap=params.softcap,
            sink_logits=params.sink_logits,
            attended=self.counters.attended,
            pages=self.pages.pool.pages if paged else pages,
            page_ids=page_ids,
            from_host=None if self.pool.host is None else self.counters.from_host,
            used=used,
            columns=columns,
            **means,
        )

    def count_padded(self, granularity: str) -> None:
        """Count a step of padded rows on the device; rows without padding are counted by the host."""
        if self.padded:
            counters = self.counters
            ring = self.recent_valid[:, self.sinks :].sum()
            counters.context += self.heads * (self.seen.sum() + ring)
            counters.recent += self.heads * (ring if granularity == "all" else self.recent_valid.sum())

    def count_step(self, granularity: str) -> None:
        """The host's count of a step that attended with this granularity."""
        counters, dense = self.counters, granularity == "all"
        counters.steps += 1
        counters.last_dense = dense
        counters.dense += dense
        counters.sparse += not dense
        if not self.padded:
            sinks = 0 if dense else min(self.sinks, self.full_blocks * self.block_size)
            counters.context_host += self.batch * self.heads * self.length
            counters.recent_host += self.batch * self.heads * (self.recent_length + sinks)

    def count_blocks(self, ids: Tensor) -> None:
        """The coarse level kept ``ids``."""
        self.counters.blocks += (ids >= 0).sum()

    def count_index(self, size: int) -> None:
        """``size`` bytes of bounds or labels were read."""
        self.counters.index_bytes += size

    def count_means(self) -> None:
        """A step has read the means, if there are any."""
        if self.mean_tokens:
            spans = -(-self.full_blocks * self.block_size // self.mean_tokens)
            self.count_index(self.batch * self.heads * spans * self.token_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value, one KV head."""
        return self.width * self.dtype.itemsize

    def add_addresses(self, found: list[int]) -> None:
        found.extend(self.pool.addresses)
        super().add_addresses(found)
        if self.pages is not None:
            found.extend(self.pages.addresses)

    # ------------------------------------------------------------------ reading back

    def gathered_shape(self, columns: int) -> tuple[int, ...]:
        """Of a buffer that holds ``columns`` columns in blocks: ``[batch, H, blocks, block_size, Dk + Dv]``."""
        return (self.batch, self.heads, -(-columns // self.block_size), self.block_size, self.width)

    def read_blocks(self, out: Tensor) -> None:
        """Copy the full blocks to the device, into the front of ``out`` (see :meth:`gathered_shape`)."""
        self._read(0, self.full_blocks, out)
        if self.pool.host is not None:
            self.counters.to_device_bytes += (
                self.batch * self.heads * self.full_blocks * self.block_size * self.token_bytes
            )

    def _read(self, first: int, end: int, out: Tensor) -> None:
        """Copy full blocks ``first .. end - 1`` into the front of ``out`` (see :meth:`gathered_shape`)."""
        self.wait_for_copies()
        self.pool.read(self.block_table[:, first:end], out)

    def materialise(self, k: Tensor | None = None, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All cached keys and values on the device, followed by ``k, v [batch, H, q, D]``, which are not cached yet.

        Returns:
            ``[batch, H, length + q, Dk]`` and ``[..., Dv]``: views of one tensor, which the next but one call of a
            later chunk may overwrite.
        """
        size, columns = self.block_size, self.length + (0 if k is None else k.shape[2])
        out = None if k is None or self.copy_streams is None else self.copy_streams.arrived(self)
        if out is None:
            out = torch.empty(self.gathered_shape(columns), dtype=self.dtype, device=self.device)
            self.read_blocks(out)
        kv = out.flatten(2, 3)
        recent = slice(self.full_blocks * size, self.length)
        kv[:, :, recent] = self.recent_kv[:, :, self._ring_index(recent.start, recent.stop)]
        if k is not None:
            kv[:, :, self.length : columns, : self.split] = k
            kv[:, :, self.length : columns, self.split :] = v
        kv = kv[:, :, :columns]
        return kv[..., : self.split], kv[..., self.split :]

    def valid_columns(self) -> Tensor:
        """Validity of all cached columns, bool ``[batch, length]``."""
        flags = self.pool.fields["flags"][self.table.long()].flatten(1, 2)
        ring = self.recent_valid[:, self._ring_index(self.full_blocks * self.block_size, self.length)]
        return torch.cat(((flags & VALID) > 0, ring), dim=1)

    def full_block_kv(self) -> tuple[Tensor, Tensor]:
        """Full blocks on the device, ``[full_blocks, batch, H, block_size, Dk + Dv]``, and their flags."""
        out = torch.empty(self.gathered_shape(self.full_blocks * self.block_size), dtype=self.dtype, device=self.device)
        self._read(0, self.full_blocks, out)
        return out.permute(2, 0, 1, 3, 4), self.pool.fields["flags"][self.table.T.long()]

    # ------------------------------------------------------------------ changing

    def reindex(self, indexer: Indexer) -> None:
        """Index the full blocks again, in new blocks: blocks shared with other caches keep their index."""
        kv, flags = self.full_block_kv()
        with self.pool.lock:
            fields = {**indexer.index(kv, flags), **self._means(kv, flags, 0)}
            self.block_table[:, : self.full_blocks] = self._store_blocks(kv, flags, fields)

    @no_inference_mode
    def crop(self, length: int) -> None:
        """Keep the first ``length`` columns.

        Copies blocks back into the ring if the window would be too short; rows that share them keep them.
        """
        if length >= self.length:
            return
        self.wait_for_copies()
        size = self.block_size
        full_blocks = min(self.full_blocks, max(0, (length - self.config.window) // size))
        if full_blocks < self.full_blocks:
            end = min(self.full_blocks * size, length)
            if end > full_blocks * size:
                at = self.block_table[:, full_blocks : -(-end // size)]
                blocks = torch.empty(self.gathered_shape(at.shape[1] * size), dtype=self.dtype, device=self.device)
                self._read(full_blocks, full_blocks + at.shape[1], blocks)
                kv = blocks.flatten(2, 3)
                ok = (self.pool.fields["flags"][at.long()].flatten(1, 2) & VALID) > 0
                ring = self._ring_index(full_blocks * size, end)
                self.recent_kv[:, :, ring] = kv[:, :, : end - full_blocks * size]
                self.recent_valid[:, ring] = ok[:, : end - full_blocks * size]
            kept = (self.pool.fields["flags"][self.block_table[:, :full_blocks].long()] & VALID) > 0
            self.seen.copy_(kept.flatten(1).sum(1, dtype=torch.int32))  # in place: captured graphs hold the address
            self.block_table[:, full_blocks:] = -1
            place = torch.arange(self.sinks, device=self.device)
            self.recent_valid[:, : self.sinks] = place < self.seen[:, None]
            self.full_blocks = full_blocks
            self.pool.loosened = True
        self.recent_valid.index_fill_(1, self._ring_index(length, self.full_blocks * size + self.ring), False)
        self.length = length

    @no_inference_mode
    def map_rows(self, index: Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was. Full blocks are shared, not copied."""
        self.wait_for_copies()
        super().map_rows(index)
        self.batch = index.shape[0]
        self.pool.loosened = True
        self.counters.regroup(self.batch)

    def fits(self, k: Tensor, v: Tensor, latent: bool = False) -> bool:
        """This store could have been made for ``k, v [batch, H, q, D]``."""
        held = (
            self.block_table,
            self.recent_kv,
            self.recent_valid,
            self.seen,
            self.counters.attended,
            self.counters.from_host,
        )
        if any(len(t) != self.batch for t in held):
            return False  # a change of rows stopped half-way
        mine = (self.batch, self.heads, self.split, self.width - self.split, self.latent, self.dtype, self.device)
        return mine == (k.shape[0], k.shape[1], k.shape[3], v.shape[3], latent, k.dtype, k.device)

    def reset(self) -> None:
        """Forget everything but keep the memory."""
        self.wait_for_copies()
        super().reset()
        self.block_table.fill_(-1)
        self.recent_valid.fill_(False)
        self.seen.zero_()
        if self.pages is not None:
            self.pages.clear()
        self.pool.loosened = True
        if not self.pool.shared:
            self.pool.release_all()

    @no_inference_mode
    def copy(
        self, seq_len: SeqLenTensor, pools: DevicePools | None = None, copy_streams: CopyStreams | None = None
    ) -> LayerStore:
        """An independent store that shares the full blocks."""
        self.wait_for_copies()
        new = super().copy()
        new.seq_len, new.copy_streams = seq_len, copy_streams
        new.pages = None if pools is None else LayerPages(pools, new.pool)
        new.pool.register(new)
        return new

    second_bytes = 0  # allocated on a second device

    def nbytes(self) -> tuple[int, int]:
        """Bytes allocated on the device and in host memory."""
        own = sum(getattr(self, name).nbytes for name in self.TENSORS)
        own += 0 if self.pages is None else self.pages.nbytes
        device, host = self.pool.nbytes()
        return device + own, host
