"""The rows of a cache: how many tokens each has, and how many of these are in full blocks.

A row is the sequence of its own valid tokens: token ``i`` is in block ``i // block_size``, at ``i % block_size``.
Padding is not stored. Which columns of the attention mask a row's tokens were is a map that only prompts and ``crop()``
ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import no_inference_mode, sent


class Uploads(dict[torch.device, Tensor]):
    """int32 numbers on each device that has asked for them."""

    def __init__(self, numbers: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._numbers = numbers

    @no_inference_mode
    def __missing__(self, device: torch.device) -> Tensor:
        held = self[device] = sent(self._numbers, torch.int32, device)
        return held


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows at one time. Never changed: a pass creates the next one.

    Attributes:
        block_size: tokens of a block.
        columns: of the attention mask, padding included: the same for all rows.
        lengths: tokens of each row.
        sealed: full blocks of each row that are in the block pool.
        valid: which columns are tokens, bool ``[batch, n]``, n <= columns: later ones all are. None: all are.
    """

    block_size: int
    columns: int
    lengths: tuple[int, ...]
    sealed: tuple[int, ...]
    valid: Tensor | None = None
    _past: dict[tuple[torch.device, int, int], Tensor] = field(default_factory=dict, repr=False)
    _tokens: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)
    _valid: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def none(cls, block_size: int, batch: int, columns: int = 0) -> Rows:
        """Rows without tokens."""
        return cls(block_size, columns, (0,) * batch, (0,) * batch)

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.lengths)

    @cached_property
    def full_blocks(self) -> int:
        """Full blocks of the row that has most."""
        return max(self.sealed)

    @property
    def uniform(self) -> bool:
        """All rows hold the same number of tokens."""
        return min(self.lengths) == max(self.lengths) and min(self.sealed) == max(self.sealed)

    def filled(self, blocks: int) -> Rows:
        """Each row that is there with ``blocks`` full blocks."""
        full = tuple(blocks * (n > 0) for n in self.lengths)
        return Rows(self.block_size, self.columns, self.lengths, full, self.valid)

    def padded(self, rows: int) -> Rows:
        """So many rows; the last ones hold nothing."""
        more = (0,) * (rows - self.batch)
        return Rows(self.block_size, self.columns, self.lengths + more, self.sealed + more)

    def full(self, lengths: Sequence[int], recent: int) -> tuple[int, ...]:
        """Full blocks once the rows hold ``lengths`` tokens: those older than the last ``recent`` tokens."""
        size = self.block_size
        return tuple([max(blocks, (length - recent) // size, 0) for length, blocks in zip(lengths, self.sealed)])

    def with_row(self, row: int, length: int, sealed: int) -> Rows:
        """The rows if row ``row`` holds ``length`` tokens, without padding."""
        lengths, blocks = list(self.lengths), list(self.sealed)
        lengths[row], blocks[row] = length, sealed
        return Rows(self.block_size, self.columns, tuple(lengths), tuple(blocks))

    def mapped(self, index: Sequence[int]) -> Rows:
        """The rows if row ``i`` becomes what row ``index[i]`` was."""
        valid = None if self.valid is None else self.valid[torch.tensor(index, device=self.valid.device)]
        lengths, sealed = (tuple(of[i] for i in index) for of in (self.lengths, self.sealed))
        return Rows(self.block_size, self.columns, lengths, sealed, valid)

    def cropped(self, columns: int, window: int) -> Rows:
        """The rows of the first ``columns`` columns. Blocks that would leave the window short are taken back."""
        known = self.valid
        lengths = [length - (self.columns - columns) for length in self.lengths]
        if known is not None and columns < known.shape[1]:
            known = known[:, :columns]
            lengths = known.sum(1).tolist()
        return self._shortened(columns, lengths, known, window)

    def masked(self, valid: Tensor, window: int) -> Rows | None:
        """The rows if of their columns those are tokens that are ``valid``, bool ``[batch, columns]``.

        None, unless that takes nothing but last tokens from rows: then the rest stays where it is.
        """
        held = self.valid_columns(valid.device)
        lengths = valid.sum(1)
        if not torch.equal(held & (held.cumsum(1) <= lengths[:, None]), valid):
            return None
        return self._shortened(self.columns, lengths.tolist(), valid.clone(), window)

    def aligned(self, lengths: Sequence[int], window: int, valid: Tensor | None) -> Rows:
        """The rows with their first ``lengths`` tokens. All end with the last column.

        ``valid``: which columns are tokens, bool ``[batch, columns]``; None: all rows are as long as each other.
        """
        return self._shortened(max(lengths), lengths, valid, window)

    def _shortened(self, columns: int, lengths: Sequence[int], valid: Tensor | None, window: int) -> Rows:
        """The rows with their first ``lengths`` tokens."""
        size = self.block_size
        sealed = [min(b, max(0, (length - window) // size)) for length, b in zip(lengths, self.sealed)]
        return Rows(size, columns, tuple(lengths), tuple(sealed), valid)

    def same(self, other: Rows) -> bool:
        """The rows hold as much as those of ``other``."""
        return (self.columns, self.lengths, self.sealed) == (other.columns, other.lengths, other.sealed)

    @cached_property
    def on(self) -> Uploads:
        """By device: int32 ``[batch, 2]``, tokens, and tokens in full blocks."""
        return Uploads([(length, sealed * self.block_size) for length, sealed in zip(self.lengths, self.sealed)])

    def past(self, rows: int, tokens: int, device: torch.device) -> Tensor:
        """int32 ``[rows]``, ``tokens`` each: where all layers store the rest of a prompt that leaves these rows."""
        key = device, rows, tokens
        if key not in self._past:
            self._past[key] = self._number(rows, tokens, device)
        return self._past[key]

    @staticmethod
    @no_inference_mode
    def _number(rows: int, tokens: int, device: torch.device) -> Tensor:
        return torch.full((rows,), tokens, dtype=torch.int32, device=device)

    def valid_columns(self, device: torch.device) -> Tensor:
        """Which columns are tokens, bool ``[batch, columns]``. With padding the same tensor each time."""
        if self.valid is None:
            return torch.ones(self.batch, self.columns, dtype=torch.bool, device=device)
        if device not in self._valid:
            later = self.columns - self.valid.shape[1]
            self._valid[device] = torch.nn.functional.pad(self.valid.to(device), (0, later), value=True)
        return self._valid[device]

    def tokens(self, device: torch.device) -> Tensor | None:
        """Number of the token in each column, int64 ``[batch, columns]``; -1 for padding. None: that of the column."""
        if self.valid is None:
            return None
        if device not in self._tokens:
            valid = self.valid_columns(device)
            self._tokens[device] = (valid.cumsum(1) - 1).masked_fill(~valid, -1)
        return self._tokens[device]


class Taken(NamedTuple):
    """A decode step: its rows before it, while it attends, and when what became old is sealed.

    With continuous batching, rows that get no token hold nothing in ``now``: see :meth:`RowTable.asked`.
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
            of that token would find. If the tokens attend to everything: the rows before that get any.
        at_once: they attend to everything, which is read once for all of a row.
        counts: tokens of each row, where some get fewer; None: all get all.
    """

    tokens: int
    taken: Taken
    queries: Rows
    at_once: bool = False
    counts: tuple[int, ...] | None = None
