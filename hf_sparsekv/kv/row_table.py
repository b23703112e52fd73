"""The rows of one cache (:mod:`.rows`), and which blocks they lie in. One table for all layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import mul

import numpy as np
import torch
from torch import Tensor

from ..config import SparseConfig
from ..offload.copy_streams import Pending
from ..ops._layout import whole
from ..tensors import no_inference_mode, sent
from .block_ids import BlockIds, bucket
from .rows import Drafts, Rows, Taken
from .step_rows import StepRows

_NOTHING = (None,) * 4  # asked for: rows, columns, their validity; given


def table_width(blocks: int) -> int:
    """Entries of each row of a table that has room for ``blocks`` blocks: kernels want rows :func:`whole`."""
    return whole(blocks)


class RowTable:
    """The rows of one cache.

    Attributes:
        rows: what all layers hold that say nothing else (:attr:`.store.LayerStore.held`).
        ids: of blocks.
        batch: rows.
        managed: rows come and go (:class:`..RowBatch`): columns mean nothing, and rows without a token are no padding.
    """

    def __init__(self, config: SparseConfig, ids: BlockIds | None = None) -> None:
        self.config, self.block_size = config, config.block_size
        self.recent = config.window + config.max_draft
        self.ids = BlockIds() if ids is None else ids
        self.managed = False
        self.rows: Rows | None = None
        self.batch = 0
        self._held: list[np.ndarray] = [np.zeros((0, 0), dtype=np.int32)]
        self._on: dict[torch.device, Tensor] = {}
        self._steps: dict[torch.device, StepRows] = {}
        self._memo: tuple = _NOTHING
        self._picks: tuple[Tensor | None, list] = (None, [])
        self._asked: tuple[Rows | None, Tensor | None, Rows | None] = (None, None, None)
        self._cropped: tuple[Rows | None, int, Rows | None] = (None, 0, None)
        self._empty: Rows | None = None
        self._moves = 0
        self._old: list[Tensor] = []
        self._orders: dict[torch.device, Callable[[], AbstractContextManager]] = {}
        self._pending: dict[torch.device, Pending] = {}
        self._front: tuple[Tensor | None, bool] = (None, True)
        weakref.finalize(self, self.ids.drop_later, self._held).atexit = False

    def __deepcopy__(self, memo: dict) -> RowTable:
        new = RowTable(self.config, self.ids)
        new.rows, new.batch, new._empty = self.rows, self.batch, self._empty
        memo[id(self)] = new
        host = self.host.copy()
        self.ids.share(host)
        new._held[0], new._orders = host, self._orders
        return new

    # ------------------------------------------------------------------ the table

    @property
    def host(self) -> np.ndarray:
        """int32 ``[batch, capacity]``, id of each block of each row, -1 for none. Not every one is filled yet."""
        return self._held[0]

    @property
    def capacity(self) -> int:
        """Blocks of a row that there is room for."""
        return self.host.shape[1]

    def on(self, device: torch.device) -> Tensor:
        """:attr:`host` on a device."""
        held = self._on.get(device)
        if held is None:
            held = self._on[device] = self._upload(device)
        return held

    @no_inference_mode
    def _upload(self, device: torch.device) -> Tensor:
        with self._orders.get(device, nullcontext)():
            return sent(self.host.copy(), torch.int32, device)

    @property
    def nbytes(self) -> dict[torch.device, int]:
        """Bytes of :attr:`host` on each device that has it. The lengths, a few bytes a row, are not counted."""
        return {device: held.nbytes for device, held in self._on.items()}

    def start(self, batch: int, tokens: int) -> Rows:
        """Rows without tokens; about ``tokens`` are expected in each."""
        expected = self.config.max_length or tokens
        blocks = -(-expected // self.block_size)
        blocks = table_width(blocks if self.config.max_length is not None else bucket(blocks))
        if self.batch != batch or self._empty is None:
            self.clear()
            self.batch = batch
            self._replace(np.full((batch, blocks), -1, dtype=np.int32))
            self.rows = self._empty = self._without_tokens()
        elif self.capacity < blocks:
            self._grow(blocks)
        return self._empty

    def _without_tokens(self, columns: int = 0) -> Rows:
        return Rows(self.block_size, columns, (0,) * self.batch, (0,) * self.batch)

    @property
    def empty(self) -> Rows:
        """Rows without tokens."""
        return self._empty

    def join(self, held: Sequence[Rows]) -> Rows | None:
        """What all layers hold, from here on :attr:`rows`; None if they hold different things."""
        first = held[0]
        if any(rows is not first and not rows.same(first) for rows in held):
            return None
        self.rows = first
        return first

    def clear(self) -> None:
        """No row holds anything. What memory there is is kept."""
        held = self.host.copy()
        self._change(lambda: self.host.fill(-1), lambda on: on.fill_(-1))
        self.ids.drop(held)
        if self.managed:
            self._empty, self.managed = self._without_tokens(), False
        self.rows, self._memo = self._empty, _NOTHING
        self._old.clear()

    @property
    def moves(self) -> int:
        """Grows whenever memory that captured steps use has moved, of this table or of a block pool."""
        return self._moves + self.ids.moves

    def _replace(self, host: np.ndarray) -> None:
        self._moves += 1
        devices = list(self._on)
        self._old += self._on.values()  # copy streams may still read them
        self._on.clear()
        self._held[0] = host
        for device in devices:
            self.on(device)  # in the order of this stream, before others need it
        self._steps = {device: step for device, step in self._steps.items() if len(step.past) == len(host)}

    def _grow(self, capacity: int) -> None:
        capacity = table_width(capacity)
        self._replace(np.pad(self.host, ((0, 0), (0, capacity - self.capacity)), constant_values=-1))

    def reserve(self, rows: Sequence[int], first: Sequence[int], end: Sequence[int]) -> None:
        """Have ids ready for blocks ``first .. end - 1`` of these rows: their own, which nobody shares."""
        if max(end, default=0) > self.capacity:
            self._grow(bucket(max(end)))
        with self.ids.lock:
            wanted = [(row, block) for row, lo, hi in zip(rows, first, end) for block in range(lo, hi)]
            wanted = np.array(wanted, dtype=np.int64).reshape(-1, 2)
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

    def _change(self, here: Callable[[], object], there: Callable[[Tensor], object]) -> None:
        """Change the table on the host and, in place, where it has copies: captured graphs hold their addresses.

        References are counted around it so that an interrupt in between leaves some too many: what is named has one.
        """
        try:
            here()
            for device, held in self._on.items():
                with self._orders.get(device, nullcontext)():
                    if (pending := self._pending.get(device)) is not None:
                        pending.wait(device)
                    there(held)
        except BaseException:  # copies are made anew
            self._moves += 1
            self._old += self._on.values()
            self._on.clear()
            raise

    def in_use_until(self, event: torch.cuda.Event, device: torch.device) -> None:
        """A copy stream of ``device`` reads the table there until ``event``: it changes after that."""
        self._pending.setdefault(device, Pending()).add(event)

    def order(self, device: torch.device, within: Callable[[], AbstractContextManager]) -> None:
        """On this device the table is written in the context ``within()``, in the order of who reads it there."""
        self._orders[device] = within

    # ------------------------------------------------------------------ passes

    def follow(self, rows: Rows, columns: int, valid: Tensor | None) -> Rows:
        """The rows behind ``columns`` more columns, ``valid [batch, columns]`` bool or None, with ids for their blocks.

        The layers of a pass ask one after the other and get the same answer.
        """
        before, asked, given, made = self._memo
        if made is not None and isinstance(made, Rows) and given is valid and asked == columns and before is rows:
            return made
        more = self.tokens_of(columns, valid)
        lengths = tuple(length + n for length, n in zip(rows.lengths, more))
        sealed = tuple(self._sealable(length, blocks) for length, blocks in zip(lengths, rows.sealed))
        self.reserve(range(rows.batch), rows.sealed, sealed)
        known = rows.valid
        if valid is not None and min(more) < columns:
            known = torch.cat((rows.valid_columns(valid.device), valid), dim=1)
        made = Rows(self.block_size, rows.columns + columns, lengths, sealed, known)
        self._memo = rows, columns, valid, made
        return made

    def tokens_of(self, columns: int, valid: Tensor | None) -> list[int]:
        """How many of ``columns`` new columns are tokens, in each row."""
        if valid is None:
            return [columns] * self.batch
        return [at.stop - at.start if isinstance(at, slice) else len(at) for at in self.picks(valid)]

    def tokens_are(self, valid: Tensor, given: Sequence[bool]) -> None:
        """``valid [batch, 1]`` says of one column what the host knows as ``given``, so nobody has to wait for it."""
        self._picks = valid, [slice(0, int(one)) for one in given]

    def picks(self, valid: Tensor) -> list[slice | Tensor]:
        """Where the tokens of each row are among columns ``valid [batch, n]``: a slice, if nothing is between them."""
        if self._picks[0] is not valid:
            found: list[slice | Tensor] = []
            for row in valid.cpu():
                at = row.nonzero().flatten()
                first, end = (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)
                found.append(slice(first, end) if end - first == len(at) else at.to(valid.device))
            self._picks = valid, found
        return self._picks[1]

    def step(self, rows: Rows, valid: Tensor | None, captured: bool = False) -> Taken:
        """A decode step of these rows: one column more, a token for those that are ``valid [batch]`` bool or None.

        ``captured``: nothing is prepared for it, because that was done before.
        """
        before, _, given, made = self._memo
        if isinstance(made, Taken) and given is valid and before is rows:
            return made
        more = self.tokens_of(1, valid)
        lengths = tuple(length + n for length, n in zip(rows.lengths, more))
        known = rows.valid
        if min(more) < 1 and not self.managed:
            known = torch.cat((rows.valid_columns(valid.device), valid.view(-1, 1)), dim=1)
        now = after = Rows(self.block_size, rows.columns + 1, lengths, rows.sealed, known)
        sealed = tuple(self._sealable(length, blocks) for length, blocks in zip(lengths, rows.sealed))
        if sealed != rows.sealed:
            if not captured:
                self.ready(rows)
            after = Rows(self.block_size, now.columns, lengths, sealed, known)
        if min(more) < 1 and self.managed:
            asked = self.asked(rows, valid)
            now = replace(now, lengths=tuple(map(mul, lengths, more)), sealed=asked.sealed, _on={})
        made = Taken(rows, now, after)
        self._memo = rows, None, valid, made
        return made

    def drafts(self, rows: Rows, columns: int, together: bool) -> tuple[Drafts, ...]:
        """``columns`` more tokens of each row, which attend as decode steps, with ids for the blocks that become full.

        ``together``: in one go, of a table of one row; else one after the other. The layers of a pass get the same
        answer.
        """
        before, asked, given, made = self._memo
        if given is together and asked == columns and before is rows:
            return made
        parts, held, left = [], rows, columns
        while left:
            n = left if together else 1
            lengths = tuple(length + n for length in held.lengths)
            now = after = Rows(self.block_size, held.columns + n, lengths, held.sealed, rows.valid)
            sealed = tuple(self._sealable(length, blocks) for length, blocks in zip(lengths, held.sealed))
            if sealed != held.sealed:
                self.reserve(range(rows.batch), held.sealed, sealed)
                after = Rows(self.block_size, now.columns, lengths, sealed, rows.valid)
            queries = now
            if together:
                first = held.lengths[0]
                blocks = tuple(self._sealable(first + i, held.sealed[0]) for i in range(n))
                queries = Rows(self.block_size, now.columns, tuple(range(first + 1, first + n + 1)), blocks)
                now = after if blocks[-1:] == sealed else replace(now, sealed=blocks[-1:], _on={})
            parts.append(Drafts(n, Taken(held, now, after), queries))
            held, left = after, left - n
        made = tuple(parts)
        self._memo = rows, columns, together, made
        return made

    def asked(self, rows: Rows, valid: Tensor | None) -> Rows:
        """Rows as a step finds them that gives a token to those that are ``valid [batch]``, bool or None.

        Of rows that come and go the others hold nothing in it: nothing is chosen, read or brought for them. (A row of
        another batch without a token attends like the rest: what the step is must not depend on it.)
        """
        if valid is None or not self.managed:
            return rows
        if self._asked[0] is not rows or self._asked[1] is not valid:
            given = self.tokens_of(1, valid)
            lengths, sealed = (tuple(map(mul, of, given)) for of in (rows.lengths, rows.sealed))
            self._asked = rows, valid, Rows(self.block_size, rows.columns, lengths, sealed)
        return self._asked[2]

    def ready(self, rows: Rows) -> None:
        """Have an id ready for each block that a decode step of these rows may seal."""
        due = [r for r, (n, b) in enumerate(zip(rows.lengths, rows.sealed)) if self._sealable(n + 1, b) > b]
        if due:
            self.reserve(due, [rows.sealed[row] for row in due], [rows.sealed[row] + 1 for row in due])

    def _sealable(self, length: int, sealed: int) -> int:
        """Blocks that are older than window and drafts once a row holds ``length`` tokens."""
        return max(sealed, (length - self.recent) // self.block_size, 0)

    @no_inference_mode
    def steps(self, device: torch.device) -> StepRows:
        """The rows of captured steps on a device."""
        held = self._steps.get(device)
        if held is None:
            held = self._steps[device] = StepRows(self.batch, device)
        return held

    # ------------------------------------------------------------------ rows that come and go

    def open(self, batch: int, tokens: int) -> None:
        """Room for ``batch`` rows of ``tokens`` tokens, none of which is there."""
        self.start(batch, tokens)
        if (blocks := -(-tokens // self.block_size)) > self.capacity:  # the configuration expects shorter ones
            self._grow(blocks)
        self.rows = self._empty = self._without_tokens(1)  # not 0, for what comes are steps
        self.managed = True

    def take(self, row: int, other: RowTable) -> None:
        """Row ``row`` becomes the only one of ``other``, a table of the same ids, which keeps it as well."""
        theirs = other.rows
        n = theirs.sealed[0]
        ids = other.host[0, :n].copy()
        self.ids.share(ids)
        self._write_row(row, ids, lambda held: other.on(held.device)[0])
        self._set(row, theirs.lengths[0], n)

    def begin(self, ids: np.ndarray) -> None:
        """The only row, which holds nothing, begins with full blocks ``ids``, which it shares."""
        n = len(ids)
        if n > self.capacity:
            self._grow(bucket(n))
        self.ids.share(ids)
        self._write_row(0, ids, lambda held: sent(ids, torch.int32, held.device))
        self.rows = Rows(self.block_size, n * self.block_size, (n * self.block_size,), (n,))
        self._memo = _NOTHING

    def _write_row(self, row: int, ids: np.ndarray, on: Callable[[Tensor], Tensor]) -> None:
        """The first blocks of row ``row`` are these; ``on(held)``: the same ids, for a copy of the table.

        What comes from the copy's own device does not make the host wait for it.
        """
        n = len(ids)

        def here() -> None:
            self.host[row, :n] = ids

        self._change(here, lambda held: held[row, :n].copy_(on(held)[:n]))

    def leave(self, row: int) -> None:
        """Row ``row`` holds nothing from here on."""
        if (self.host[row] >= 0).any():
            named = self.host[row].copy()
            self._change(lambda: self.host[row].fill(-1), lambda held: held[row].fill_(-1))
            self.ids.drop(named)
        self._set(row, 0, 0)

    def copy_row(self, row: int, source: int) -> None:
        """Row ``row``, which holds nothing, becomes what row ``source`` is: full blocks are shared."""
        n = self.rows.sealed[source]
        ids = self.host[source, :n].copy()
        self.ids.share(ids)
        self._write_row(row, ids, lambda held: held[source])
        self._set(row, self.rows.lengths[source], n)

    def move_row(self, row: int, source: int) -> None:
        """Row ``row``, which holds nothing, becomes what row ``source`` is, which holds nothing from here on."""
        ids, length, sealed = self.host[source].copy(), self.rows.lengths[source], self.rows.sealed[source]
        self.ids.share(ids)
        self._write_row(row, ids, lambda held: held[source])
        self._set(row, length, sealed)
        self.leave(source)

    def cropped_row(self, row: int, length: int) -> Rows:
        """The rows if row ``row`` keeps its first ``length`` tokens."""
        rows, most = self.rows, max(0, (length - self.config.window) // self.block_size)
        lengths, sealed = list(rows.lengths), list(rows.sealed)
        lengths[row], sealed[row] = length, min(sealed[row], most)
        return Rows(self.block_size, rows.columns, tuple(lengths), tuple(sealed))

    def _set(self, row: int, length: int, sealed: int) -> None:
        lengths, blocks = list(self.rows.lengths), list(self.rows.sealed)
        lengths[row], blocks[row] = length, sealed
        self.rows = Rows(self.block_size, self.rows.columns, tuple(lengths), tuple(blocks))
        self._memo = _NOTHING

    # ------------------------------------------------------------------ changes

    def cropped(self, rows: Rows, columns: int) -> Rows:
        """The rows of the first ``columns`` columns. Blocks that would leave the window short are taken back.

        The layers of a cache ask one after the other and get the same answer.
        """
        if self._cropped[:2] != (rows, columns):  # rows are equal if they are the same
            self._cropped = rows, columns, self._crop(rows, columns)
        return self._cropped[2]

    def _crop(self, rows: Rows, columns: int) -> Rows:
        known = rows.valid
        lengths = [length - (rows.columns - columns) for length in rows.lengths]
        if known is not None and columns < known.shape[1]:
            known = known[:, :columns]
            lengths = known.sum(1).tolist()
        return self._shortened(rows, columns, lengths, known)

    def masked(self, rows: Rows, valid: Tensor) -> Rows | None:
        """The rows if of their columns those are tokens that are ``valid``, bool ``[batch, columns]``.

        None, unless that takes nothing but last tokens from rows: then the rest stays where it is.
        """
        held = rows.valid_columns(valid.device)
        lengths = valid.sum(1)
        if not torch.equal(held & (held.cumsum(1) <= lengths[:, None]), valid):
            return None
        return self._shortened(rows, rows.columns, lengths.tolist(), valid.clone())

    def _shortened(self, rows: Rows, columns: int, lengths: Sequence[int], valid: Tensor | None) -> Rows:
        """The rows with their first ``lengths`` tokens."""
        size, window = self.block_size, self.config.window
        sealed = [min(b, max(0, (length - window) // size)) for length, b in zip(lengths, rows.sealed)]
        return Rows(size, columns, tuple(lengths), tuple(sealed), valid)

    def trim(self, held: Iterable[Rows]) -> None:
        """Let go the blocks that no layer needs; ``held``: what each layer holds."""
        keep = np.zeros(self.batch, dtype=np.int64)
        for rows in {id(one): one for one in held}.values():
            keep = np.maximum(keep, rows.sealed)
        behind = (np.arange(self.capacity) >= keep[:, None]) & (self.host >= 0)
        at = np.argwhere(behind)
        if len(at):
            named = self.host[behind]
            self._write(at, np.full(len(at), -1, dtype=np.int32))
            self.ids.drop(named)
        self._memo = _NOTHING

    def mapped(self, rows: Rows, index: Sequence[int]) -> Rows:
        """The rows if row ``i`` becomes what row ``index[i]`` was."""
        valid = None if rows.valid is None else rows.valid[torch.tensor(index, device=rows.valid.device)]
        lengths, sealed = (tuple(of[i] for i in index) for of in (rows.lengths, rows.sealed))
        return Rows(rows.block_size, rows.columns, lengths, sealed, valid)

    def load(self, rows: Rows, table: np.ndarray) -> np.ndarray:
        """Take over rows from a file; ``table [batch, blocks]`` counts their blocks from 0, -1 for none.

        Returns:
            The ids that these have here, int32.
        """
        if table.shape[1] > self.capacity:
            self._grow(bucket(table.shape[1]))
        with self.ids.lock:
            ids = self.ids.take(int(table.max(initial=-1)) + 1)
            at = np.argwhere(table >= 0)
            named = ids[table[table >= 0]]
            self.ids.share(named)
            self.ids.drop(ids)
            if len(at):
                self._write(at, named)
        self.rows = rows
        return ids

    def map_rows(self, index: Sequence[int], rows: Rows) -> None:
        """Row ``i`` becomes what row ``index[i]`` was; all hold ``rows``, as :meth:`mapped` gave them.

        Full blocks are shared, not copied.
        """
        with self.ids.lock:
            before = self.host.copy()
            host = before[np.asarray(index, dtype=np.int64)].copy()
            host[np.arange(self.capacity) >= np.array(rows.sealed)[:, None]] = -1
            self.ids.share(host)
            self.batch = len(index)
            if host.shape == before.shape:
                self._change(
                    lambda: np.copyto(self.host, host), lambda held: held.copy_(sent(host, torch.int32, held.device))
                )
            else:
                self._replace(host)
                self._empty = self._without_tokens()
            self.ids.drop(before)
        self._memo = _NOTHING

    def padded_in_front(self, rows: Rows) -> bool:
        """No row has padding behind a token."""
        if rows.valid is None:
            return True
        if self._front[0] is not rows.valid:
            valid = rows.valid.int()
            self._front = rows.valid, bool((valid[:, 1:] >= valid[:, :-1]).all()) and bool(valid[:, -1:].all())
        return self._front[1]

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
