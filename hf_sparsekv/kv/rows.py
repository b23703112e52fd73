"""What the rows of a cache hold: how many tokens each, and how many of these in full blocks.

A row is the sequence of its own valid tokens: token ``i`` is in block ``i // block_size``, at ``i % block_size``.
Padding is not stored. Which columns of the attention mask a row's tokens were is a map that only prompts and ``crop()``
ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import no_inference_mode, sent


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
    _past: dict[tuple[torch.device, int, int], Tensor] = field(default_factory=dict, repr=False)

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
        """Which columns are tokens, bool ``[batch, columns]``."""
        if self.valid is None:
            return torch.ones(self.batch, self.columns, dtype=torch.bool, device=device)
        return torch.nn.functional.pad(self.valid.to(device), (0, self.columns - self.valid.shape[1]), value=True)


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
