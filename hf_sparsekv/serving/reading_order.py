"""The order of prefills: the first prompt of the queue, or a short one that overtakes it.

It decides whose turn it is; :mod:`.prefill` runs the prompts.
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

# While prompts wait, a turn of the prefill may take up to this many times prefill_ms. Each turn costs a decode step,
# which reads the weights again. With 20 ms of prefill and 8 ms of decode, prompts take 1.4 times as long as alone, with
# 80 ms 1.1 times. vLLM has 2,048 tokens of prompts in each of its steps, some 80 ms.
CROWD = 4


class ReadingOrder:
    """Starts and continues prefills, one at a time.

    Only the loop's thread may call it, except :meth:`begins_at_once`, which any thread may. Others may read
    ``reading``.

    Args:
        work: operations on the model and its rows.
        intake: the queue.
        blocks: memory of requests.
        room: rows of requests.

    Attributes:
        reading: the request in prefill.
    """

    def __init__(self, work: Work, intake: Intake, blocks: Blocks, room: Room) -> None:
        self.work, self.intake, self.blocks, self.room = work, intake, blocks, room
        self.serving, self.waiting = work.serving, intake.waiting
        self.reading: Request | None = None
        self._overtook = False  # the last turn was a short prompt's

    # ------------------------------------------------------------------ beginning

    def begins_at_once(self, request: Request) -> bool:
        """Whether no prefill is in progress, and a row and memory are free for the request."""
        return self.reading is None and self._has_room(request)

    @property
    def can_begin(self) -> bool:
        """Whether the first prompt of the queue may start."""
        return bool(self.waiting) and self.begins_at_once(self.waiting[0])

    def _has_room(self, request: Request, overtaken: Sequence[Request] = ()) -> bool:
        """Whether there are rows and memory for a request and for those that it has ``overtaken``."""
        others = sum(one.blocks for one in overtaken if one is not self.reading)  # `reading` has reserved its own
        return self.room.has_place(len(overtaken)) and self.blocks.fits(request, others)

    def begin(self) -> Request | None:
        """Start the first prompt of the queue, if it may start, and return its request."""
        if not self.can_begin:
            return None
        self.reading = request = self.waiting[0]  # before it leaves the queue: other threads find it here or there
        self.waiting.popleft()
        self._book(request)
        self.intake.begun(request)
        return request

    def _book(self, request: Request) -> None:
        """Reserve memory for a request, and note its start."""
        self.blocks.reserve(request)
        request.begun = time.perf_counter()
        self.intake.counts.queue_s.add(request.begun - request.arrived)

    # ------------------------------------------------------------------ reading on

    def turn(self) -> Request | None:
        """The request whose prompt is read now: the one in prefill, or a short one that overtakes it. None: none."""
        if self.reading is None:
            return None
        short = self._next_short()
        self._overtook = short is not None
        if short is None:
            return self.reading
        self._book(short)
        return short

    def _next_short(self) -> Request | None:
        """The first short prompt that may overtake the one in prefill, and those that wait before it.

        It is read in one pass, in no more time than the turn that it takes. Every second turn goes to the longer
        prompt. All overtaken requests still get their rows and memory.
        """
        takes_turns = math.isfinite(self.serving.prefill_ms)
        if not self.waiting or self._overtook or not takes_turns:
            return None
        in_a_turn = self.work.pace.tokens_in(self._turn_ms, 0)
        shorter = self.work.reading.left - 1
        longest = min(in_a_turn, self.serving.chunk, shorter)
        overtaken = [self.reading]
        for request in self.waiting:
            short = len(request.ids) <= longest and request.sampling.prompt_logprobs is None  # those have own passes
            if short and self._has_room(request, overtaken) and self._is_prefill(request):
                return request
            overtaken.append(request)
        return None

    def _is_prefill(self, request: Request) -> bool:
        """Whether more than one token has to be read. A single one would be a decode step, with a captured graph."""
        _, shared_blocks, _ = request.known
        return len(request.ids) - shared_blocks * self.work.rows.cache.config.block_size > 1

    @property
    def _turn_ms(self) -> float:
        """Milliseconds of prefill between two decode steps."""
        return self.serving.prefill_ms * min(CROWD, 1 + len(self.waiting))

    def read(self, request: Request, beside: bool) -> tuple[int, Tensor] | None:
        """Continue the prefill whose :meth:`turn` it is.

        Args:
            beside: whether rows decode meanwhile. Without them the turn may be longer.

        Returns:
            After the prefill: its row, and the logits ``[1, vocabulary]`` of its last token. Before: None.
        """
        if request is not self.reading:  # the longer prompt waits between two layers
            match = request.match
            return self.work.overtake(request.ids, match.ids, request.channels, *match.held)
        reading = self.work.reading
        assert reading is not None  # turn() has given a prompt that is being read
        ms = self._turn_ms if beside else 20 * self.serving.prefill_ms
        if not self.work.read(reading.share(ms)):
            return None
        row = self.work.join()
        request.held, self.reading = reading.held, None
        return row, reading.logits

    def has_read(self, request: Request) -> None:
        """End a prompt's turn: if it has overtaken another one, it leaves the queue."""
        if self._overtook:
            self.waiting.remove(request)  # now that other threads find it elsewhere

    def give_up(self) -> None:
        """Drop the prompt in prefill, if there is one."""
        if self.reading is not None:
            self.reading = None
            self.work.give_up()
