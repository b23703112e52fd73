"""The rows of one cache (:mod:`.rows`): what they hold, and what they hold after a pass. One table for all layers.

It decides, and the block table stores: layers ask in turn, and must get the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_sparsekv_config.sparse import SparseConfig

from ..tensors import no_inference_mode, sent
from .block_ids import BlockIds, bucket
from .block_table import BlockTable, table_width
from .exactness import Exactness
from .rows import Rows, Taken
from .step_rows import StepRows

_NOTHING = (None,) * 4  # asked for: rows, columns, their validity; given


class RowTable:
    """The rows of one cache.

    Attributes:
        rows: what all layers hold that say nothing else (:attr:`.store.LayerStore.held`).
        ids: of blocks.
        batch: rows.
        managed: rows come and go (:class:`..RowBatch`): columns mean nothing, and rows without a token are no padding.
        exactness: exact mode of the cache, and how much of what it holds is exact.
    """

    def __init__(self, config: SparseConfig, ids: BlockIds | None = None) -> None:
        self.config, self.block_size = config, config.block_size
        self.recent = config.window + config.max_draft
        self.ids = BlockIds() if ids is None else ids
        self.blocks = BlockTable(self.ids)
        self.managed, self.exactness = False, Exactness()
        self.rows: Rows = None  # type: ignore[assignment]  # start() makes them
        self.batch = 0
        self._steps: dict[torch.device, StepRows] = {}
        self._empty: Rows = None  # type: ignore[assignment]  # start() makes them
        # The last questions and answers, because layers ask the same in turn. Each saves a GPU, in every layer:
        self._followed: tuple = _NOTHING  # an upload of the rows
        self._picks: tuple[Tensor | None, list] = (None, [])  # a wait for the columns
        self._asked: tuple[Rows | None, Tensor | None, Any] = (None, None, None)  # an upload, if it looks ahead
        self._cropped: tuple[Rows | None, int, Any] = (None, 0, None)  # an upload
        self._front: tuple[Tensor | None, bool] = (None, True)  # two waits, where layers slide

    def __deepcopy__(self, memo: dict) -> RowTable:
        new = RowTable(self.config, self.ids)
        new.rows, new.batch, new._empty = self.rows, self.batch, self._empty
        memo[id(self)] = new
        new.blocks, new.exactness = self.blocks.copy(), self.exactness.copy()
        return new

    def start(self, batch: int, tokens: int) -> Rows:
        """Rows without tokens; about ``tokens`` are expected in each."""
        expected = self.config.max_length or tokens
        blocks = -(-expected // self.block_size)
        blocks = table_width(blocks if self.config.max_length is not None else bucket(blocks))
        if self.batch != batch or self._empty is None:
            self.clear()
            self.batch = batch
            self._steps.clear()
            self.blocks.replace(np.full((batch, blocks), -1, dtype=np.int32))
            self.rows = self._empty = Rows.none(self.block_size, self.batch)
        elif self.blocks.capacity < blocks:
            self.blocks.grow(blocks)
        return self._empty

    @property
    def empty(self) -> Rows:
        """Rows without tokens."""
        return self._empty

    def join(self, held: Sequence[Rows]) -> Rows | None:
        """The rows that all layers hold, from here on :attr:`rows`; None if they hold different things."""
        first = held[0]
        if any(rows is not first and not rows.same(first) for rows in held):
            return None
        self.rows = first
        return first

    def clear(self) -> None:
        """No row holds anything. The memory is kept."""
        self.blocks.clear()
        self.exactness.clear()
        if self.managed:
            self._empty, self.managed = Rows.none(self.block_size, self.batch), False
            self._steps.clear()
        self.rows, self._followed = self._empty, _NOTHING

    @property
    def moves(self) -> int:
        """Grows whenever memory that captured steps use has moved, of this table or of a block pool."""
        return self.blocks.moved + self.ids.moves

    # ------------------------------------------------------------------ passes

    def follow(self, rows: Rows, columns: int, valid: Tensor | None) -> Rows:
        """The rows after ``columns`` more columns, ``valid [batch, columns]`` bool or None, with ids for their blocks.

        The layers of a pass ask one after the other and get the same answer.
        """
        before, asked, given, made = self._followed
        if made is not None and given is valid and asked == columns and before is rows:
            return made
        more = self.tokens_of(columns, valid)
        lengths = tuple(length + n for length, n in zip(rows.lengths, more))
        sealed = rows.full(lengths, self.recent)
        self.blocks.reserve(range(rows.batch), rows.sealed, sealed)
        known = rows.valid
        if valid is not None and min(more) < columns:
            known = torch.cat((rows.valid_columns(valid.device), valid), dim=1)
        made = Rows(self.block_size, rows.columns + columns, lengths, sealed, known)
        self._followed = rows, columns, valid, made
        return made

    def tokens_of(self, columns: int, valid: Tensor | None) -> list[int]:
        """How many of ``columns`` new columns are tokens, in each row."""
        if valid is None:
            return [columns] * self.batch
        return [at.stop - at.start if isinstance(at, slice) else len(at) for at in self.picks(valid)]

    def tokens_are(self, valid: Tensor, given: Sequence[bool]) -> None:
        """``valid [batch, 1]`` says of one column what the host knows as ``given``, without a wait."""
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
        more = self.tokens_of(1, valid)
        lengths = tuple([length + n for length, n in zip(rows.lengths, more)])
        known = rows.valid
        if valid is not None and not self.managed and min(more) < 1:
            known = torch.cat((rows.valid_columns(valid.device), valid.view(-1, 1)), dim=1)
        now = after = Rows(self.block_size, rows.columns + 1, lengths, rows.sealed, known)
        sealed = rows.full(lengths, self.recent)
        if sealed != rows.sealed:
            if not captured:
                self.ready(rows)
            after = Rows(self.block_size, now.columns, lengths, sealed, known)
        if min(more) < 1 and self.managed:
            asked = self.asked(rows, valid)
            now = replace(now, lengths=tuple(map(mul, lengths, more)), sealed=asked.sealed)
        return Taken(rows, now, after)

    def asked(self, rows: Rows, valid: Tensor | None) -> Rows:
        """Rows as a step finds them that gives a token to those that are ``valid [batch]``, bool or None.

        With continuous batching, other rows hold nothing in it: nothing is chosen, read or copied for them. (A row of
        another batch without a token attends like the rest, so that the step does not depend on it.)
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
        sealed = rows.full([length + 1 for length in rows.lengths], self.recent)
        due = [row for row, (now, then) in enumerate(zip(rows.sealed, sealed)) if now < then]
        if due:
            self.blocks.reserve(due, [rows.sealed[row] for row in due], [rows.sealed[row] + 1 for row in due])

    @no_inference_mode
    def steps(self, device: torch.device) -> StepRows:
        """The rows of captured steps on a device."""
        held = self._steps.get(device)
        if held is None:
            held = self._steps[device] = StepRows(self.batch, device, self.managed)
        return held

    # ------------------------------------------------------------------ rows that come and go

    def open(self, batch: int, tokens: int) -> None:
        """Room for ``batch`` rows of ``tokens`` tokens, still empty."""
        self.start(batch, tokens)
        if (blocks := -(-tokens // self.block_size)) > self.blocks.capacity:  # the configuration expects shorter ones
            self.blocks.grow(blocks)
        self.rows = self._empty = Rows.none(self.block_size, self.batch, 1)  # not 0, for what comes are steps
        self.managed = True
        self._steps.clear()

    def take(self, row: int, other: RowTable) -> None:
        """Row ``row`` becomes the only one of ``other``, a table of the same ids, which keeps it as well."""
        theirs = other.rows
        n = theirs.sealed[0]
        if other.exactness.inexact_from is not None:
            self.exactness.selected(0)
        ids = other.blocks.host[0, :n].copy()
        self.ids.share(ids)
        self.blocks.write_row(row, ids, lambda held: other.blocks.on[held.device][0])
        self._set(row, theirs.lengths[0], n)

    def begin(self, ids: np.ndarray, exact: bool) -> None:
        """The only row, which holds nothing, begins with full blocks ``ids``, which it shares.

        ``exact``: full attention is known to have computed them.
        """
        n = len(ids)
        if n and not exact:
            self.exactness.selected(0)
        if n > self.blocks.capacity:
            self.blocks.grow(bucket(n))
        self.ids.share(ids)
        self.blocks.write_row(0, ids, lambda held: sent(ids, torch.int32, held.device))
        self.rows = Rows(self.block_size, n * self.block_size, (n * self.block_size,), (n,))
        self._followed = _NOTHING

    def leave(self, row: int) -> None:
        """Row ``row`` holds nothing from here on."""
        self.blocks.empty_row(row)
        self._set(row, 0, 0)

    def copy_row(self, row: int, source: int) -> None:
        """Row ``row``, which holds nothing, becomes what row ``source`` is: full blocks are shared."""
        n = self.rows.sealed[source]
        ids = self.blocks.host[source, :n].copy()
        self.ids.share(ids)
        self.blocks.write_row(row, ids, lambda held: held[source])
        self._set(row, self.rows.lengths[source], n)

    def move_row(self, row: int, source: int) -> None:
        """Row ``row``, which holds nothing, becomes what row ``source`` is, which holds nothing from here on."""
        ids, length, sealed = self.blocks.host[source].copy(), self.rows.lengths[source], self.rows.sealed[source]
        self.ids.share(ids)
        self.blocks.write_row(row, ids, lambda held: held[source])
        self._set(row, length, sealed)
        self.leave(source)

    def cropped_row(self, row: int, length: int) -> Rows:
        """The rows if row ``row`` keeps its first ``length`` tokens."""
        rows, most = self.rows, max(0, (length - self.config.window) // self.block_size)
        return rows.with_row(row, length, min(rows.sealed[row], most))

    def _set(self, row: int, length: int, sealed: int) -> None:
        self.rows = self.rows.with_row(row, length, sealed)
        self._followed = _NOTHING

    # ------------------------------------------------------------------ changes

    def cropped(self, rows: Rows, columns: int) -> Rows:
        """The rows of the first ``columns`` columns. Blocks that would leave the window short are taken back.

        The layers of a cache ask one after the other and get the same answer.
        """
        if self._cropped[:2] != (rows, columns):  # rows are equal if they are the same
            self._cropped = rows, columns, rows.cropped(columns, self.config.window)
        return self._cropped[2]

    def masked(self, rows: Rows, valid: Tensor) -> Rows | None:
        """The rows if of their columns those are tokens that are ``valid``, bool ``[batch, columns]``.

        None, unless that takes nothing but last tokens from rows: then the rest stays where it is.
        """
        return rows.masked(valid, self.config.window)

    def trim(self, held: Iterable[Rows]) -> None:
        """Let go the blocks that no layer needs; ``held``: what each layer holds."""
        keep = np.zeros(self.batch, dtype=np.int64)
        for rows in {id(one): one for one in held}.values():
            keep = np.maximum(keep, rows.sealed)
        self.blocks.trim(keep)
        self._followed = _NOTHING

    def load(self, rows: Rows, table: np.ndarray) -> np.ndarray:
        """Take over rows from a file; ``table [batch, blocks]`` counts their blocks from 0, -1 for none.

        Returns:
            The ids that these have here, int32.
        """
        ids = self.blocks.load(table)
        self.rows = rows
        return ids

    def map_rows(self, index: Sequence[int], rows: Rows) -> None:
        """Row ``i`` becomes what row ``index[i]`` was; all hold ``rows``, as :meth:`.rows.Rows.mapped` gave them.

        Full blocks are shared, not copied.
        """
        with self.ids.lock:
            if len(index) != self.batch:
                self.batch = len(index)
                self._empty = Rows.none(self.block_size, self.batch)
                self._steps.clear()
            self.blocks.map_rows(index, rows.sealed)
        self._followed = _NOTHING

    def padded_in_front(self, rows: Rows) -> bool:
        """No row has padding after a token."""
        if rows.valid is None:
            return True
        if self._front[0] is not rows.valid:
            valid = rows.valid.int()
            self._front = rows.valid, bool((valid[:, 1:] >= valid[:, :-1]).all()) and bool(valid[:, -1:].all())
        return self._front[1]
