"""Shares the batch's rows: which requests decode, with how much memory for copies of selected tokens, in which rows.

Prompts change the batch when they join it. This looks at all rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ..row_batch import WorkingSets, width
from ..telemetry.working_set import STEPS
from .admission import admit, room_for
from .in_flight import MOST, Request
from .sampler import Sampler
from .work import Work

SETS_EVERY = STEPS  # steps from one count to the next, which takes the host 0.4 to 0.6 ms (rows.csv)
SOON = 4  # tokens by which the host may be late


class Room:
    """Shares rows and their memory among the requests that have joined the batch.

    Only the loop's thread may call it, except :meth:`has_place`, which any thread may. Others may read ``running``.

    Args:
        work: operations on the model and its rows.
        sampler: the sampling settings of each row.

    Attributes:
        running: requests that have a row, in the order of their arrival.
        changed: whether requests have joined or left since the last :meth:`choose`.
    """

    def __init__(self, work: Work, sampler: Sampler) -> None:
        self.work, self.rows, self.serving, self.sampler = work, work.rows, work.serving, sampler
        self.running: list[Request] = []
        self.changed = False
        self._sets: tuple[WorkingSets, list[tuple[int, Request]]] | None = None  # being counted
        self._next_sets = 0

    @property
    def by_need(self) -> bool:
        """Whether rows share the memory for copies of selected tokens according to their working sets."""
        return bool(self.rows.slots) and self.serving.working_set

    # ------------------------------------------------------------------ coming and going

    def has_place(self, overtaken: int = 0) -> bool:
        """Whether there is a row for one more request, and for all requests that it has ``overtaken``."""
        taken = len(self.rows.rows)
        some_wait = taken > len(self.rows.active)
        some_may_wait = overtaken > 0 and self.by_need  # when the overtaken requests join
        # A row that waits moves out of the way of those that decode, so one place stays free for it.
        kept_free = 1 if some_wait or some_may_wait else 0
        return taken + 1 + overtaken + kept_free <= self.rows.max_rows

    def enter(self, request: Request, row: int) -> None:
        """Enter a request that has joined in ``row``. The row gets memory for copies when it is chosen to decode."""
        request.row = row
        bisect.insort(self.running, request, key=lambda one: one.order)
        if not self.serving.working_set:
            self._even_room(row)
        self.changed = True
        request.provisional = not request.cached and len(request.ids) < self.rows.calibration_tokens

    def leave(self, request: Request) -> None:
        """Free the row of a request."""
        self.work.leave(request.row)
        self.sampler.clear(request.row)
        self.running.remove(request)
        request.row = None
        self.changed = True

    def active(self) -> dict[int, Request]:
        """Requests that decode, by their rows."""
        return {request.row: request for request in self.running if request.candidate.runs}

    def to_calibrate(self) -> list[Request]:
        """Requests with short prompts whose label channels are due.

        They are due before the row's first sparse step, but not before there are enough tokens to calibrate on.
        Calibration costs a pass over these tokens, for which all rows wait. Few answers become so long.
        """
        provisional = [one for one in self.running if one.provisional and one.candidate.runs]
        if not provisional:
            return []
        soon = SOON + (MOST if self.serving.exact else 0)  # steps of a round
        due = max(self.rows.calibration_tokens, self.rows.whole_tokens - soon)
        return [one for one in provisional if len(one.ids) + len(one.tokens) >= due]

    # ------------------------------------------------------------------ who decodes

    def choose(self) -> None:
        """Choose the requests that decode from here on, their room for copies, and their rows."""
        self.changed = False
        rows = self.rows
        if self.by_need:
            for request in self.running:
                request.candidate.need = self._needed(request)
            runs = admit([request.candidate for request in self.running], rows.slots)
        else:
            runs = [True] * len(self.running)
        for request, goes in zip(self.running, runs):
            request.candidate.runs = goes
            if goes != (request.row in rows.active):
                self.work.resume(request.row) if goes else self.work.hold(request.row)
        if self.by_need:
            self._share_room()
        self._close_up()

    def measured(self, steps: int) -> bool:
        """Count the rows' working sets every few steps. True: what they need has changed.

        ``steps``: number of steps launched so far.
        """
        if not self.by_need:
            return False
        if self._sets is None:
            if self.running and steps >= self._next_sets:
                self._next_sets = steps + SETS_EVERY
                filled = [one for one in self.running if one.candidate.runs and one.launched - one.roomier >= STEPS]
                self._sets = self.rows.working_sets(), [(one.row, one) for one in filled]
            return False
        sets, asked = self._sets
        if not sets.ready:
            return False
        self._sets, found, changed = None, sets.read(), False
        for row, request in asked:
            if request.row != row:  # it has moved, or left
                continue
            request.need = max(found[row], 1)
            changed |= abs(self._needed(request) - request.candidate.need) > request.candidate.need // 8
        return changed

    def _needed(self, request: Request) -> int:
        """Room for copies that a request needs to decode."""
        tokens = len(request.ids) + len(request.tokens)
        return room_for(request.need, tokens) or self.rows.expected_working_set(tokens)

    # ------------------------------------------------------------------ how much memory

    def _even_room(self, row: int) -> None:
        """Give a row the same room as every other row."""
        if self.rows.slots:
            self.work.give(row, min(self.rows.slots // self.rows.max_rows, self.rows.free_slots))

    def _share_room(self) -> None:
        """Give each row the room of :func:`wanted_room`, except for changes of up to a quarter.

        Rows shrink first, largest change first. Then rows grow as far as room is free.
        """
        wanted = wanted_room(self.running, self.rows.slots, self.rows.cache.config.block_size)
        had = {row: self.rows.room(row) for row in wanted}
        more = {row: wanted[row] - had[row] for row in wanted}
        grow = sorted((row for row in more if more[row] > had[row] // 4), key=more.get)
        shrink = sorted((row for row in more if more[row] < 0), key=more.get)
        lacking = sum(more[row] for row in grow) - self.rows.free_slots
        for row in shrink:
            # If another row lacks room, also take less than a quarter. Otherwise a new row would find almost no free
            # room, and read its selection over the link until the needs of others change.
            if lacking > 0 or -more[row] > had[row] // 4:
                self.work.give(row, wanted[row])
                lacking += more[row]
        mine = {request.row: request for request in self.running}
        for row in grow:
            self.work.give(row, min(wanted[row], had[row] + self.rows.free_slots))
            if self.rows.room(row) > had[row]:
                mine[row].roomier = mine[row].launched

    # ------------------------------------------------------------------ which rows

    def _close_up(self) -> None:
        """Move active rows to the front if this makes the step narrower. Held rows in their way move back."""
        rows, active = self.rows, self.rows.active
        if not active:
            return
        fewer = width(len(active), rows.max_rows)
        if fewer >= rows.width:
            return
        there, mine = set(rows.rows), {request.row: request for request in self.running}
        holes = [row for row in range(fewer) if row not in there]
        waiting = [row for row in range(fewer) if row in there and row not in active]
        aside = next((row for row in range(fewer, rows.max_rows) if row not in there), None)
        if aside is None and not holes:
            return  # rows in the way have no place to move to

        def move(row: int, to: int) -> None:
            self.work.move(row, to)
            self.sampler.move(row, to)
            mine[row].row = to
            mine[to] = mine.pop(row)

        for row in [row for row in active if row >= fewer]:
            if holes:
                move(row, holes.pop(0))
            else:
                front = waiting.pop(0)
                move(front, aside)
                move(row, front)
            aside = row  # free now


def wanted_room(running: Sequence[Request], slots: int, block_size: int) -> dict[int, int]:
    """Tokens that each row gets room for: rows that decode share ``slots``, the others get none.

    A row gets what its request needs and an equal share of the rest, but no more than its prompt and longest answer
    have. The oldest row decodes even if it needs more than there is.
    """
    decoding = [request for request in running if request.candidate.runs]
    needed = sum(request.candidate.need for request in decoding)
    spare = max(0, slots - needed) // max(1, len(decoding))
    wanted = {request.row: 0 for request in running}
    for request in decoding:
        most = len(request.ids) + request.sampling.max_tokens
        # Round down to whole blocks, the unit of room: rounded up, all rows together could want more than there is.
        wanted[request.row] = min(request.candidate.need + spare, most) // block_size * block_size
    return wanted
