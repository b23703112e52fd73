"""The store of one cache layer: full blocks in a block pool, the recent window in a ring, sinks before it.

Each row counts its own tokens (:mod:`.rows`). Token ``i`` of a row is in the block pool if its block is full
and old, else in the ring, at ``i % ring``. Two numbers say so for every token of a row: how many there are, and how
many of these are in full blocks. All layers of a cache share them, and the block table.

It alone says in which order its parts work: a token comes, attends, and is sealed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hf_sparsekv_config.sparse import SparseConfig

from ..offload.copy_streams import CopyStreams
from ..offload.host_limit import HostBudget
from ..offload.page_table import DevicePools, LayerPages
from ..ops.attention.sparse_decode import sparse_decode
from ..ops.storage.append import append
from ..tensors import no_inference_mode, reads_here
from ..types import AttentionParams
from .block_writer import BlockWriter
from .counters import Counters, Tally
from .memory import new_memory
from .pool import BlockPool, room
from .ring import Ring, ring_tokens
from .row_table import RowTable
from .rows import Rows, Taken
from .sealing import Indexer, Span, indexing, seal_span, seal_steps, steps_due, with_means
from .state import Held, State
from .step_rows import StepRows

if TYPE_CHECKING:
    from typing_extensions import Self

_ALL = slice(None)  # rows


class LayerStore(State):
    """KV of one layer for ``batch`` rows.

    Attributes:
        table_of_rows: the rows of the cache, which all layers share.
        batch: rows; a captured step may be of the first ones of the table alone.
        capturing: a step is being captured: shapes may not depend on what is cached, lengths are read on the device.
        coming: tokens of each row with those that a policy observes before they are stored.
        recent_kv: ``[batch, H, sinks + ring, Dk + Dv]``.
        ring: where tokens are in it.
        pool: full blocks. ``writer``: writes them, and knows what waits for copies of them.
        latent: a token is a latent with its rotary part (MLA): the whole row is the key, its first part the value.
        key_dim, value_dim: widths that attention sees.
        mean_tokens: tokens that share one mean, see :meth:`keep_means`; 0: none are.
        split, width: of a token's row, whose part from ``split`` on is what ``update()`` calls its value.
        token_bytes, stored_bytes: of a token's key and value, one KV head; and as the pool has it, which may be codes.
    """

    TENSORS: ClassVar = {"recent_kv": Held()}  # not saved for trial runs: the replay overwrites what they write
    HOST: ClassVar = {
        "_rows": None,  # what this layer holds, where that is not what all do
        "_taken": None,  # the decode step under way, from its token to its end
    }
    PARTS: ClassVar = ("counters",)
    OWN: ClassVar = ("_taken",)

    _rows: Rows | None
    _taken: Any  # Taken | None: never None where it is read
    recent_kv: Tensor
    counters: Counters
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
        batch, heads, tokens, split = k.shape
        if latent and host is not None and host.config.kv_dtype is not None:
            raise ValueError(
                f"kv_dtype={host.config.kv_dtype!r} is for keys and values: this model caches latents (MLA), which are "
                "narrow already; leave kv_dtype out"
            )
        super().__init__()
        self.table_of_rows, self.batch, self.device = table, batch, k.device
        self._rows = table.start(batch, tokens)
        table.blocks.on[k.device]  # now, so that what a cache takes is known before the first block is full
        self._sealed = self.capturing = False  # it has sealed; its step is being captured
        self.config, self.heads, self.dtype, self.latent = config, heads, k.dtype, latent
        self.split, self.width = split, split + v.shape[3]
        self.key_dim, self.value_dim = (self.width, split) if latent else (split, v.shape[3])
        self.block_size, self.sinks = config.block_size, config.sinks
        self.ring = Ring(config.sinks, ring_tokens(config))
        exact = config.max_length is not None  # a known length needs no spare capacity
        expected = -(-(config.max_length or tokens) // self.block_size) * self.batch
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
        self.token_bytes, self.stored_bytes = self.width * self.dtype.itemsize, self.width * self.pool.kv.itemsize
        self.recent_kv = new_memory("ring", (batch, heads, sum(self.ring), self.width), k.dtype, k.device, zeros=True)
        self.writer = BlockWriter(self.pool, table, copy_streams)
        self.pages = None if pools is None else LayerPages(pools, self.pool)
        stored = 0 if self.pool.host is None else self.heads * self.block_size * self.stored_bytes
        self.counters = Counters(self.batch, self.heads, self.device, stored)

    def keep_means(self, tokens: int) -> None:
        """Keep the mean key and value of every ``tokens`` tokens, a multiple of the block size, for sparse attention.

        The pool's field ``means`` has :func:`..ops.storage.seal.reference.running_means`. Call it before any block is
        stored.
        """
        self.mean_tokens = tokens
        if "means" not in self.pool.fields:
            self.pool.add_field("means", (self.heads, self.width), self.dtype)

    # ------------------------------------------------------------------ what its rows hold

    @property
    def held(self) -> Rows:
        """The rows in this layer: in the middle of a pass layers may differ."""
        return self._rows or self.table_of_rows.rows

    @held.setter
    def held(self, rows: Rows) -> None:
        self._rows = rows
        if not self.capturing:
            rows.on[self.device]  # in the order of this stream, before a copy stream needs it

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

    def announce(self, columns: int, valid: Tensor | None) -> None:
        """``columns`` new columns are about to come; ``valid [batch, columns]`` are tokens: :attr:`coming`."""
        if not self.capturing:
            more = self.table_of_rows.tokens_of(columns, valid)
            self.coming = tuple(length + n for length, n in zip(self.held.lengths, more))

    def first_rows(self, n: int) -> LayerStore:
        """The first ``n`` rows, for a captured step of them."""
        new = super().first_rows(n)
        new.batch = n
        return new

    @property
    def length(self) -> int:
        """Columns of the attention mask that are cached, padding included."""
        return (self._rows or self.table_of_rows.rows).columns

    @property
    def full_blocks(self) -> int:
        """Full blocks of the row that has most."""
        return (self._rows or self.table_of_rows.rows).full_blocks

    @property
    def block_table(self) -> Tensor:
        """int32 ``[batch, capacity]``, physical block of each full block of each row; after these it says nothing."""
        held = self.table_of_rows.blocks.on[self.device]
        return held if held.shape[0] == self.batch else held[: self.batch]

    @property
    def table(self) -> Tensor:
        """The block table's used part, ``[batch, full_blocks]``; while :attr:`capturing` all of it."""
        held = self.table_of_rows.blocks.on[self.device]  # as block_table, without its call; QueryRows has its own
        n = None if self.capturing else (self._rows or self.table_of_rows.rows).full_blocks
        return held[: self.batch, :n]

    @property
    def step_rows(self) -> StepRows:
        """The rows of captured steps, on this device."""
        steps = self.table_of_rows.steps(self.device)
        return steps if len(steps.past) == self.batch else steps.first(self.batch)

    @property
    def rows(self) -> Tensor:
        """int32 ``[batch, 2]``: each row's tokens, and those in full blocks.

        In a decode step: while it attends; once it has sealed, as it leaves them.
        """
        if not self.capturing:
            return reads_here((self._rows or self.table_of_rows.rows).on[self.device])
        over = self._taken is not None and self.held is self._taken.after and self._sealed
        return self.step_rows.after if over else self.step_rows.now

    # ------------------------------------------------------------------ writing

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
        pass over drafts. A captured pass may write after its last draft, where no row holds a token: the ring has room
        for all (:func:`.ring.ring_tokens`). The next tokens overwrite it.
        """
        if taken is None:
            taken = self.table_of_rows.step(self.held, None if self.capturing else valid, self.capturing)
        if not self.capturing:
            self.fit(taken.before)
        past = self.step_rows.past if self.capturing else taken.before.on[self.device][:, 0]
        append(k, v, valid, self.recent_kv, past, self.sinks)
        self._taken, self._sealed, self.held = taken, False, taken.now

    def extend(self, k: Tensor, v: Tensor, valid: Tensor | None, indexer: Indexer) -> None:
        """Cache any number of new columns ``k, v [batch, H, q, D]``, sealing what has become old on the way.

        ``valid``: bool ``[batch, q]``; what is padding is left out. None: nothing is.
        """
        self.writer.wait()
        before = self.held
        after = self.table_of_rows.follow(before, k.shape[2], valid)
        self.fit(before)
        parts: Iterable[tuple[slice, Tensor, Tensor]] = [(_ALL, k, v)]
        if valid is not None or not before.uniform:
            picks = [slice(None)] * self.batch if valid is None else self.table_of_rows.picks(valid)
            parts = ((slice(n, n + 1), k[n : n + 1, :, at], v[n : n + 1, :, at]) for n, at in enumerate(picks))
        for rows, mine, values in parts:  # rows that hold as much as each other
            first = rows.start or 0
            length, start, end = before.lengths[first], before.sealed[first], after.sealed[first]
            if start < end:
                self._seal(Span(rows, start, end, length), mine, values, indexer)
            # The rest goes to the ring; older tokens that stay unsealed are there already.
            skip = max(end * self.block_size - length, 0)
            if skip < mine.shape[2]:
                recent_kv = self.recent_kv if rows == _ALL else self.recent_kv[rows]
                past = after.past(len(recent_kv), length + skip, self.device)
                append(mine[:, :, skip:], values[:, :, skip:], None, recent_kv, past, self.sinks)
        self.took(after)

    def took(self, after: Rows) -> None:
        """New columns are cached: hold ``after``."""
        self._taken, self.held = None, after

    # ------------------------------------------------------------------ sealing

    def seal_due(self, indexer: Indexer, due: Sequence[Tensor] | None = None) -> None:
        """Seal what a decode step has made old, once it has attended; or what drafts will have, before they attend.

        In a captured step the device knows which rows. ``due``: in a captured pass over drafts, the row as
        :func:`.sealing.steps_due` has it.
        """
        taken = self._taken
        if taken.after.sealed == taken.before.sealed and not self.capturing:
            if taken.after is not taken.now:  # which is held
                self.held = taken.after
            return
        self.pool.fit()
        index = indexer.sealing(self)
        if index is None:
            for row, (block, then) in enumerate(zip(taken.before.sealed, taken.after.sealed)):
                if block < then:
                    none = self.recent_kv[row : row + 1, :, :0].split((self.split, self.width - self.split), -1)
                    # Not aside: what follows in this pass, later drafts among it, reads these blocks.
                    span = Span(slice(row, row + 1), block, then, taken.now.lengths[row])
                    self._seal(span, none[0], none[1], indexer, aside=False)
        else:
            if due is None:
                due = [self.rows, self.step_rows.after] if self.capturing else steps_due(taken, self.device)
            index = with_means(index, self.pool, self.mean_tokens)
            seal_steps(self.recent_kv, due, self.sinks, self.block_table, self.pool, index)
            if not self.capturing:
                self.counters.count_to_host(sum(taken.after.sealed) - sum(taken.before.sealed))
        self._sealed, self.held = True, taken.after

    def _seal(self, span: Span, k: Tensor, v: Tensor, indexer: Indexer, aside: bool = True) -> None:
        """Seal blocks of the ring's tokens and of ``k, v``, see :func:`.sealing.seal_span`."""
        index, by_host = indexing(indexer, self)
        index, table = with_means(index, self.pool, self.mean_tokens), self.block_table
        seal_span(span, self.recent_kv, k, v, self.sinks, table, self.writer, index, by_host, aside)
        self.counters.count_to_host((span.end - span.start) * len(self.recent_kv[span.rows]))

    # ------------------------------------------------------------------ a step

    @property
    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """KV of all blocks, :attr:`rows` and :attr:`table`: what a step may attend to beside the recent tokens."""
        return self.pool.kv, self.rows, self.table

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
        """Attention of one query per row over the recent tokens and ``ids`` (:func:`..ops.attention.sparse_decode`).

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

    def count_means(self, tally: Tally) -> None:
        """Steps have read the means, if there are any."""
        if self.mean_tokens:
            blocks = self.mean_tokens // self.block_size
            spans = sum(times * -(-n // blocks) for n, times in tally.full.items())
            self.counters.index_bytes += self.heads * spans * self.token_bytes

    def add_addresses(self, found: list[int]) -> None:
        found.extend(self.pool.addresses)
        super().add_addresses(found)
        if self.pages is not None:
            found.extend(self.pages.addresses)

    # ------------------------------------------------------------------ reading back (:mod:`.read_back`)

    def shape(self, columns: int) -> tuple[int, ...]:
        """Shape of a buffer for ``columns`` columns in blocks: ``[batch, H, blocks, block_size, Dk + Dv]``."""
        return (self.batch, self.heads, -(-columns // self.block_size), self.block_size, self.width)

    def read(self, first: int, end: int, out: Tensor | None = None) -> Tensor:
        """Copy blocks ``first .. end - 1`` into the front of ``out``, or of a new tensor (see :meth:`shape`).

        Rows that have fewer blocks are undefined there.
        """
        if out is None:
            out = torch.empty(self.shape((end - first) * self.block_size), dtype=self.dtype, device=self.device)
        self.writer.wait()
        self.pool.read(self.block_table[:, first:end], out)
        return out

    # ------------------------------------------------------------------ changing

    @no_inference_mode
    def crop_to(self, after: Rows) -> None:
        """Hold ``after``, which is what is held without the last tokens of some rows.

        Copies blocks back into the ring if the window would be too short; rows that share them keep them.
        """
        self.writer.wait()
        size, before, back = self.block_size, self.held, []
        for row, (sealed, then, tokens) in enumerate(zip(before.sealed, after.sealed, after.lengths)):
            if then * size < (end := min(sealed * size, tokens)):
                back.append((row, then * size, end))
        if back:  # of all rows the blocks between these: not a whole past because another row is short
            first = min(start for _, start, _ in back) // size
            kv = self.read(first, -(-max(end for *_, end in back) // size)).flatten(2, 3)
            for row, start, end in back:
                held = kv[row, :, start - first * size : end - first * size]
                self.recent_kv[row, :, self.ring.positions(start, end, self.device)] = held
        self._taken, self.held = None, after

    @no_inference_mode
    def map_rows(self, index: Tensor, rows: Rows) -> None:  # type: ignore[override]
        """Row ``i`` becomes what row ``index[i]`` was, which makes ``rows`` of them. Their table has its own turn."""
        self.writer.wait()
        super().map_rows(index)
        self.batch = index.shape[0]
        self._taken, self.held = None, rows
        self.counters.regroup(self.batch)

    def reset(self) -> None:
        """Forget everything but keep the memory. The table of the rows has its own turn."""
        self.writer.wait()
        super().reset()
        self.held = self.table_of_rows.empty
        if self.pages is not None:
            self.pages.clear()

    @no_inference_mode
    def copy(  # type: ignore[override]
        self, table: RowTable, pools: DevicePools | None = None, copy_streams: CopyStreams | None = None
    ) -> Self:
        """An independent store that shares the full blocks."""
        self.writer.wait()
        new = super().copy()
        new.table_of_rows, new.writer = table, self.writer.copy(table, copy_streams)
        new.pages = None if pools is None else LayerPages(pools, new.pool)
        return new

    second_bytes = 0  # allocated on a second device

    def nbytes(self) -> tuple[int, int]:  # type: ignore[override]
        """Bytes allocated on the device and in host memory."""
        own = self.recent_kv.nbytes + (0 if self.pages is None else self.pages.nbytes)
        device, host = self.pool.nbytes()
        return device + own, host
