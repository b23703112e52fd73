"""Which prompt is read next: the first of the queue, or a short one that overtakes it.

It is apart from how a prompt is read (:mod:`.prefill`): this decides whose turn it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from torch import Tensor

from .blocks import Blocks
from .in_flight import Request
from .intake import Intake
from .room import Room
from .work import Work

# Prompts that wait have the one before them read by so many times prefill_ms at most. Each turn costs a step, for which
# the weights are read anew: with 20 ms of a prompt beside 8 of a step prompts take 1.4 times as long as alone, with 80
# ms 1.1 times. vLLM has 2,048 tokens of prompts in each of its steps, some 80 ms.
CROWD = 4


class ReadingOrder:
    """Has prompts begin and be read, one after the other.

    Only the loop's thread may call it, but for :meth:`begins_at_once`, which any thread may. Others may look at
    ``reading``.

    Args:
        work: on the model and its rows.
        intake: has the queue.
        blocks: where requests reserve their memory.
        room: where they find a row.

    Attributes:
        reading: the request whose prompt is being read.
    """

    def __init__(self, work: Work, intake: Intake, blocks: Blocks, room: Room) -> None:
        self.work, self.intake, self.blocks, self.room = work, intake, blocks, room
        self.serving, self.waiting = work.serving, intake.waiting
        self.reading: Request | None = None
        self._overtook = False  # the last turn was a short prompt's

    # ------------------------------------------------------------------ beginning

    def begins_at_once(self, request: Request) -> bool:
        """No prompt is read, and a row and memory are free: nothing takes these but a prompt, or a row held back."""
        return self.reading is None and self._has_room(request)

    @property
    def can_begin(self) -> bool:
        """The first prompt of the queue may begin."""
        return bool(self.waiting) and self.begins_at_once(self.waiting[0])

    def _has_room(self, request: Request, overtaken: Sequence[Request] = ()) -> bool:
        """There are a row and memory for a request, and after it for those that it has ``overtaken``."""
        others = sum(one.blocks for one in overtaken if one is not self.reading)  # which has reserved its own
        return self.room.has_place(len(overtaken)) and self.blocks.fits(request, others)

    def begin(self) -> Request | None:
        """The first prompt of the queue begins, if it may: it is to be read from here on."""
        if not self.can_begin:
            return None
        self.reading = request = self.waiting[0]  # before it leaves the queue: other threads find it here or there
        self.waiting.popleft()
        self._book(request)
        self.intake.begun(request)
        return request

    def _book(self, request: Request) -> None:
        """Work on a request begins."""
        self.blocks.reserve(request)
        request.begun = time.perf_counter()
        self.intake.counts.queue_s.add(request.begun - request.arrived)

    # ------------------------------------------------------------------ reading on

    def turn(self) -> Request | None:
        """Whose prompt is read now: the one that is being read, or a short one that overtakes it. None: no prompt."""
        if self.reading is None:
            return None
        short = self._next_short()
        self._overtook = short is not None
        if short is None:
            return self.reading
        self._book(short)
        return short

    def _next_short(self) -> Request | None:
        """The first short prompt that may overtake the one that is being read, and those that wait before it.

        It is read at once, in no more time than the turn that it takes. Every other turn is the longer prompt's. All
        that are overtaken find their rows and memory all the same.
        """
        takes_turns = math.isfinite(self.serving.prefill_ms)
        if not self.waiting or self._overtook or not takes_turns:
            return None
        in_a_turn = self.work.pace.tokens_in(self._turn_ms, 0)
        shorter = self.work.reading.left - 1
        longest = min(in_a_turn, self.serving.chunk, shorter)
        overtaken = [self.reading]
        for request in self.waiting:
            if len(request.ids) <= longest and self._has_room(request, overtaken) and self._is_prefill(request):
                return request
            overtaken.append(request)
        return None

    def _is_prefill(self, request: Request) -> bool:
        """More than one token has to be read. A single one would be a decode step, for which a graph is captured."""
        _, shared_blocks, _ = request.known
        return len(request.ids) - shared_blocks * self.work.rows.cache.config.block_size > 1

    @property
    def _turn_ms(self) -> float:
        """Of a prompt between two decode steps."""
        return self.serving.prefill_ms * min(CROWD, 1 + len(self.waiting))

    def read(self, request: Request, beside: bool) -> tuple[int, Tensor] | None:
        """Read on in the prompt whose :meth:`turn` it is.

        Args:
            beside: rows decode meanwhile; without them there is no need to stop soon.

        Returns:
            Once the prompt is read: its row, and the logits ``[1, vocabulary]`` of its end.
        """
        if request is not self.reading:  # a longer one waits between two layers
            return self.work.overtake(request.ids, request.match.ids, request.channels)
        reading = self.work.reading
        ms = self._turn_ms if beside else 20 * self.serving.prefill_ms
        if not self.work.read(reading.share(ms)):
            return None
        row = self.work.join()
        self.reading = None
        return row, reading.logits

    def has_read(self, request: Request) -> None:
        """The turn of a prompt is over: if it has overtaken another one, it leaves the queue."""
        if self._overtook:
            self.waiting.remove(request)  # now that other threads find it elsewhere

    def give_up(self) -> None:
        """Drop the prompt that is being read, if there is one."""
        if self.reading is not None:
            self.reading = None
            self.work.give_up()
