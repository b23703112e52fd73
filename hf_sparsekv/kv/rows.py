"""The rows of a cache: how many tokens each holds, and which blocks they lie in. One table for all layers.

A row is the sequence of its own valid tokens: token ``i`` is in block ``i // block_size``, at ``i % block_size``.
Padding is not stored. Which columns of the attention mask a row's tokens were is a map that only prompts and ``crop()``
ask for.

A block has the same id in every layer. Ids are counted: a block belongs to all rows whose table names it, those of
copies of the cache among them, and is free when none does.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import mul
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..config import SparseConfig
from ..ops._layout import whole
from ..ops.begin_step import begin_step
from ..tensors import no_inference_mode, sent

_MIN_BLOCKS = 16


def bucket(n: int, least: int = _MIN_BLOCKS) -> int:
    """Smallest capacity of the form {4, 5, 6, 7} x 2^k (at least ``least``) that holds ``n`` items.

    Four sizes an octave: at most a quarter is unused, and growing item by item copies each item about four times
    in all.
    """
    n = max(n, least)
    step = 1 << max((n - 1).bit_length() - 3, 0)
    return -(-n // step) * step


def table_width(blocks: int) -> int:
    """Entries of each row of a table that has room for ``blocks`` blocks: kernels want rows :func:`whole`."""
    return whole(blocks)


class Pool(Protocol):
    """What ids need of a layer's block pool."""

    def forget(self, ids: Tensor) -> None:
        """These blocks mean nothing any more: drop what is kept about them."""
        ...

    def copy_blocks(self, old: Tensor, new: Tensor) -> None:
        """Copy blocks ``old`` to ``new``, int64 ``[n]`` each, in the CPU's memory."""
        ...


@dataclass(frozen=True, eq=False)
class Rows:
    """What the rows hold at one time. Never changed: a pass makes the next one.

    Attributes:
        block_size: tokens of a block.
        columns: of the attention mask, padding included: the same for all rows.
        lengths: tokens of each row.
        sealed: full blocks of each row that are in the block pool.
        valid: which columns are tokens, bool ``[batch, n]``, n <= columns: behind them all are. None: all are.
    """

    block_size: int
    columns: int
    lengths: tuple[int, ...]
    sealed: tuple[int, ...]
    valid: Tensor | None = None
    _on: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.lengths)

    @property
    def uniform(self) -> bool:
        """All rows hold the same number of tokens."""
        return min(self.lengths) == max(self.lengths) and min(self.sealed) == max(self.sealed)

    def filled(self, blocks: int) -> Rows:
        """Each row that is there with ``blocks`` full blocks."""
        full = tuple(blocks * (n > 0) for n in self.lengths)
        return Rows(self.block_size, self.columns, self.lengths, full, self.valid)

    def padded(self, rows: int) -> Rows:
        """So many rows, of which the last ones hold nothing."""
        more = (0,) * (rows - self.batch)
        return Rows(self.block_size, self.columns, self.lengths + more, self.sealed + more)

    def same(self, other: Rows) -> bool:
        """The rows hold as much as those of ``other``."""
        return (self.columns, self.lengths, self.sealed) == (other.columns, other.lengths, other.sealed)

    def on(self, device: torch.device) -> Tensor:
        """int32 ``[batch, 2]`` on a device: tokens, and tokens in full blocks."""
        held = self._on.get(device)
        if held is None:
            held = self._on[device] = self._upload(device)
        return held

    @no_inference_mode
    def _upload(self, device: torch.device) -> Tensor:
        both = [(length, sealed * self.block_size) for length, sealed in zip(self.lengths, self.sealed)]
        return sent(both, torch.int32, device)

    def valid_columns(self, device: torch.device) -> Tensor:
        """Which columns are tokens, bool ``[batch, columns]``."""
        if self.valid is None:
            return torch.ones(self.batch, self.columns, dtype=torch.bool, device=device)
        return torch.nn.functional.pad(self.valid.to(device), (0, self.columns - self.valid.shape[1]), value=True)


class BlockIds:
    """Ids of blocks, counted. Copies of a cache share them, as they share the block pools.

    Attributes:
        used: ids below it have been given out.
        lock: held from taking ids until they are in a table.
        moves: counts pools that have grown.
    """

    def __init__(self) -> None:
        self.used = self.moves = 0
        self.lock = threading.RLock()
        self._references = np.zeros(_MIN_BLOCKS, dtype=np.int32)
        self._free: list[int] = []
        self._dropped: deque[np.ndarray] = deque()  # of tables that were deleted, by whatever thread
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict) -> BlockIds:
        return self

    def register(self, pool: Pool) -> None:
        """``pool`` is where a layer's blocks of these ids are."""
        self._pools.add(pool)

    @property
    def pools(self) -> list[Pool]:
        """The layers' pools."""
        return list(self._pools)

    def take(self, n: int) -> np.ndarray:
        """``n`` ids, int32, each of which has one reference: such as were free, then new ones, one after the other."""
        with self.lock:
            self._drain()
            again, self._free = self._free[:n], self._free[n:]
            new = np.arange(self.used, self.used + n - len(again), dtype=np.int32)
            self.used += len(new)
            if self.used > len(self._references):
                self._references = np.pad(self._references, (0, bucket(self.used) - len(self._references)))
            ids = np.concatenate((np.array(again, dtype=np.int32), new))
            self._references[ids] = 1
            return ids

    def share(self, ids: np.ndarray) -> None:
        """One more reference to each; -1 is none."""
        with self.lock:
            self._references += self._counted(ids)

    def drop(self, ids: np.ndarray) -> None:
        """One reference less to each; -1 is none."""
        with self.lock:
            counted = self._counted(ids)
            self._references -= counted
            gone = np.flatnonzero((counted > 0) & (self._references == 0))
            if not len(gone):
                return
            these = torch.from_numpy(gone)
            for pool in self.pools:
                pool.forget(these)
            self._free += gone.tolist()
            live = self._references[: self.used].nonzero()[0]
            used = int(live[-1]) + 1 if len(live) else 0
            if used < self.used:  # pools need no room for what nobody has
                self.used, self._free = used, [i for i in self._free if i < used]

    def _counted(self, ids: np.ndarray) -> np.ndarray:
        """How often each id is named; ``ufunc.at`` takes three times as long for a row of 600 blocks."""
        return np.bincount(ids[ids >= 0], minlength=len(self._references)).astype(np.int32)

    def drop_later(self, held: list[np.ndarray]) -> None:
        """:meth:`drop` of a table that is being deleted, in the middle of anything."""
        self._dropped.append(held[0])

    def shared(self, ids: np.ndarray) -> np.ndarray:
        """Which of them have more than one reference, bool."""
        with self.lock:
            self._drain()
            return (ids >= 0) & (self._references[np.maximum(ids, 0)] > 1)

    def _drain(self) -> None:
        while self._dropped:
            self.drop(self._dropped.popleft())


class StepRows:
    """The rows of captured steps, at fixed addresses; each step takes them further by itself (:mod:`..ops.begin_step`).

    Attributes:
        past: int32 ``[batch]``, tokens before the step.
        now: int32 ``[batch, 2]``, tokens with the step's own, and tokens in full blocks. Of rows that come and go those
            that get no token have none here: they attend to nothing.
        after: int32 ``[batch, 2]``, the same when the block that became old is sealed: where the next step begins.
        columns: int32 ``[batch]``, columns of sliding layers before the step, whose rings count padding at the front.
        pads: int32 ``[batch]``, that padding.
        windows: by size of a sliding window: int32 ``[batch, 2]``, columns with the step's own, and those before the
            first one that is seen.
        held: what ``after`` says; None: somebody has changed it.
    """

    @no_inference_mode
    def __init__(self, batch: int, device: torch.device) -> None:
        self.past, self.columns, self.pads = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(3))
        self.now, self.after = (torch.zeros(batch, 2, dtype=torch.int32, device=device) for _ in range(2))
        self.windows: dict[int, Tensor] = {}
        self.held: Rows | None = None

    def first(self, n: int) -> StepRows:
        """The first ``n`` rows, in the same memory: a step of these leaves the others as they are."""
        new = object.__new__(StepRows)
        for name in ("past", "columns", "pads", "now", "after"):
            setattr(new, name, getattr(self, name)[:n])
        new.windows, new.held = {size: held[:n] for size, held in self.windows.items()}, None
        return new

    def load(self, rows: Rows) -> None:
        """The next step begins with these."""
        if self.held is not rows:
            self.held = None  # unknown, if an interrupt stops the copy
            self.after.copy_(rows.on(self.after.device))
            if self.windows:
                pads = [rows.columns - length for length in rows.lengths]
                self.pads.copy_(sent(pads, torch.int32, self.pads.device))
            self.held = rows

    def begin(self, valid: Tensor | None, block_size: int, recent: int, skip: bool = False) -> None:
        """A step begins. ``valid``: bool ``[batch]``, rows that get a token; None: all. ``skip``: the others rest."""
        begin_step(self.after, self.past, self.now, valid, block_size=block_size, recent=recent, skip=skip)
        if self.windows:
            torch.add(self.past, self.pads, out=self.columns)
        for size, held in self.windows.items():
            held[:, 0] = self.columns + 1
            held[:, 1] = torch.maximum(self.columns + 1 - size, self.pads)

    def begin_drafts(self, count: Tensor, width: int, block_size: int, recent: int) -> tuple[Tensor, list[Tensor]]:
        """A pass over ``count`` of at most ``width`` drafts of the only row begins; ``count``: int32 ``[1]``.

        Returns:
            Each of the tokens as a row, int32 ``[width, 2]``: what a step of it would find; those behind the last one
            hold nothing. And the row before each block that may have to be sealed, and behind the last, int32
            ``[1, 2]`` each.
        """
        at = torch.arange(width + 1, dtype=torch.int32, device=count.device)
        length, sealed = self.after.unbind(1)  # [1] each
        self.past.copy_(length)
        before = length + at  # tokens before each of the new ones, and behind them
        old = torch.div(before - recent, block_size, rounding_mode="floor") * block_size
        full = torch.maximum(old, sealed)
        queries = torch.stack((before[1:], full[:-1]), dim=1) * (at[:width, None] < count)
        most = -(-width // block_size)
        ends = torch.minimum(sealed + block_size * at[: most + 1], full.gather(0, count.long()))
        due = torch.stack(((length + count).expand(most + 1), ends), dim=1)
        self.after.copy_(due[-1:])
        return queries, list(due.split(1))

    @no_inference_mode
    def window(self, size: int) -> Tensor:
        """The entry of :attr:`windows`, made if it is not there."""
        if size not in self.windows:
            self.windows[size], self.held = torch.zeros_like(self.now), None
        return self.windows[size]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of all that a captured step reads and writes here."""
        return self.past.data_ptr(), self.now.data_ptr(), *(held.data_ptr() for held in self.windows.values())


_NOTHING = (None,) * 4  # asked for: rows, columns, their validity; given


class Taken(NamedTuple):
    """A decode step: its rows before it, while it attends, and when what became old is sealed.

    Of rows that come and go those that get no token hold nothing in ``now``: see :meth:`RowTable.asked`.
    """

    before: Rows
    now: Rows
    after: Rows


class Drafts(NamedTuple):
    """New tokens of each row that are decoded in one go.

    Attributes:
        tokens: how many.
        taken: the rows before, as the last of them attends, and when what became old is sealed.
        queries: of a table of one row: each of the tokens as a row that ends with it, with the full blocks that a step
            of that token would find.
    """

    tokens: int
    taken: Taken
    queries: Rows


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
                for (row, block), one in zip(at.tolist(), ids.tolist()):
                    held[row, block] = one
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
                    there(held)
        except BaseException:  # copies are made anew
            self._moves += 1
            self._old += self._on.values()
            self._on.clear()
            raise

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
        size, window = self.block_size, self.config.window
        known = rows.valid
        lengths = [length - (rows.columns - columns) for length in rows.lengths]
        if known is not None and columns < known.shape[1]:
            known = known[:, :columns]
            lengths = known.sum(1).tolist()
        sealed = [min(b, max(0, (length - window) // size)) for length, b in zip(lengths, rows.sealed)]
        return Rows(size, columns, tuple(lengths), tuple(sealed), known)

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

    def unshare(self) -> None:
        """Give every row blocks of its own, with the same contents in all layers."""
        with self.ids.lock:
            at = np.argwhere(self.ids.shared(self.host))
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
