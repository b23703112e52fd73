"""One forward pass of a cache: what is the same in all of its layers.

Layers of one pass ask for it once only. :mod:`.row_table` has the rows after the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .counters import Tally, tally_of
from .row_table import RowTable
from .rows import Drafts, Rows, Taken


class Pass:
    """New tokens of all rows, for one pass through the layers.

    The cache makes it when the first layer attends, and hands it down with each layer's tokens. It ends when the last
    layer has stored them; and with an error, and with every change of the rows that is no forward pass.

    It depends only on the mask and on the rows before, which are never changed. Layers that hold these rows share it.

    Attributes:
        before: the rows; None: nothing was ever cached.
        columns: new ones.
        mask: of the attention; where layers are on several devices, as the last one has it.
        valid: which new columns are tokens, bool ``[batch, columns]``; None: all are. With
            continuous batching: the rows that get one.
        device: of :attr:`valid`; None: layers on any device may share the pass.
        drafts: they are drafts, none of them padding, and few enough to attend as decode steps do.
    """

    def __init__(
        self,
        table: RowTable,
        before: Rows | None,
        columns: int,
        mask: Tensor | None,
        valid: Tensor | None,
        drafts: bool,
    ) -> None:
        self._table, self.columns = table, columns
        self.before: Any = before  # never None where a step or drafts are asked for
        self.mask, self.valid, self.drafts = mask, valid, drafts
        self.device: torch.device | None = None if valid is None else valid.device
        self._starts: tuple[Tensor | None] | None = None

    def begins_with(self, rows: Rows | None, columns: int) -> bool:
        """It is a pass of so many columns over ``rows``."""
        before = self.before
        if before is None or rows is None:
            return before is rows and self.columns == columns
        same = before is rows or (before.same(rows) and before.valid is rows.valid)
        return same and self.columns == columns

    def starts(self, columns: Tensor) -> Tensor | None:
        """Where each row's tokens begin, int32 ``[batch]``; None if padding is elsewhere, too. Waits once for the mask.

        Args:
            columns: which columns are tokens, bool ``[batch, n]``: the same in all layers.
        """
        if self._starts is None:
            in_front = bool((columns[:, 1:] >= columns[:, :-1]).all())
            self._starts = ((~columns).sum(1, dtype=torch.int32) if in_front else None,)
        (starts,) = self._starts
        return starts if starts is None else starts.to(columns.device)

    @cached_property
    def taken(self) -> Taken:
        """The decode step that it is, with ids for the blocks that become full."""
        return self._table.step(self.before, self.valid)

    @cached_property
    def tally(self) -> Tally:
        """The tally of this decode step."""
        return tally_of(self.taken, self._table.config.sinks)

    @cached_property
    def together(self) -> Drafts:
        """Drafts of the only row, decoded in one go, with ids for the blocks that become full."""
        return drafts_together(self._table, self.before, self.columns)

    @cached_property
    def at_once(self) -> Drafts:
        """Drafts that attend to everything, which is read once for all of a row."""
        return drafts_of(self._table, self.before, self.columns)

    @cached_property
    def each(self) -> tuple[Taken, ...]:
        """Drafts that are decoded one after the other, with ids for the blocks that become full."""
        return drafts_each(self._table, self.before, self.columns)


def drafts_together(table: RowTable, rows: Rows, columns: int) -> Drafts:
    """``columns`` more tokens of the only row, decoded in one go, with ids for the blocks that become full."""
    (length,), after = rows.lengths, _longer(table, rows, (columns,))
    blocks = tuple([rows.full((length + i,), table.recent)[0] for i in range(columns)])
    queries = Rows(rows.block_size, after.columns, tuple(range(length + 1, length + columns + 1)), blocks)
    now = after if blocks[-1:] == after.sealed else replace(after, sealed=blocks[-1:])
    return Drafts(columns, Taken(rows, now, after), queries)


def drafts_of(table: RowTable, rows: Rows, columns: int) -> Drafts:
    """``columns`` more tokens of each row for a captured pass: :func:`drafts_together`, unless they are verified.

    In exact mode they attend to everything, and there may be several rows. With continuous batching some rows get fewer
    tokens, or none: those hold nothing in the pass.
    """
    exactness, batch = table.exactness, rows.batch
    if not exactness.everything:
        return drafts_together(table, rows, columns)
    after, asked = _longer(table, rows, exactness.counts or (columns,) * batch), rows
    now = after if after.sealed == rows.sealed else replace(after, sealed=rows.sealed)
    if exactness.counts is not None and not all(exactness.counts):
        of = rows.lengths, rows.sealed, after.lengths
        lengths, sealed, longer = (tuple(n * (count > 0) for n, count in zip(one, exactness.counts)) for one in of)
        asked = Rows(rows.block_size, rows.columns, lengths, sealed)
        now = replace(after, lengths=longer, sealed=sealed)
    return Drafts(columns, Taken(rows, now, after), asked, True, exactness.counts)


def drafts_each(table: RowTable, rows: Rows, columns: int) -> tuple[Taken, ...]:
    """``columns`` more tokens of each row, decoded one after the other, with ids for the blocks that become full."""
    steps = []
    for _ in range(columns):
        after = _longer(table, rows, (1,) * rows.batch)
        now = after if after.sealed == rows.sealed else replace(after, sealed=rows.sealed)
        steps.append(Taken(rows, now, after))
        rows = after
    return tuple(steps)


def _longer(table: RowTable, rows: Rows, counts: Sequence[int]) -> Rows:
    """The rows with so many more tokens each, with ids for the blocks that become full."""
    lengths = tuple([length + count for length, count in zip(rows.lengths, counts)])
    sealed = rows.full(lengths, table.recent)
    if sealed != rows.sealed:
        table.blocks.reserve(range(rows.batch), rows.sealed, sealed)
    return Rows(rows.block_size, rows.columns + max(counts), lengths, sealed, rows.valid)
