"""The rows of captured steps, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.storage.begin_step import begin_step
from ..tensors import no_inference_mode, sent
from .rows import Rows


class StepRows:
    """The rows of captured steps, at fixed addresses; each step advances them (:mod:`..ops.storage.begin_step`).

    Attributes:
        past: int32 ``[batch]``, tokens before the step.
        now: int32 ``[batch, 2]``, tokens with the step's own, and tokens in full blocks. With continuous
            batching, rows that get no token have none here: they attend to nothing.
        after: int32 ``[batch, 2]``, the same when the block that became old is sealed: where the next step begins.
        columns: int32 ``[batch]``, columns of sliding layers before the step, whose rings count padding at the front.
        pads: int32 ``[batch]``, that padding.
        windows: by size of a sliding window, and whether it is a chunk: int32 ``[batch, 2]``, columns with the step's
            own, and those before the first one that is seen.
        held: what ``after`` says; None: somebody has changed it.
        managed: rows come and go: their columns are their tokens.
    """

    @no_inference_mode
    def __init__(self, batch: int, device: torch.device, managed: bool = False) -> None:
        self.managed = managed
        self.past, self.columns, self.pads = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(3))
        self.now, self.after = (torch.zeros(batch, 2, dtype=torch.int32, device=device) for _ in range(2))
        self.windows: dict[tuple[int, bool], Tensor] = {}
        self.held: Rows | None = None

    def first(self, n: int) -> StepRows:
        """The first ``n`` rows, in the same memory: a step of these leaves the others as they are."""
        new = object.__new__(StepRows)
        for name in ("past", "columns", "pads", "now", "after"):
            setattr(new, name, getattr(self, name)[:n])
        new.managed = self.managed
        new.windows, new.held = {size: held[:n] for size, held in self.windows.items()}, None
        return new

    def load(self, rows: Rows) -> None:
        """The next step begins with these."""
        if self.held is not rows:
            self.held = None  # unknown, if an interrupt stops the copy
            self.after.copy_(rows.on[self.after.device])
            if self.windows and not self.managed:
                pads = [rows.columns - length for length in rows.lengths]
                self.pads.copy_(sent(pads, torch.int32, self.pads.device))
            self.held = rows

    def begin(self, valid: Tensor | None, block_size: int, recent: int, skip: bool = False) -> None:
        """A step begins. ``valid``: bool ``[batch]``, rows that get a token; None: all. ``skip``: the others rest."""
        begin_step(self.after, self.past, self.now, valid, block_size=block_size, recent=recent, skip=skip)
        if self.windows:
            torch.add(self.past, self.pads, out=self.columns)
        for (size, chunked), held in self.windows.items():
            held[:, 0] = self.columns + 1
            if chunked:  # which begins at a row's first token
                held[:, 1] = self.columns - self.past % size
            else:
                held[:, 1] = torch.maximum(self.columns + 1 - size, self.pads)
            if skip and valid is not None:
                held *= valid[:, None]

    def begin_drafts(self, count: Tensor, width: int, block_size: int, recent: int) -> tuple[Tensor, list[Tensor]]:
        """A pass over ``count`` of at most ``width`` drafts of the only row begins; ``count``: int32 ``[1]``.

        Returns:
            Each of the tokens as a row, int32 ``[width, 2]``: what a step of it would find; those after the last one
            hold nothing. And the row before each block that may have to be sealed, and after the last, int32
            ``[1, 2]`` each.
        """
        at = torch.arange(width + 1, dtype=torch.int32, device=count.device)
        length, sealed = self.after.unbind(1)  # [1] each
        self.past.copy_(length)
        before = length + at  # tokens before each of the new ones, and after them
        old = torch.div(before - recent, block_size, rounding_mode="floor") * block_size
        full = torch.maximum(old, sealed)
        queries = torch.stack((before[1:], full[:-1]), dim=1) * (at[:width, None] < count)
        most = -(-width // block_size)
        ends = torch.minimum(sealed + block_size * at[: most + 1], full.gather(0, count.long()))
        due = torch.stack(((length + count).expand(most + 1), ends), dim=1)
        self.after.copy_(due[-1:])
        return queries, list(due.split(1))

    def begin_at_once(self, count: Tensor, width: int, block_size: int, recent: int) -> list[Tensor]:
        """A pass over ``count`` of at most ``width`` tokens of each row begins. All attend to everything.

        :attr:`now` says what there is before it; rows without tokens have none there. ``count``: int32 ``[1]`` or
        ``[batch]``.

        Returns:
            The rows before each block that may have to be sealed, and after the last one, int32 ``[batch, 2]`` each.
        """
        torch.mul(self.after, (count > 0)[:, None], out=self.now)
        length, sealed = self.after.unbind(1)
        self.past.copy_(length)
        longer = length + count
        full = torch.div(longer - recent, block_size, rounding_mode="floor") * block_size
        most = -(-width // block_size)
        more = block_size * torch.arange(most + 1, dtype=torch.int32, device=count.device)[:, None]
        ends = torch.minimum(sealed + more, torch.maximum(full, sealed))  # [blocks, batch]
        due = torch.stack((longer.expand_as(ends), ends), dim=-1)
        self.after.copy_(due[-1])
        return list(due.unbind(0))

    @no_inference_mode
    def window(self, size: int, chunked: bool = False) -> Tensor:
        """The entry of :attr:`windows`, made if it is not there."""
        if (kind := (size, chunked)) not in self.windows:
            self.windows[kind], self.held = torch.zeros_like(self.now), None
        return self.windows[kind]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of all tensors that a captured step reads and writes here."""
        return self.past.data_ptr(), self.now.data_ptr(), *(held.data_ptr() for held in self.windows.values())
