"""What the rows hold in one layer: during a pass, one layer may be a step ahead of the next.

Apart from the store, because it holds no keys and values: numbers on the host, and their copies on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from ..tensors import reads_here
from .row_table import RowTable
from .rows import Rows
from .state import State
from .step_rows import StepRows


class LayerRows(State):
    """The rows as one layer holds them.

    Attributes:
        table_of_rows: the rows of the cache, which all layers share.
        batch: rows; a captured step may be of the first ones of the table alone.
        capturing: a step is being captured: shapes may not depend on what is cached, lengths are read on the device.
        coming: tokens of each row with those that a policy observes before they are stored.
    """

    HOST: ClassVar = {
        "_rows": None,  # what this layer holds, where that is not what all do
        "_taken": None,  # the decode step under way, from its token to its end
    }
    OWN: ClassVar = ("_taken",)

    coming: tuple[int, ...] = ()

    def __init__(self, table: RowTable, batch: int, tokens: int, device: torch.device) -> None:
        super().__init__()
        self.table_of_rows, self.batch, self.device = table, batch, device
        self._rows = table.start(batch, tokens)
        table.blocks.on[device]  # now, so that what a cache takes is known before the first block is full
        self._sealed = False  # it has sealed
        self.capturing = False

    @property
    def held(self) -> Rows:
        """What the rows hold in this layer: in the middle of a pass layers may differ."""
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

    def begin(self, tokens: int) -> None:
        """The first of about ``tokens`` columns are about to come."""
        self._rows = self.table_of_rows.start(self.batch, tokens)

    def announce(self, columns: int, valid: Tensor | None) -> None:
        """``columns`` new columns are about to come, of which ``valid [batch, columns]`` are tokens: :attr:`coming`."""
        if not self.capturing:
            more = self.table_of_rows.tokens_of(columns, valid)
            self.coming = tuple(length + n for length, n in zip(self.held.lengths, more))

    def first_rows(self, n: int) -> LayerRows:
        """The first ``n`` rows, of which a captured step is to be made."""
        new = super().first_rows(n)
        new.batch = n
        return new

    # ------------------------------------------------------------------ numbers of the host

    @property
    def length(self) -> int:
        """Columns of the attention mask that are cached, padding included."""
        return (self._rows or self.table_of_rows.rows).columns

    @property
    def full_blocks(self) -> int:
        """Full blocks of the row that has most."""
        return (self._rows or self.table_of_rows.rows).full_blocks

    @property
    def padded(self) -> bool:
        """Some column is padding."""
        return self.held.valid is not None

    # ------------------------------------------------------------------ on the device

    def valid_columns(self) -> Tensor:
        """Validity of all cached columns, bool ``[batch, length]``."""
        return self.held.valid_columns(self.device)

    @property
    def block_table(self) -> Tensor:
        """int32 ``[batch, capacity]``, physical block of each full block of each row; after these it says nothing."""
        held = self.table_of_rows.blocks.on[self.device]
        return held if held.shape[0] == self.batch else held[: self.batch]

    @property
    def table(self) -> Tensor:
        """The block table's used part, ``[batch, full_blocks]``; while :attr:`capturing` all of it."""
        held = self.block_table
        return held if self.capturing else held[:, : (self._rows or self.table_of_rows.rows).full_blocks]

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
            return reads_here((self._rows or self.table_of_rows.rows).on[self.device])
        over = self._taken is not None and self.held is self._taken.after and self._sealed
        return self.step_rows.after if over else self.step_rows.now
