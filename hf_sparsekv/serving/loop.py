"""The loop that owns the GPU. In each turn requests join and leave, all rows decode a step, and a prefill goes on.

Four objects decide, and the loop carries it out. :mod:`.intake` has the queue, :mod:`.reading_order` the order of
prefills, :mod:`.room` the rows that decode and their memory, and :mod:`.output` delivers answers.

The host is one step late. A step's tokens go into the next step on the device, and the host reads them while it runs.
So a row may have run one step too many when its answer ends; that token is dropped. The largest number of tokens is
known beforehand, so a row that reaches it leaves with its last step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..telemetry.prompt_stats import PromptStats
from .blocks import Blocks
from .drawn import DrawnTokens
from .ends import Ends
from .failures import clear_frames, described
from .grammar import Grammars
from .in_flight import Request
from .intake import Intake
from .meter import Meter
from .output import Teller
from .reading_order import ReadingOrder
from .request import Logprob
from .room import Room
from .rounds import Rounds
from .stats import Counts
from .work import Work

log = logging.getLogger(__name__)


class Loop:
    """Serves submitted requests until :meth:`stop`.

    Any thread may call the public methods. All others run on the loop's thread, in :meth:`_run`.

    Args:
        work: operations on the model and its rows.
        blocks: limit of the blocks of all requests in the batch and of the prefix cache, together.
        eos: tokens that end an answer.
        vocabulary: logits of a row.
        grammars: of answers that follow one.
    """

    def __init__(self, work: Work, blocks: int, eos: frozenset[int], vocabulary: int, grammars: Grammars) -> None:
        self.work, self.rows, self.ends = work, work.rows, Ends(eos, vocabulary)
        self.counts = Counts()
        before = work.link_bytes()  # moved by trial steps
        self.link = Meter(lambda: work.link_bytes() - before, 0)
        self.prompts: Meter[tuple[PromptStats, ...]] = Meter(work.prompts, ())
        self.intake = Intake(self.counts, work.serving.max_waiting)
        self.blocks = Blocks(work, blocks)
        self.drawn = DrawnTokens(work, vocabulary, grammars, self.ends)
        self.room = Room(work, self.drawn.sampler)
        self.rounds = Rounds(work, self.drawn)
        self.order = ReadingOrder(work, self.intake, self.blocks, self.room)
        self.teller = Teller(self.counts, self.intake.look, self.intake.told)
        self._threads = [
            threading.Thread(target=self._run, name="hf-sparsekv-engine", daemon=True),
            threading.Thread(target=self.teller.run, name="hf-sparsekv-output", daemon=True),
        ]

    # ------------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Start the loop's thread and the output thread."""
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises Closed or Busy as :meth:`.Intake.submit`."""
        self.intake.submit(request, self.order.begins_at_once)

    def stop(self) -> None:
        """Cancel all requests, and wait until both threads have ended."""
        self.intake.close()
        for thread in self._threads:
            thread.join()
        self.work.close()

    def lost(self, error: BaseException) -> None:
        """Fail all requests at once, as the model cannot run any more. The loop's thread may wait for the device."""
        self._fail_open(self.intake.fail(error))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, and the end of every request has been delivered."""
        return self.intake.empty and not (self.order.reading or self.room.running or self.drawn or self.intake.open)

    # ------------------------------------------------------------------ the loop

    @torch.no_grad()
    def _run(self) -> None:
        try:
            device = self.work.device
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                while self._once():
                    pass
        except BaseException as error:  # cached state can no longer be relied on
            self._fail_all(error)
        finally:
            self.teller.stop()

    def _once(self) -> bool:
        """Run one turn. False: the loop is closed."""
        looked = self.intake.take(wait=not self._busy)
        if self.intake.closed:
            self._cancel_all()
            return False
        if looked:
            self._drop_cancelled()
        if self.room.changed or self.room.measured(self.counts.steps):
            self.room.choose()
        self._calibrate()
        self._begin()
        stepped = self._step()
        self._read(beside=stepped)
        self._collect(keep=1 if stepped else 0)
        self.link.count()
        self.prompts.count()
        return True

    @property
    def _busy(self) -> bool:
        return bool(self.room.running or self.room.changed or self.order.reading or self.drawn or self.order.can_begin)

    def _try(self, request: Request, do: Callable[..., None], *args: object) -> None:
        """Do something for one request. An error ends that request, and the others continue."""
        try:
            do(*args)
        except Exception as error:
            if not self.work.alone:
                raise
            if self.order.reading is request:
                self.order.give_up()
            self._drop(request, keep=False)
            self.teller.end(request, error)

    # ------------------------------------------------------------------ prompts

    def _begin(self) -> None:
        request = self.order.begin()
        if request is not None:
            match, told = request.match, request.sampling.prompt_logprobs
            self._try(request, self.work.begin, request.ids, match.ids, request.channels, told, *match.held)

    def _read(self, beside: bool) -> None:
        """Continue the prefill whose turn it is; ``beside``: rows decode meanwhile."""
        request = self.order.turn()
        if request is not None:
            self._try(request, self._read_on, request, beside)
            self.order.has_read(request)

    def _read_on(self, request: Request, beside: bool) -> None:
        reading = self.work.reading
        read = self.order.read(request, beside)
        if read is not None:
            told = None if request.sampling.prompt_logprobs is None or reading is None else reading.told
            if told is not None:
                request.prompt_logprobs = told.told()
            self._join(request, *read)

    def _join(self, request: Request, row: int, logits: Tensor) -> None:
        """Give a request its row after its prefill, and draw its first token."""
        self.room.enter(request, row)
        self.counts.prompt_tokens += len(request.ids)
        self.counts.cached_tokens += request.cached
        self.blocks.keep(request, self.order.reading)
        self.drawn.first(request, logits)
        self._launched(request)

    def _calibrate(self) -> None:
        for request in self.room.to_calibrate():
            self._try(request, self._calibrate_one, request)

    def _calibrate_one(self, request: Request) -> None:
        ids = (request.ids + request.tokens)[: self.rows.calibration_tokens]
        self.work.calibrate(request.row, ids)
        request.provisional = False

    # ------------------------------------------------------------------ steps

    def _step(self) -> bool:
        """Launch a step of all active rows. False: there are none."""
        active = self.room.active()
        if not active:
            return False
        if any(request.exact for request in active.values()):
            drafts = self.rounds.drafts(active, tries=self.order.reading is None)
            if drafts is not None:
                self.rounds.launch(self.room.active, drafts, self._launched)
                self.counts.steps += drafts + 1
                return True
            self.rounds.dense_step(active)
        else:
            self.drawn.step(active)
        for request in active.values():
            self._launched(request)
        self.counts.steps += 1
        return True

    def _launched(self, request: Request) -> None:
        """Count one more token of a request in flight. After its last one the request leaves the batch."""
        request.launched += 1
        if request.launched == request.sampling.max_tokens:
            self._drop(request)

    def _collect(self, keep: int) -> None:
        """Read tokens that the device has written. Wait for all but the last ``keep`` records."""
        round_over = self.rounds.in_flight is not None
        for record in self.drawn.written(0 if round_over else keep):
            now = time.perf_counter()
            if record.marks is not None:
                seconds = 1e-3 * (self.work.clock.between(*record.marks) or 0.0)
                self.counts.step_s += seconds
                if record.took is not None:
                    record.took(seconds)
            (tokens, bad), told = record.host.tolist(), record.told()
            for place, request in record.requests:
                self._heard(request, tokens[place], bad[place], now, told.get(place))
        if round_over:
            heard, seconds = self.rounds.settle()
            self.counts.step_s += seconds
            now = time.perf_counter()
            for one in heard:
                self._heard(one.request, one.token, one.bad, now, one.logprob)

    def _heard(self, request: Request, token: int, bad: int, now: float, logprob: Logprob | None) -> None:
        """Handle a token that the host has read. ``bad``: its logits were NaN or infinite."""
        if request.ended:  # the request ran one step too many
            return
        if bad:
            self._drop(request, keep=False)
            self.blocks.withdraw(request)
            error = RuntimeError("the model's logits are NaN or infinite: no token can be drawn from them")
            self.teller.end(request, error)
            return
        if request.constraint is not None and request.constraint.error is not None:
            self._drop(request)
            self.teller.end(request, request.constraint.error)
            return
        if request.times:
            self.counts.between_s.add(now - request.times[-1])
        else:
            self.counts.ttft_s.add(now - request.arrived)
        request.tokens.append(token)
        request.times.append(now)
        if request.sampling.logprobs is not None and logprob is not None:
            request.logprobs.append(logprob._replace(top=logprob.top[: request.sampling.logprobs]))
        self.counts.generated_tokens += 1
        how = None
        if self.ends.ended_by(token, request.sampling):
            how = "stop"
        elif len(request.tokens) == request.sampling.max_tokens:
            how = "length"
        if how is not None:
            self._drop(request)
            request.ended = True
        self.teller.tell(request, token, how)

    # ------------------------------------------------------------------ going

    def _drop(self, request: Request, keep: bool = True) -> None:
        """Free the resources of a request that needs no more steps. ``keep``: let other prompts share its blocks."""
        if request.over:
            return
        request.over = True
        if request.constraint is not None:
            request.constraint.close()
        if request.row is not None:
            if keep:
                self.blocks.keep(request, self.order.reading)
            self.room.leave(request)
        self.blocks.release(request)

    def _drop_cancelled(self) -> None:
        for request in self.intake.take_cancelled():
            self.teller.end(request, "cancelled")
        reading = self.order.reading
        if reading is not None and reading.handle.cancelled.is_set():
            self._give_up_reading()
            self.teller.end(reading, "cancelled")
        for request in [one for one in self.room.running if one.handle.cancelled.is_set() or one.ended]:
            self._drop(request)
            self.teller.end(request, "cancelled")

    def _give_up_reading(self) -> None:
        """Stop the prefill in progress, if there is one, and free the resources of its request."""
        request = self.order.reading
        if request is not None:
            self.order.give_up()
            self._drop(request)

    def _cancel_all(self) -> None:
        self._give_up_reading()
        self._close_grammars()
        for request in self.intake.open:
            self.teller.end(request, "cancelled")

    def _close_grammars(self) -> None:
        for request in self.room.running:  # others have no process
            if request.constraint is not None:
                request.constraint.close()

    def _fail_all(self, error: BaseException) -> None:
        error = self.intake.fail(error)
        clear_frames(error)
        self.intake.waiting.clear()
        self.drawn.clear()
        self.rounds.in_flight = None
        self._close_grammars()
        self.order.reading, self.room.running = None, []
        # Requests fail first: the calls below may fail too, or wait for a prefill thread that does not return.
        self._fail_open(error)
        try:
            self.work.failed()
        except Exception:
            log.exception("the engine has failed, and cannot tell the other ranks")
        self.work.segments.cancel()

    def _fail_open(self, error: BaseException) -> None:
        for request in self.intake.open:
            told = RuntimeError(f"a decode step has failed, and with it all requests: {described(error)}")
            told.__cause__ = error
            self.teller.end(request, told)
