"""What one cache layer holds: full blocks in a block pool, the recent window in a ring, sinks before it.

Tokens are counted in each row by itself (:mod:`.rows`). Token ``i`` of a row is in the block pool if its block is full
and old, else in the ring, at ``i % ring``. Two numbers say so for every token of a row: how many there are, and how
many of these are in full blocks. All layers of a cache share them, and the block table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..config import SparseConfig
from ..offload.copy_streams import CopyStream, CopyStreams, wait
from ..offload.host_limit import HostBudget
from ..offload.page_table import DevicePools, LayerPages
from ..ops.append import append
from ..ops.quantise import dequantise
from ..ops.seal import Index, seal, seal_range
from ..ops.sparse_decode import sparse_decode
from ..tensors import no_inference_mode, reads_here
from ..types import AttentionParams
from .counters import Counters
from .pool import BlockPool, room
from .row_table import RowTable
from .rows import Rows, Taken
from .state import Held, State
from .step_rows import StepRows

_ALL = slice(None)  # rows
_SEAL_BYTES = 1 << 26  # blocks are sealed in pieces of about this size, which bounds the temporaries of a long prompt


def _of_rows(index: Index, rows: slice) -> Index:
    """``index`` for some rows of the batch."""
    return index if index.channels is None or rows == _ALL else replace(index, channels=index.channels[rows])


def ring_tokens(config: SparseConfig) -> int:
    """Tokens that the ring of recent tokens holds: window and drafts, and a block that fills up behind them.

    And once more drafts: those of a pass are all written before the first of them attends.
    """
    recent = config.window + config.max_draft
    return (-(-(recent + config.max_draft) // config.block_size) + 1) * config.block_size


@dataclass
class Tally:
    """What decode steps have met, summed over steps and rows.

    Args:
        steps: how many there were, and passes over drafts. ``rows``: their rows, without those that attended to
            nothing; of a pass its queries.
        drafts: queries of passes beyond the first of each.
        context: tokens cached.
        ring: of these, not in full blocks. ``sinks``: sinks in full blocks.
        blocks: full blocks. ``sealed``: blocks that became full.
        full: how often a row had so many full blocks.
        last: the rows as the last step attended to them.
    """

    steps: int = 0
    drafts: int = 0
    rows: int = 0
    context: int = 0
    ring: int = 0
    sinks: int = 0
    blocks: int = 0
    sealed: int = 0
    full: Counter[int] = field(default_factory=Counter)
    last: Rows | None = None

    def add(self, taken: Taken, sinks: int, queries: Rows | None = None) -> None:
        """Count one step; or one pass over drafts, whose ``queries`` are those of the only row."""
        now, size = taken.now, taken.now.block_size
        if queries is not None:
            now = queries
            self.drafts += queries.batch - 1
        blocks, context = sum(now.sealed), sum(now.lengths)
        self.steps += 1
        self.rows += sum(n > 0 for n in now.lengths)
        self.context += context
        self.ring += context - blocks * size
        self.sinks += sum(min(sinks, n * size) for n in now.sealed)
        self.blocks += blocks
        self.sealed += sum(taken.after.sealed) - sum(taken.before.sealed)
        self.full.update(now.sealed)
        self.last = taken.now


class Indexer(Protocol):
    """Computes what a selection policy stores per block (bounds, labels)."""

    def index(self, kv: Tensor, start: int, rows: slice) -> dict[str, Tensor]:
        """Fields of blocks ``kv [n, rows, H, block_size, Dk + Dv]``, the first of which begins at token ``start``.

        Asked where :meth:`sealing` is None. ``rows``: which ones of the batch. Tokens before ``config.sinks`` are not
        selected.
        """
        ...

    def sealing(self, store: LayerStore) -> Index | None:
        """Where these fields are kept, for the kernels that seal blocks; None if these cannot make them."""
        ...


class LayerStore(State):
    """KV of one layer for ``batch`` rows.

    Attributes:
        table: the rows of the cache.
        recent_kv: ``[batch, H, sinks + ring, Dk + Dv]``.
        capturing: a step is being captured: shapes may not depend on what is cached, lengths are read on the device.
        latent: a token is a latent with its rotary part (MLA): the whole row is the key, its first part the value.
        key_dim, value_dim: widths that attention sees.
        mean_tokens: tokens of which one mean is kept, see :meth:`keep_means`; 0: none are.
        coming: tokens of each row with those that a policy observes before they are stored.
        split, width: of a token's row, whose part from ``split`` on is what ``update()`` calls its value.
    """

    TENSORS: ClassVar = {"recent_kv": Held()}  # not saved for trial runs: the replay overwrites what they write
    HOST: ClassVar = {
        "_rows": None,  # what this layer holds, where that is not what all do
        "_taken": None,  # the decode step under way, from its token to its end
    }
    PARTS: ClassVar = ("counters",)
    OWN: ClassVar = ("_taken",)

    coming: tuple[int, ...] = ()
    mean_tokens = 0
    keeps_blocks = True  # their keys and values; those of a PrimaryStore are on another device

    @no_inference_mode
    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        config: SparseConfig,
        host: HostBudget | None,
        table: RowTable,
        pools: DevicePools | None = None,
        copy_streams: CopyStreams | None = None,
        latent: bool = False,
        pool: BlockPool | None = None,
        blocks: int | None = None,
    ) -> None:
        self.config, self.table_of_rows, self.copy_streams = config, table, copy_streams
        self._saved: torch.cuda.Event | None = None  # blocks are on their way to the host until then
        self.batch, self.heads, _, self.split = k.shape
        self.width, self.latent = self.split + v.shape[3], latent
        self.key_dim, self.value_dim = (self.width, self.split) if latent else (self.split, v.shape[3])
        self.dtype, self.device = k.dtype, k.device
        if latent and host is not None and host.config.kv_dtype is not None:
            raise ValueError(
                f"kv_dtype={host.config.kv_dtype!r} is for keys and values: this model caches latents (MLA), which are "
                "narrow already; leave kv_dtype out"
            )
        self.block_size, self.sinks, self.ring = config.block_size, config.sinks, ring_tokens(config)
        self._rows = table.start(self.batch, k.shape[2])
        table.on(self.device)  # now, so that what a cache takes is known before the first block is full
        self._taken: Taken | None = None
        self._sealed = False  # it has sealed
        self.capturing = False
        exact = config.max_length is not None  # a known length needs no spare capacity
        expected = -(-(config.max_length or k.shape[2]) // self.block_size) * self.batch
        if blocks is not None and not exact:
            expected = blocks  # of all rows: padding takes none
        self.pool = pool or BlockPool(
            heads=self.heads,
            block_size=self.block_size,
            token_dim=self.width if self.keeps_blocks else 0,
            split=self.split,
            dtype=self.dtype,
            device=self.device,
            host=host,
            capacity=expected if exact else room(expected, self.device),
            ids=table.ids,
        )
        self.recent_kv = k.new_zeros(self.batch, self.heads, self.sinks + self.ring, self.width)
        self.pages = None if pools is None else LayerPages(pools, self.pool)
        self.pool.register(self)
        self.counters = Counters(self.batch, self.heads, self.device)

    def keep_means(self, tokens: int) -> None:
        """Keep the mean key and value of every ``tokens`` tokens, a multiple of the block size, for sparse attention.

        In the pool's field ``means``, of each block a running mean: :func:`..ops.seal.reference.running_means`. To be
        called before blocks are stored.
        """
        self.mean_tokens = tokens
        if "means" not in self.pool.fields:
            self.pool.add_field("means", (self.heads, self.width), self.dtype)

    # ------------------------------------------------------------------ what the rows hold

    @property
    def held(self) -> Rows:
        """What the rows hold in this layer: in the middle of a pass layers may differ."""
        return self._rows or self.table_of_rows.rows

    @held.setter
    def held(self, rows: Rows) -> None:
        self._rows = rows
        if not self.capturing:
            rows.on(self.device)  # in the order of this stream, before a copy stream needs it

    @contextmanager
    def at(self, rows: Rows) -> Iterator[None]:
        """Inside, the layer holds ``rows`` as it did in the step that has just ended."""
        mine, self._rows = self._rows, rows
        try:
            yield
        finally:
            self._rows = mine

    def join(self) -> None:
        """All layers hold the same: their table says what."""
        self._rows = self._taken = None

    @property
    def length(self) -> int:
        """Columns of the attention mask that are cached, padding included."""
        return self.held.columns

    @property
    def full_blocks(self) -> int:
        """Full blocks of the row that has most."""
        return max(self.held.sealed)

    @property
    def padded(self) -> bool:
        """Some column is padding."""
        return self.held.valid is not None

    @property
    def block_table(self) -> Tensor:
        """int32 ``[batch, capacity]``, physical block of each full block of each row. Behind these it says nothing."""
        held = self.table_of_rows.on(self.device)
        return held if held.shape[0] == self.batch else held[: self.batch]

    @property
    def step_rows(self) -> StepRows:
        """The rows of captured steps, on this device."""
        steps = self.table_of_rows.steps(self.device)
        return steps if len(steps.past) == self.batch else steps.first(self.batch)

    @property
    def rows(self) -> Tensor:
        """int32 ``[batch, 2]``: each row's tokens, and those in full blocks.

        Of a decode step: while it attends; and once it has sealed, as it leaves them.
        """
        if not self.capturing:
            return reads_here(self.held.on(self.device))
        over = self._taken is not None and self.held is self._taken.after and self._sealed
        return self.step_rows.after if over else self.step_rows.now

    # ------------------------------------------------------------------ writing

    def announce(self, columns: int, valid: Tensor | None) -> None:
        """``columns`` new columns are about to come, of which ``valid [batch, columns]`` are tokens: :attr:`coming`."""
        if not self.capturing:
            more = self.table_of_rows.tokens_of(columns, valid)
            self.coming = tuple(length + n for length, n in zip(self.held.lengths, more))

    def fit(self, before: Rows) -> None:
        """Make room in the pool for all that the table names, sealed or not.

        Raises:
            MemoryError: there is none; so does torch on a GPU. The table names what ``before`` needs: or copies of the
                cache, which share the pools, would have to make room for the rest.
        """
        try:
            self.pool.fit()
        except BaseException:
            self.table_of_rows.trim([before])
            raise

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None = None, taken: Taken | None = None) -> None:
        """A decode step: put one new token of each row into the ring, ``k, v [batch, H, 1, D]``; of drafts several.

        ``valid``: bool ``[batch, 1]`` or None, rows that get one. ``taken``: the step as another store has it, or the
        pass over drafts. What a captured pass writes behind its last draft lands where no row holds a token, for the
        ring has room for all (:func:`ring_tokens`), and is written over by the next tokens.
        """
        if taken is None:
            taken = self.table_of_rows.step(self.held, None if self.capturing else valid, self.capturing)
        if not self.capturing:
            self.fit(taken.before)
        past = self.step_rows.past if self.capturing else taken.before.on(self.device)[:, 0]
        append(k, v, valid, self.recent_kv, past, self.sinks)
        self._taken, self._sealed, self.held = taken, False, taken.now

    def extend(self, k: Tensor, v: Tensor, valid: Tensor | None, indexer: Indexer) -> None:
        """Cache any number of new columns ``k, v [batch, H, q, D]``, sealing what has become old on the way.

        ``valid``: bool ``[batch, q]``; what is padding is left out. None: nothing is.
        """
        self.wait_for_copies()
        before = self.held
        after = self.table_of_rows.follow(before, k.shape[2], valid)
        self.fit(before)
        if valid is None and before.uniform:
            self._extend(_ALL, k, v, before, after, indexer)
        else:
            picks = [slice(None)] * self.batch if valid is None else self.table_of_rows.picks(valid)
            for row, at in enumerate(picks):
                mine = (x[row : row + 1, :, at] for x in (k, v))
                self._extend(slice(row, row + 1), *mine, before, after, indexer)
        self._taken, self.held = None, after

    def _extend(self, rows: slice, k: Tensor, v: Tensor, before: Rows, after: Rows, indexer: Indexer) -> None:
        """:meth:`extend` of rows that hold as much as each other."""
        first = rows.start or 0
        length, start, target = before.lengths[first], before.sealed[first], after.sealed[first]
        recent_kv = self.recent_kv if rows == _ALL else self.recent_kv[rows]
        if start < target:
            self._seal_range(rows, start, target, length, k, v, indexer)
        # What remains goes to the ring; older tokens that stay unsealed are there already.
        skip = max(target * self.block_size - length, 0)
        if skip < k.shape[2]:
            past = after.past(len(recent_kv), length + skip, self.device)
            append(k[:, :, skip:], v[:, :, skip:], None, recent_kv, past, self.sinks)

    def _ring_index(self, start: int, end: int) -> Tensor:
        """Recent-buffer positions of tokens ``start .. end - 1``."""
        return self.sinks + torch.arange(start, end, device=self.device) % self.ring

    @no_inference_mode
    def read_sinks(self) -> None:
        """The first row has begun with full blocks that were there: put its sinks where decode steps look for them."""
        self.join()
        size, ids = self.block_size, self.table_of_rows.host[0]
        for block in range(min(-(-self.sinks // size), self.full_blocks)):
            # All of it: what is whole is copied from pinned memory in the order of the stream.
            kv = self.pool.kv[int(ids[block])].to(self.device, non_blocking=True)  # [H, block_size, Dk + Dv]
            if (scales := self.pool.fields.get("scales")) is not None:
                kv = dequantise(kv, scales[int(ids[block])], self.split, self.dtype)
            first = block * size
            n = min(size, self.sinks - first)
            self.recent_kv[0, :, first : first + n] = kv[:, :n]

    # ------------------------------------------------------------------ sealing

    def seal_due(self, indexer: Indexer, due: Sequence[Tensor] | None = None) -> None:
        """Seal what a decode step has made old, once it has attended; or what drafts will have, before they attend.

        In a captured step the device knows which rows. ``due``: in a captured pass over drafts, the row as
        :meth:`_sealing` has it.
        """
        taken = self._taken
        if taken.after.sealed == taken.before.sealed and not self.capturing:
            self.held = taken.after
            return
        self.pool.fit()
        index = indexer.sealing(self)
        if index is None:
            for row, (block, then) in enumerate(zip(taken.before.sealed, taken.after.sealed)):
                if block < then:
                    none = self.recent_kv[row : row + 1, :, :0].split((self.split, self.width - self.split), -1)
                    past = taken.now.lengths[row]
                    # Not aside: what follows in this pass, later drafts among it, reads these blocks.
                    self._seal_range(slice(row, row + 1), block, then, past, *none, indexer, aside=False)
        else:
            index = self._with_means(replace(index, scales=self.pool.fields.get("scales")))
            for now, after in pairwise(self._sealing(taken) if due is None else due):
                seal(self.recent_kv, now, after, self.sinks, self.block_table, self.pool.kv, index)
            if self.pool.host is not None and not self.capturing:
                self.count_to_host(sum(taken.after.sealed) - sum(taken.before.sealed))
        self._sealed, self.held = True, taken.after

    def _sealing(self, taken: Taken) -> list[Tensor]:
        """The rows, int32 ``[batch, 2]``, before each of the blocks that are due is sealed, and behind the last one."""
        if self.capturing:
            return [self.rows, self.step_rows.after]
        first, last = taken.before.sealed, taken.after.sealed
        more = range(max(then - block for block, then in zip(first, last)))
        between = [tuple(min(block + i, then) for block, then in zip(first, last)) for i in more]
        held = [taken.now if taken.now.sealed == one else replace(taken.now, sealed=one, _on={}) for one in between]
        return [rows.on(self.device) for rows in (*held, taken.after)]

    def count_to_host(self, blocks: int) -> None:
        """So many blocks have gone to host memory."""
        if self.pool.host is not None:
            self.counters.to_host_bytes += blocks * self.heads * self.block_size * self.stored_bytes

    def _with_means(self, index: Index) -> Index:
        """``index`` with the place of the means, if they are kept."""
        if not self.mean_tokens:
            return index
        return replace(index, means=self.pool.fields["means"], span=self.mean_tokens // self.block_size)

    def _seal_range(
        self, rows: slice, start: int, end: int, past: int, k: Tensor, v: Tensor, indexer: Indexer, aside: bool = True
    ) -> None:
        """Seal blocks ``start .. end - 1`` of some rows, of the ring's tokens and new ones.

        Args:
            past: tokens that were there before ``k, v [rows, H, n, D]``.
            aside: a copy stream may bring them to the host, if there is one. What reads them next has to wait for it.
        """
        pool, index = self.pool, indexer.sealing(self)
        by_host = index is None
        index = self._with_means(_of_rows(Index(self.key_dim) if by_host else index, rows))
        recent_kv, table = self.recent_kv, self.block_table
        if rows != _ALL:
            recent_kv, table = recent_kv[rows], table[rows]
        shape = (len(recent_kv), self.heads, self.block_size, self.width)
        piece = end - start
        staged = by_host or self.copy_stream is not None or pool.kv.device != self.device or "scales" in pool.fields
        if staged:
            piece = max(1, _SEAL_BYTES // (math.prod(shape) * k.itemsize))
        for lo in range(start, end, piece):
            hi, kv = min(lo + piece, end), pool.kv
            copy_stream = self.copy_stream if aside else None  # a piece may have found that memory cannot be pinned
            if copy_stream is not None:
                kv = copy_stream.take((hi - lo, *shape), dtype=self.dtype)
            elif staged:
                kv = torch.empty(hi - lo, *shape, dtype=self.dtype, device=self.device)
            seal_range(recent_kv, k, v, past, lo, hi, self.sinks, table, kv, index)
            if by_host:
                found = indexer.index(kv, lo * self.block_size, rows)
                pool.note(table[:, lo:hi].T.flatten(), **{name: value.flatten(0, 1) for name, value in found.items()})
            if staged:
                self._store_blocks(kv, rows, lo, copy_stream)
            self.count_to_host((hi - lo) * len(recent_kv))

    def _store_blocks(self, blocks: Tensor, rows: slice, start: int, copy_stream: CopyStream | None) -> None:
        """Write blocks ``start ..`` of some rows, ``[n, rows, H, block_size, Dk + Dv]``, to where the pool has them.

        ``copy_stream``: they are in a buffer of this copy stream, which copies them to the host.
        """
        end = start + len(blocks)
        ids = self.table_of_rows.host[rows, start:end].T.flatten()
        first = int(ids[0]) if (ids[1:] - ids[:-1] == 1).all() else None
        scales = self.pool.fields.get("scales")
        physical_ids = None
        if first is None or scales is not None:
            # A copy, never a view of the table, which changes in place before a copy stream reads it.
            physical_ids = self.block_table[rows, start:end].T.clone(memory_format=torch.contiguous_format).flatten()
        if copy_stream is None:
            self.pool.write(physical_ids, blocks.flatten(0, 1), first)
        else:
            for used in (physical_ids, scales):  # read and written there: not freed before that
                if used is not None and used.is_cuda:
                    used.record_stream(copy_stream.stream)
            self._saved = copy_stream.run(lambda: self.pool.write(physical_ids, blocks.flatten(0, 1), first))
            self.pool.in_use_until(self._saved)

    # ------------------------------------------------------------------ a step

    @property
    def table(self) -> Tensor:
        """The block table's used part, ``[batch, full_blocks]``; while :attr:`capturing` all of it."""
        return self.block_table if self.capturing else self.block_table[:, : self.full_blocks]

    @property
    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """KV of all blocks, :attr:`rows` and :attr:`table`: what a step may attend to beside the recent tokens."""
        return self.pool.kv, self.rows, self.table

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

    def in_use_until(self, event: torch.cuda.Event) -> None:
        """A copy stream reads the block table and blocks until ``event``."""
        self.pool.in_use_until(event)
        self.table_of_rows.in_use_until(event, self.device)

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
                self.in_use_until(self._saved)
                if query.is_cuda:
                    query.record_stream(copy_stream.stream)
                if self.pages is not None and self.pages.pool is not None:
                    self.pages.pool.busy_until(self._saved)  # other layers share it

    def forget(self, ids: Tensor) -> None:
        """Drop device pages of these blocks, which mean nothing any more."""
        if self.pages is not None:
            self.pages.forget(ids)

    def attend(
        self,
        q: Tensor,
        ids: Tensor | None,
        granularity: str,
        params: AttentionParams,
        page_ids: Tensor | None = None,
        pages: Tensor | None = None,
        used: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """Attention of one query per row over the recent tokens and ``ids`` (see :func:`..ops.sparse_decode`).

        If means are kept and the ids are tokens, means stand for the tokens of full blocks that are not among them.

        ``pages``: the ids refer to these pages, or ``page_ids`` do, which are those of the ids. ``used``: how many of
        the ids there are. ``columns``: of ids that refer to pages, where means are kept.
        """
        means = {}
        if self.mean_tokens and granularity == "token":
            fields = self.pool.fields
            means = {"means": fields["means"], "mean_tokens": self.mean_tokens}
        return sparse_decode(
            q,
            *self.blocks,
            ids,
            self.recent_kv,
            granularity=granularity,
            value_dim=self.value_dim,
            sinks=self.sinks,
            scale=params.scale,
            softcap=params.softcap,
            sink_logits=params.sink_logits,
            attended=self.counters.attended,
            pages=pages,
            page_ids=page_ids,
            from_host=None if self.pool.host is None else self.counters.from_host,
            used=used,
            columns=columns,
            scales=self.pool.fields.get("scales"),
            **means,
        )

    def tally(self, queries: Rows | None = None) -> Tally:
        """Of the decode step that has just ended, or the pass over drafts, whose ``queries`` are those of the row."""
        tally = Tally()
        tally.add(self._taken, self.sinks, queries)
        return tally

    def count_steps(self, granularity: str, tally: Tally) -> None:
        """Count decode steps that attended with this granularity."""
        counters, dense = self.counters, granularity == "all"
        counters.steps += tally.steps
        counters.drafts += tally.drafts
        counters.last_dense = dense
        counters.dense += dense * tally.steps
        counters.sparse += (not dense) * tally.steps
        counters.context += self.heads * tally.context
        counters.recent += self.heads * (tally.ring if dense else tally.ring + tally.sinks)

    def count_index(self, size: int) -> None:
        """``size`` bytes of bounds or labels were read."""
        self.counters.index_bytes += size

    def count_means(self, tally: Tally) -> None:
        """Steps have read the means, if there are any."""
        if self.mean_tokens:
            blocks = self.mean_tokens // self.block_size
            spans = sum(times * -(-n // blocks) for n, times in tally.full.items())
            self.count_index(self.heads * spans * self.token_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value, one KV head."""
        return self.width * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """As :attr:`token_bytes`, as the block pool has them: of codes fewer go over the link."""
        return self.width * self.pool.kv.itemsize

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
            blocks = self.batch * self.heads * self.full_blocks
            self.counters.to_device_bytes += blocks * self.block_size * self.stored_bytes

    def _read(self, first: int, end: int, out: Tensor) -> None:
        """Copy blocks ``first .. end - 1`` into the front of ``out`` (see :meth:`gathered_shape`).

        What is there of rows that have fewer means nothing.
        """
        self.wait_for_copies()
        self.pool.read(self.block_table[:, first:end], out)

    def _gathered(self, first: int, end: int) -> Tensor:
        """The same in a tensor of its own."""
        shape = self.gathered_shape((end - first) * self.block_size)
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._read(first, end, out)
        return out

    def materialise(self, k: Tensor | None = None, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All cached keys and values on the device, followed by ``k, v [batch, H, q, D]``, which are not cached yet.

        Returns:
            ``[batch, H, length + q, Dk]`` and ``[..., Dv]`` by columns of the attention mask: views of one tensor,
            which the next but one call of a later chunk may overwrite. What padding has is finite.
        """
        rows, new = self.held, 0 if k is None else k.shape[2]
        out = None if k is None or self.copy_streams is None else self.copy_streams.arrived(self)
        kv = self.tokens(out, rows.columns + new)
        if rows.valid is not None or not rows.uniform:
            token = (rows.valid_columns(self.device).cumsum(1) - 1).clamp_min(0)  # of each column
            for row, length in enumerate(rows.lengths):  # one by one: twice a row is less than twice all
                kv[row, :, : rows.columns] = kv[row][:, token[row]] if length else 0
        kv = kv[:, :, : rows.columns + new]
        key, value = kv.split((self.split, self.width - self.split), -1)
        if k is not None:
            key[:, :, rows.columns :], value[:, :, rows.columns :] = k, v
        return key, value

    def tokens(self, out: Tensor | None = None, room: int = 0) -> Tensor:
        """All cached tokens on the device, ``[batch, H, n, Dk + Dv]``, n no less than ``room``.

        What is there behind a row's last token means nothing. ``out``: of :meth:`gathered_shape`, with the full blocks
        in it.
        """
        rows = self.held
        if out is None:
            out = torch.empty(self.gathered_shape(max(room, *rows.lengths, 1)), dtype=self.dtype, device=self.device)
            self.read_blocks(out)
        kv = out.flatten(2, 3)
        groups = [_ALL] if rows.uniform else [slice(row, row + 1) for row in range(self.batch)]
        for some in groups:
            first = some.start or 0
            held, to = (t if some == _ALL else t[some] for t in (self.recent_kv, kv))
            at, end = rows.sealed[first] * self.block_size, rows.lengths[first]
            while at < end:  # the ring begins again once at most
                begun = at % self.ring
                until = min(end, at + self.ring - begun)
                to[:, :, at:until] = held[:, :, self.sinks + begun : self.sinks + begun + until - at]
                at = until
        return kv

    def valid_columns(self) -> Tensor:
        """Validity of all cached columns, bool ``[batch, length]``."""
        return self.held.valid_columns(self.device)

    # ------------------------------------------------------------------ changing

    def first_rows(self, n: int) -> LayerStore:
        """The first ``n`` rows, of which a captured step is to be made."""
        new = super().first_rows(n)
        new.batch = n
        return new

    def reindex(self, indexer: Indexer, own: bool = True) -> None:
        """Index the full blocks again. Rows that share blocks get blocks of their own: each row has its own index.

        ``own``: False for rows that stand for those of another store, whose blocks theirs are.
        """
        if own:
            self.table_of_rows.unshare()
        kv, sealed = self._gathered(0, self.full_blocks), self.held.sealed
        index, size = indexer.sealing(self), self.block_size
        nowhere = kv.new_empty(0, self.heads, size, 0)
        front = torch.empty_like(self.recent_kv)  # not the sinks that are kept: those of codes would be rounded
        groups = [slice(None)] if self.held.uniform else [slice(row, row + 1) for row in range(self.batch)]
        for rows in groups:
            n, table = sealed[rows.start or 0], self.block_table[rows]
            if not n:
                continue
            if index is None:
                found = indexer.index(kv[rows, :, :n].permute(2, 0, 1, 3, 4), 0, rows)
                at = table[:, :n].T.flatten()
                self.pool.note(at, **{name: value.flatten(0, 1) for name, value in found.items()})
            else:
                tokens = kv[rows].flatten(2, 3).split((self.split, self.width - self.split), -1)
                of_rows = _of_rows(index, rows)
                seal_range(front[rows], *tokens, 0, 0, n, self.sinks, table, nowhere, of_rows)

    @no_inference_mode
    def crop(self, length: int) -> None:
        """Keep the first ``length`` columns.

        Copies blocks back into the ring if the window would be too short; rows that share them keep them.
        """
        if length < self.length:
            self.crop_to(self.table_of_rows.cropped(self.held, length))

    @no_inference_mode
    def crop_to(self, after: Rows) -> None:
        """Hold ``after``, which is what is held without the last tokens of some rows."""
        self.wait_for_copies()
        size, before, back = self.block_size, self.held, []
        for row, (sealed, then, tokens) in enumerate(zip(before.sealed, after.sealed, after.lengths)):
            if then * size < (end := min(sealed * size, tokens)):
                back.append((row, then * size, end))
        if back:  # of all rows the blocks between these: not a whole past because another row is short
            first = min(start for _, start, _ in back) // size
            kv = self._gathered(first, -(-max(end for *_, end in back) // size)).flatten(2, 3)
            for row, start, end in back:
                held = kv[row, :, start - first * size : end - first * size]
                self.recent_kv[row, :, self._ring_index(start, end)] = held
        self._taken, self.held = None, after

    @no_inference_mode
    def map_rows(self, index: Tensor, rows: Rows) -> None:
        """Row ``i`` becomes what row ``index[i]`` was, which makes ``rows`` of them. Their table has its own turn."""
        self.wait_for_copies()
        super().map_rows(index)
        self.batch = index.shape[0]
        self._taken, self.held = None, rows
        self.counters.regroup(self.batch)

    def fits(self, k: Tensor, v: Tensor, latent: bool = False) -> bool:
        """This store could have been made for ``k, v [batch, H, q, D]``."""
        if any(len(t) != self.batch for t in (self.recent_kv, self.counters.attended, self.counters.from_host)):
            return False  # a change of rows stopped half-way
        mine = (self.batch, self.heads, self.split, self.width - self.split, self.latent, self.dtype, self.device)
        return mine == (k.shape[0], k.shape[1], k.shape[3], v.shape[3], latent, k.dtype, k.device)

    def begin(self, tokens: int) -> None:
        """The first of about ``tokens`` columns are about to come."""
        self._rows = self.table_of_rows.start(self.batch, tokens)

    def reset(self) -> None:
        """Forget everything but keep the memory. The table of the rows has its own turn."""
        self.wait_for_copies()
        super().reset()
        self.held = self.table_of_rows.empty
        if self.pages is not None:
            self.pages.clear()

    @no_inference_mode
    def copy(
        self, table: RowTable, pools: DevicePools | None = None, copy_streams: CopyStreams | None = None
    ) -> LayerStore:
        """An independent store that shares the full blocks."""
        self.wait_for_copies()
        new = super().copy()
        new.table_of_rows, new.copy_streams = table, copy_streams
        new.pages = None if pools is None else LayerPages(pools, new.pool)
        new.pool.register(new)
        return new

    second_bytes = 0  # allocated on a second device

    def nbytes(self) -> tuple[int, int]:
        """Bytes allocated on the device and in host memory."""
        own = self.recent_kv.nbytes + (0 if self.pages is None else self.pages.nbytes)
        device, host = self.pool.nbytes()
        return device + own, host
