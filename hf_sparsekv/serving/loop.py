"""The loop that owns the GPU: joins and leaves, a decode step of all rows, a piece of a prompt, again.

The host is one step behind. A step's tokens go into the next one on the device; what they were, whether one was the
last, is read while the next step runs. So a row may have run one step too many when it ends: that token is dropped.
How many tokens a request may have is known beforehand, and its row leaves with its last step.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..row_batch import WorkingSets, width
from ..telemetry.working_set import STEPS
from .admission import Candidate, admit, room_for
from .prefill import Reading
from .prefix import Channels, Match, PrefixIndex
from .request import Busy, Closed, Handle, Output, Piece, Sampling
from .sampler import Sampler
from .stats import SampleCounter
from .text import Detokenizer, TextStream
from .work import Work

SETS_EVERY = STEPS  # steps from one count to the next, which takes the host 0.4 to 0.6 ms (rows.csv)
# Prompts that wait have the one before them read by so many times prefill_ms at most. Each turn costs a step, for which
# the weights are read anew: with 20 ms of a prompt beside 8 of a step prompts take 1.4 times as long as alone, with 80
# ms 1.1 times. vLLM has 2,048 tokens of prompts in each of its steps, some 80 ms.
CROWD = 4
SOON = 4  # tokens: the host knows of a row's tokens some steps late
LINK_S = 1.0  # bytes over the link are counted no more often: the host waits for the device, then reads from each layer
IDLE_S = 0.5  # looked around at least so often, for what nobody tells
TIMES = tuple(2.0**k for k in range(-10, 11))  # seconds, a millisecond to 17 minutes: bounds of the histograms

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Request:
    """One request on its way through the engine."""

    handle: Handle
    ids: list[int]
    sampling: Sampling
    arrived: float
    blocks: int  # that prompt and longest answer take, without those of `match` and those that the index keeps
    keys: list[bytes] = field(default_factory=list)  # of the prompt's blocks, as the index knows them
    match: Match = field(default_factory=Match)
    known: tuple[int, int, int] = (-1, 0, 0)  # what the index knew of it when, see PrefixIndex.known
    channels: Channels | None = None
    text: TextStream | None = None
    order: int = 0
    row: int | None = None
    reading: Reading | None = None
    launched: int = 0  # tokens of the answer that steps were launched for
    over: bool = False  # the loop gives it no more steps
    ended: bool = False  # its end is on its way to who asked
    begun: float = 0.0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)  # of the answer, with when the host learned of each
    times: list[float] = field(default_factory=list)
    told: int = 0  # of these, by the output thread, with this text
    shown: list[str] = field(default_factory=list)
    candidate: Candidate = field(default_factory=Candidate)
    need: int = 0  # its working set, as counted; 0: not known yet
    provisional: bool = False  # its label channels are those of a prompt that was too short to calibrate on
    roomier: int = 0  # `launched` when it got more room for copies, which fills up in the steps behind that


@dataclass
class Record:
    """Tokens that the device writes, and whose they are: read when it has."""

    requests: list[tuple[int, Request]]  # place among the tokens
    host: Tensor  # [2, n]
    event: torch.cuda.Event | None
    marks: tuple | None = None  # of the clock: the step's beginning and end


@dataclass
class Counts:
    """What :class:`.stats.EngineStats` counts."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0


class Loop:
    """Decodes what is submitted, until it is told to stop.

    Args:
        work: on the model and its rows.
        blocks: that all requests in the batch may take together, and what is kept of those that have ended.
        eos: tokens that end an answer.
        detokenizer: None: answers have no text.
        vocabulary: logits of a row.
    """

    def __init__(
        self,
        work: Work,
        blocks: int,
        eos: frozenset[int],
        detokenizer: Detokenizer | None,
        vocabulary: int,
    ) -> None:
        self.work, self.rows, self.serving, self.blocks, self.eos = work, work.rows, work.serving, blocks, eos
        self.detokenizer = detokenizer
        self.device, self.tokens = work.device, work.tokens
        self.sampler = Sampler(self.rows.max_rows, vocabulary, self.device)
        serving, size = self.serving, self.rows.cache.row_table.block_size
        alike = self.rows.alike_tokens
        self.index = PrefixIndex(work, size, alike) if serving.prefix_cache and alike is not None else None
        self.counts = Counts()
        self.queue_s, self.ttft_s, self.between_s, self.total_s = (SampleCounter(TIMES) for _ in range(4))
        self.failed: BaseException | None = None
        self._order = itertools.count()
        self._open: dict[int, Request] = {}  # whose end has not been told
        self._wake = threading.Condition()
        self._inbox: deque[Request] = deque()  # guarded by _wake, like what follows
        self._draining = self._stopping = False
        self.waiting: deque[Request] = deque()
        self.reading: Request | None = None
        self._overtook = False  # the last turn was a short prompt's
        self.running: list[Request] = []  # rows of the batch, in the order of their arrival
        self._interval, self._last = 0.0, 0.0  # seconds from one prompt's beginning to the next one's, while some wait
        self.used = 0  # blocks that are spoken for, beside those of the index
        self._dirty = False  # somebody has come, gone, or is to be looked at anew
        self._records: deque[Record] = deque()
        self._sets: tuple[WorkingSets, list[tuple[int, Request]]] | None = None  # being counted
        self._next_sets = 0
        self._link_before = work.link_bytes()  # that trials have moved
        self._link_counted, self._link_asked, self._next_link = 0, False, 0.0
        self._news: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name="hf-sparsekv-engine", daemon=True),
            threading.Thread(target=self._tell, name="hf-sparsekv-output", daemon=True),
        ]

    # ------------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    @property
    def queued(self) -> int:
        """Requests that have not begun."""
        return len(self._inbox) + len(self.waiting)

    def link_bytes(self) -> int:
        """Bytes of keys and values that have crossed the link, when that was last counted; has it counted again."""
        self._link_asked = True
        return self._link_counted

    def wait_s(self) -> float:
        """Seconds that a request which comes now may wait: those before it, as quickly as the last ones began."""
        return self.queued * self._interval

    def submit(self, request: Request) -> None:
        """Take a request.

        Raises:
            Closed: no more are taken.
            Busy: as many wait as may.
        """
        with self._wake:
            if self.failed is not None:
                raise Closed(f"the engine takes no requests: it has failed ({_named(self.failed)})")
            if self._stopping or self._draining:
                raise Closed(f"the engine takes no requests: it {'is closed' if self._stopping else 'drains'}")
            waiting, most = self.queued, self.serving.max_waiting
            if waiting >= most and not (most == 0 and self._begins_at_once(request)):
                told = "no request may wait, and this one cannot start at once"
                if most:
                    told = f"{waiting} requests wait already, which is as many as may"
                raise Busy(told, self.wait_s())
            request.order = next(self._order)
            self._open[request.order] = request
            self._inbox.append(request)
            self.counts.requests += 1
            self._wake.notify()

    def _begins_at_once(self, request: Request) -> bool:
        """Nothing is before it, and a row and memory are free: nothing takes these but a prompt, or a row held back."""
        return not self.queued and self.reading is None and self._has_room(request)

    def drain(self) -> None:
        """Take no more requests."""
        with self._wake:
            self._draining = True

    def look(self, *_: object) -> None:
        """Something has been cancelled: look at it."""
        with self._wake:
            self._dirty = True
            self._wake.notify()

    def stop(self) -> None:
        """End the threads; what runs is cancelled."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        for thread in self._threads:
            thread.join()
        self.work.close()

    def lost(self, error: BaseException) -> None:
        """The model can run no more, whatever the loop's thread is waiting for: no request is served from here on."""
        with self._wake:
            if self.failed is None:
                self.failed = error
            self._inbox.clear()
            self._wake.notify()
        self._fail_open(error)

    @property
    def idle(self) -> bool:
        """There is nothing to do."""
        with self._wake:
            return not (self._inbox or self.waiting or self.reading or self.running or self._records)

    @property
    def all_told(self) -> bool:
        """Whoever asked has heard the end."""
        return not self._open

    # ------------------------------------------------------------------ the loop

    @torch.no_grad()
    def _run(self) -> None:
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                while self._once():
                    pass
        except BaseException as error:  # nothing that is cached can be relied on
            self._fail_all(error)
        finally:
            self._news.put(None)

    def _once(self) -> bool:
        """One turn; False: it is over."""
        with self._wake:
            if not (self._inbox or self._dirty or self._busy or self._stopping):
                self._wake.wait(IDLE_S)
            arrived, self._inbox = self._inbox, deque()
            dirty, self._dirty = self._dirty, False
            if self.failed is not None:
                raise self.failed
            self.waiting.extend(arrived)
            if self._stopping:
                self._cancel_all()
                return False
        if dirty:
            self._drop_cancelled()
        if dirty or self._measured():
            self._choose()
        self._calibrate()
        self._begin_reading()
        stepped = self._step()
        self._read(beside=stepped)
        self._collect(keep=1 if stepped else 0)
        if self._link_asked and time.monotonic() >= self._next_link:
            self._link_asked, self._next_link = False, time.monotonic() + LINK_S
            self._link_counted = self.work.link_bytes() - self._link_before
        return True

    @property
    def _busy(self) -> bool:
        return bool(self.running or self.reading or self._records or (self.waiting and self._can_begin))

    # ------------------------------------------------------------------ coming

    @property
    def _can_begin(self) -> bool:
        return self.reading is None and self._has_room(self.waiting[0])

    def _has_room(self, request: Request, passes: Sequence[Request] = ()) -> bool:
        """There is a place and memory for it; and then for those that it ``passes``, too."""
        there = len(self.rows.rows) + len(passes)
        # While rows are held back no prompt takes the last place: they have to get out of the way of those that decode.
        held = len(self.rows.rows) > len(self.rows.active)
        places = self.rows.max_rows - (held or (bool(passes) and self._by_need))  # some may be by then
        return there < places and self._fits(request, sum(one.blocks for one in passes if one is not self.reading))

    def _fits(self, request: Request, others: int = 0) -> bool:
        """There is memory for it, and for ``others`` blocks, if the index lets go what nobody uses."""
        used = self.used + others
        if self.index is None:
            return used + request.blocks <= self.blocks
        if request.known[0] != self.index.changes:
            request.known = self.index.changes, *self.index.known(request.keys)
        _, found, unused = request.known
        return used + request.blocks - found + self.index.pinned + unused <= self.blocks

    def _begin_reading(self) -> None:
        if not self.waiting or not self._can_begin:
            return
        self.reading = request = self.waiting[0]  # before it leaves the queue: other threads find it here or there
        self.waiting.popleft()
        self._book(request)
        since = request.begun - max(self._last, request.arrived)
        self._interval, self._last = since if not self._interval else 0.7 * self._interval + 0.3 * since, request.begun
        try:
            self.work.begin(request.ids, request.match.ids, request.channels)
            request.reading = self.work.reading
        except Exception as error:  # no memory for it: this one is lost
            if not self.work.alone:
                raise
            self.reading = None
            self._drop(request)
            self._end(request, error)

    def _book(self, request: Request) -> None:
        """Work on it begins: its memory is spoken for, and what it shares with others is its own, too."""
        if self.index is not None:
            request.match = self.index.match(request.keys)
            request.blocks -= len(request.match.blocks)
            over = self.used + request.blocks + len(self.index) - self.blocks
            if over > 0:
                self.index.evict(over)
        self.used += request.blocks
        request.begun = time.perf_counter()
        self.queue_s.add(request.begun - request.arrived)
        if request.match.blocks:
            request.channels = request.match.blocks[0].channels
            request.cached = len(request.match.blocks) * self.rows.cache.config.block_size

    def _next_short(self) -> Request | None:
        """The first prompt that may overtake the one that is being read, and those that wait before it.

        It is read at once, and takes no longer than the turn of reading that it has instead. Every other turn is that
        of the longer one, and all that it passes find their places and memory all the same.
        """
        if not self.waiting or self._overtook or not math.isfinite(self.serving.prefill_ms):
            return None
        most = min(self.work.pace.tokens_in(self._turn_ms, 0), self.serving.chunk, self.reading.reading.left - 1)
        size, passes = self.rows.cache.config.block_size, [self.reading]
        for request in self.waiting:
            fits = len(request.ids) <= most and self._has_room(request, passes)
            # A single token that is not known yet would be a decode step, for which a graph is captured.
            if fits and len(request.ids) > 1 + size * request.known[1]:
                return request
            passes.append(request)
        return None

    @property
    def _turn_ms(self) -> float:
        """Of a prompt between two decode steps."""
        return self.serving.prefill_ms * min(CROWD, 1 + len(self.waiting))

    def _overtake(self, request: Request) -> None:
        """Read a short prompt while a longer one waits between two layers."""
        self._overtook = True
        self._book(request)
        try:
            row, logits = self.work.overtake(request.ids, request.match.ids, request.channels)
            self._joined(request, row, logits)
        except Exception as error:
            if not self.work.alone:
                raise
            self._drop(request, keep=False)
            self._end(request, error)
        self.waiting.remove(request)  # now that other threads find it elsewhere

    def _keep(self, request: Request) -> None:
        """The index keeps a row's full blocks, which stay at least as long as the row."""
        if self.index is None or request.provisional:  # who goes on from them would choose by its channels
            return
        if (reading := self.reading) is not None and reading is not request:
            # What the prompt that is being read brings, too, is kept with that one's channels: behind others all that
            # is further on in it would be lost.
            first = len(reading.match.blocks)
            if len(reading.keys) > first and request.keys[: first + 1] == reading.keys[: first + 1]:
                return
        if request.channels is None:
            request.channels = self.work.channels(request.row)
        ids, known = self.rows.blocks(request.row), request.ids + request.tokens
        n = min(len(ids), len(known) // self.rows.cache.config.block_size)
        if n > len(request.keys):
            request.keys += self.index.keys(known, n, request.keys)
        new = self.index.keep(request.keys[:n], ids[:n], request.channels, request.match)
        request.blocks -= new  # which the index has from here on
        self.used -= new

    def _read(self, beside: bool) -> None:
        """Read on; without rows that wait for it there is no need to stop soon."""
        request = self.reading
        if request is None:
            return
        if (short := self._next_short()) is not None:
            self._overtake(short)
            return
        self._overtook = False
        try:
            ms = self._turn_ms if beside else 20 * self.serving.prefill_ms
            if self.work.read(request.reading.share(ms)):
                self._join(request)
        except Exception as error:  # this one is lost, the others know nothing of it
            if not self.work.alone:
                raise
            if self.reading is request:
                self._give_up_reading()
            else:  # it has a row already
                self._drop(request, keep=False)
            self._end(request, error)

    def _join(self, request: Request) -> None:
        reading, row = request.reading, self.work.join()
        request.reading = self.reading = None
        self._joined(request, row, reading.logits)

    def _joined(self, request: Request, row: int, logits: Tensor) -> None:
        """It has a row, which gets room as soon as it is to decode, and its first token."""
        request.row = row
        bisect.insort(self.running, request, key=lambda one: one.order)  # in the order of arrival
        if not self.serving.working_set:
            self._even_room(row)
        self._dirty = True
        self.counts.prompt_tokens += len(request.ids)
        self.counts.cached_tokens += request.cached
        request.provisional = not request.cached and len(request.ids) < self.rows.calibration_tokens
        self._keep(request)
        self.sampler.set(row, request.sampling, request.ids)
        self.sampler(logits, [row])
        self.tokens[row : row + 1].copy_(self.sampler.last[0])
        self.work.tokens_are_there()
        self._record(self.sampler.last, [(0, request)])
        self._launched(request)

    def _calibrate(self) -> None:
        """Rows of short prompts get the channels of prompt and answer, before any token of theirs is left out.

        Or, where fewer tokens than that are chosen, as soon as there are enough to calibrate on.

        As late as that: it costs a pass over these tokens, for which all rows wait, and few answers become so long.
        """
        tokens = self.rows.calibration_tokens
        for request in [one for one in self.running if one.provisional and one.candidate.runs]:
            if len(request.ids) + len(request.tokens) < max(tokens, self.rows.whole_tokens - SOON):
                continue
            try:
                self.work.calibrate(request.row, (request.ids + request.tokens)[:tokens])
                request.provisional = False
            except Exception as error:
                if not self.work.alone:
                    raise
                self._drop(request, keep=False)
                self._end(request, error)

    def _launched(self, request: Request) -> None:
        """One more token of it is on its way."""
        request.launched += 1
        if request.launched == request.sampling.max_tokens:
            self._drop(request)

    # ------------------------------------------------------------------ going

    def _drop(self, request: Request, keep: bool = True) -> None:
        """It needs no more steps: what it holds is free. ``keep``: its full blocks are good for others."""
        if request.over:
            return
        request.over = True
        if request.row is not None:
            if keep:
                self._keep(request)
            self.work.leave(request.row)
            self.sampler.clear(request.row)
            self.running.remove(request)
            request.row = None
        self.used -= request.blocks
        if self.index is not None:
            self.index.release(request.match)
        self._dirty = True

    def _drop_cancelled(self) -> None:
        for request in [one for one in self.waiting if one.handle.cancelled.is_set()]:
            self.waiting.remove(request)
            self._end(request, "cancelled")
        if (request := self.reading) is not None and request.handle.cancelled.is_set():
            self._give_up_reading()
            self._end(request, "cancelled")
        for request in [one for one in self.running if one.handle.cancelled.is_set() or one.ended]:
            self._drop(request)
            self._end(request, "cancelled")

    def _end(self, request: Request, how: str | BaseException) -> None:
        """Its end is told behind what was told before. Again: nothing happens."""
        if not request.ended:
            request.ended = True
            if isinstance(how, BaseException):
                _clear_frames(how)
            self._news.put((request, [], how))

    def _give_up_reading(self) -> None:
        """The prompt that is being read is not wanted any more."""
        request, self.reading = self.reading, None
        if request is not None:
            request.reading = None
            self.work.give_up()
            self._drop(request)

    def _cancel_all(self) -> None:
        self._give_up_reading()
        for request in list(self._open.values()):
            self._end(request, "cancelled")

    def _fail_all(self, error: BaseException) -> None:
        with self._wake:
            self.failed = error = self.failed or error
            self._inbox.clear()
        _clear_frames(error)
        self.waiting.clear()
        self._records.clear()
        self.reading, self.running = None, []
        # Before what follows, which may fail as well, or wait for a prompt that does not come back.
        self._fail_open(error)
        try:
            self.work.failed()
        except Exception:
            log.exception("the engine has failed, and cannot tell the other ranks")
        self.work.segments.cancel()

    def _fail_open(self, error: BaseException) -> None:
        for request in list(self._open.values()):
            told = RuntimeError(f"a decode step has failed, and with it all requests: {_named(error)}")
            told.__cause__ = error
            self._end(request, told)

    # ------------------------------------------------------------------ steps

    def _choose(self) -> None:
        """Who decodes from here on, with how much room for copies, and in which rows."""
        rows = self.rows
        if self._by_need:
            for request in self.running:
                request.candidate.need = self._needed(request)
            runs = admit([request.candidate for request in self.running], rows.slots)
        else:
            runs = [True] * len(self.running)
        for request, goes in zip(self.running, runs):
            request.candidate.runs = goes
            if goes != (request.row in rows.active):
                self.work.resume(request.row) if goes else self.work.hold(request.row)
        if self._by_need:
            self._share_room()
        self._close_up()

    @property
    def _by_need(self) -> bool:
        """Chosen tokens have copies on the device, whose memory is shared out by the working sets of the rows."""
        return bool(self.rows.slots) and self.serving.working_set

    def _needed(self, request: Request) -> int:
        """Room for copies that it should have to decode."""
        tokens = len(request.ids) + len(request.tokens)
        return room_for(request.need, tokens) or self.rows.expected_working_set(tokens)

    def _even_room(self, row: int) -> None:
        """As much for each row as for any other, whatever it needs."""
        if self.rows.slots:
            self.work.give(row, min(self.rows.slots // self.rows.max_rows, self.rows.free_slots))

    def _share_room(self) -> None:
        """Rows that decode get room for what they need and an equal share of what is left over; the others get none.

        No row has room for more tokens than its request may come to have. The oldest one decodes even where it needs
        more than there is: it gets what is there.
        """
        size = self.rows.cache.config.block_size
        decoding = [request for request in self.running if request.candidate.runs]
        needed = sum(request.candidate.need for request in decoding)
        spare = max(0, self.rows.slots - needed) // max(1, len(decoding))
        wanted = {request.row: 0 for request in self.running}
        for request in decoding:
            most = len(request.ids) + request.sampling.max_tokens
            # Whole blocks: room is given by them, and rounded up all rows together would want more than there is.
            wanted[request.row] = min(request.candidate.need + spare, most) // size * size
        had = {row: self.rows.room(row) for row in wanted}
        more = {row: wanted[row] - had[row] for row in wanted}
        # A quarter more or less is not worth the copies, as long as nobody lacks it: a row that has just begun would
        # otherwise find next to nothing free, and read what it chooses over the link until the others' needs change.
        grow = sorted((row for row in more if more[row] > had[row] // 4), key=more.get)
        lacking = sum(more[row] for row in grow) - self.rows.free_slots
        for row in sorted((row for row in more if more[row] < 0), key=more.get):
            if lacking > 0 or -more[row] > had[row] // 4:
                self.work.give(row, wanted[row])
                lacking += more[row]
        mine = {request.row: request for request in self.running}
        for row in grow:
            self.work.give(row, min(wanted[row], had[row] + self.rows.free_slots))
            if self.rows.room(row) > had[row]:
                mine[row].roomier = mine[row].launched

    def _measured(self) -> bool:
        """Every few steps the rows' working sets are counted; True: what they need has changed."""
        if not self._by_need:
            return False
        if self._sets is None:
            if self.running and self.counts.steps >= self._next_sets:
                self._next_sets = self.counts.steps + SETS_EVERY
                known = [one for one in self.running if one.candidate.runs and one.launched - one.roomier >= STEPS]
                self._sets = self.rows.working_sets(), [(one.row, one) for one in known]
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

    def _close_up(self) -> None:
        """Rows that decode move to the front, if a step of fewer rows then serves them; who is in their way, behind."""
        rows, active = self.rows, self.rows.active
        if not active or (fewer := width(len(active), rows.max_rows)) >= rows.width:
            return
        there, mine = set(rows.rows), {request.row: request for request in self.running}
        holes = [row for row in range(fewer) if row not in there]
        waiting = [row for row in range(fewer) if row in there and row not in active]
        aside = next((row for row in range(fewer, rows.max_rows) if row not in there), None)
        if aside is None and not holes:
            return  # there is no place that those in the way could take

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
            aside = row  # where nobody is any more

    def _step(self) -> bool:
        """Launch a step of all active rows; False: there is none."""
        active = {request.row: request for request in self.running if request.candidate.runs}
        if not active:
            return False
        began = self.work.clock.mark()
        logits = self.work.step()
        n = len(logits)
        drawn = self.sampler(logits, [row if row in active else -1 for row in range(n)])
        valid = self.rows.valid(self.device)
        if valid is None:
            self.tokens[:n].copy_(drawn)
        else:
            torch.where(valid[:n, 0], drawn, self.tokens[:n], out=self.tokens[:n])
        self.work.tokens_are_there()
        self._record(self.sampler.last, list(active.items()), (began, self.work.clock.mark()))
        for request in active.values():
            self._launched(request)
        self.counts.steps += 1
        return True

    def _record(self, last: Tensor, requests: list[tuple[int, Request]], marks: tuple | None = None) -> None:
        """Read ``last [2, n]`` once the device has written it."""
        event = None
        if last.is_cuda:
            host = torch.empty(last.shape, dtype=last.dtype, pin_memory=True)
            host.copy_(last, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            host = last.clone()
        self._records.append(Record(requests, host, event, marks))

    def _collect(self, keep: int) -> None:
        """Look at what the device has written, up to the last ``keep`` records; at these too, if they are there."""
        while self._records:
            record = self._records[0]
            if record.event is not None and not record.event.query():
                if len(self._records) <= keep:
                    return
                record.event.synchronize()
            elif record.event is None and len(self._records) <= keep:
                return
            self._records.popleft()
            now = time.perf_counter()
            if record.marks is not None:
                self.counts.step_s += 1e-3 * (self.work.clock.between(*record.marks) or 0.0)
            tokens, bad = record.host.tolist()
            for place, request in record.requests:
                self._heard(request, tokens[place], bad[place], now)

    def _heard(self, request: Request, token: int, bad: int, now: float) -> None:
        if request.ended:  # a step too many
            return
        if bad:
            self._drop(request, keep=False)
            if self.index is not None:  # who begins with these blocks would perhaps fail alike
                self.index.withdraw(request.keys)
            self._end(request, RuntimeError("the model's logits are NaN or infinite: no token can be drawn from them"))
            return
        if request.times:
            self.between_s.add(now - request.times[-1])
        else:
            self.ttft_s.add(now - request.arrived)
        request.tokens.append(token)
        request.times.append(now)
        self.counts.generated_tokens += 1
        how = None
        if token in self.eos and not request.sampling.ignore_eos:
            how = "stop"
        elif len(request.tokens) == request.sampling.max_tokens:
            how = "length"
        if how is not None:
            self._drop(request)
            request.ended = True
        self._news.put((request, [token], how))

    # ------------------------------------------------------------------ telling

    def _tell(self) -> None:
        """What the output thread does: text, pieces, ends."""
        while (news := self._news.get()) is not None:
            request, tokens, how = news
            try:
                self._tell_one(request, tokens, how)
            except BaseException as error:  # tokenizers panics with what is no Exception
                _clear_frames(error)
                request.ended = True
                self.look()  # it needs no more steps
                self._finish(request, error)

    def _tell_one(self, request: Request, tokens: list[int], how: str | BaseException | None) -> None:
        if request.handle.done:
            return
        shown = ""
        if request.text is not None and not isinstance(how, BaseException):
            for token in tokens:
                shown += request.text.push(token)
            if request.text.stopped:
                how = "stop"
                if not request.ended:
                    request.ended = True
                    self.look()
            elif how is not None:
                shown += request.text.end()
            request.shown.append(shown)
        request.told += len(tokens)
        if shown or tokens:
            request.handle.push(Piece(shown, tuple(tokens)))
        if how is not None:
            self._finish(request, how)

    def _finish(self, request: Request, how: str | BaseException) -> None:
        now = time.perf_counter()
        self.total_s.add(now - request.arrived)
        try:
            self._answer(request, how, now)
        finally:
            self._open.pop(request.order, None)

    def _answer(self, request: Request, how: str | BaseException, now: float) -> None:
        """Counted first: whoever hears the end finds it counted."""
        if request.handle.done:
            return
        if isinstance(how, BaseException):
            self.counts.failed += 1
            request.handle.fail(how)
            return
        n = request.told
        output = Output(
            text="".join(request.shown),
            token_ids=tuple(request.tokens[:n]),
            finish_reason=how,
            prompt_tokens=len(request.ids),
            cached_tokens=request.cached,
            queued_s=max(request.begun - request.arrived, 0.0),
            ttft_s=request.times[0] - request.arrived if request.times else 0.0,
            total_s=now - request.arrived,
            token_times=tuple(request.times[:n]),
        )
        if how == "cancelled":
            self.counts.cancelled += 1
        else:
            self.counts.finished += 1
        request.handle.finish(output)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _clear_frames(error: BaseException) -> None:
    """Nothing is kept of the variables where it came from: they hold activations of a chunk, caches and their blocks.

    The traceback itself stays, lines and all. Frames that still run keep theirs.
    """
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__]
