"""Room on the device for copies of selected tokens, and how it is divided among the rows.

Only offloaded caches that select tokens keep copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layers.cache_state import FullLayer
from ..policies.row_tokens import RowTokens, expected_working_set


class WorkingSets:
    """Result of :meth:`RowBatch.working_sets`, which the device may still be counting."""

    def __init__(self, sizes: Tensor) -> None:
        self._sizes, self._counted = sizes, None
        if sizes.is_cuda:
            self._sizes = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
            self._sizes.copy_(sizes, non_blocking=True)
            self._counted = torch.cuda.Event()
            self._counted.record(torch.cuda.current_stream(sizes.device))

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` returns without waiting."""
        return self._counted is None or self._counted.query()

    def read(self) -> list[int]:
        """Tokens of each of the ``max_rows`` rows; waits until they are counted."""
        if self._counted is not None:
            self._counted.synchronize()
        return self._sizes.tolist()


class Slots:
    """The slots of a batch, of each layer and KV head; none until :meth:`open` finds that copies are kept.

    Args:
        block_size: slots are given in whole blocks.

    Attributes:
        tokens: copies of chosen tokens on the device, if any are kept.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: RowTokens | None = None

    def open(self, layers: Sequence[FullLayer], max_length: int) -> None:
        """The stores of these layers have been made, for rows of up to ``max_length`` tokens."""
        copying = [layer for layer in layers if expected_working_set(layer.policy, max_length)]
        if copying:
            self.tokens = RowTokens.open([layer.policy for layer in copying], [layer.store for layer in copying])

    @property
    def total(self) -> int:
        """Slots of all rows together."""
        return 0 if self.tokens is None else self.tokens.lanes.slots

    @property
    def free(self) -> int:
        """Slots that belong to no row."""
        return 0 if self.tokens is None else self.tokens.lanes.free

    def of(self, row: int) -> int:
        """Slots of a row."""
        return 0 if self.tokens is None else self.tokens.lanes.held[row][1]

    def whole(self, tokens: int) -> int:
        """``tokens`` rounded up to whole blocks."""
        if tokens < 0:
            raise ValueError(f"room for {tokens} tokens was asked for: give 0 or more")
        return -(-tokens // self.block_size) * self.block_size

    def share(self, wanted: int | None) -> int:
        """The room of a new row. Raises ValueError if there is not so much."""
        if wanted is None:
            return 0 if self.tokens is None else min(self.tokens.even, self.free)
        room = self.whole(wanted)
        if room > self.free:
            raise ValueError(f"{room} slots were asked for, {self.free} of {self.total} are free")
        return room

    def give(self, row: int, tokens: int) -> None:
        """A row has room for so many tokens: see :meth:`.RowBatch.give`."""
        room = self.whole(tokens)
        if room != self.of(row):
            if self.tokens is None:
                raise ValueError(
                    f"row {row} was to get room for {tokens} tokens: these rows keep no copies (slots is 0)"
                )
            self.tokens.give(row, room)
