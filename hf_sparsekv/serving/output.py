"""Delivers text, pieces and ends of answers to their handles, on a thread of its own.

The loop's thread owns the GPU. Detokenising and listeners never delay a step.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from .failures import clear_frames
from .in_flight import Request
from .request import Output, Piece
from .stats import Counts


class Teller:
    """Delivers the progress of requests to their handles, in order.

    Any thread may call :meth:`tell`, :meth:`end` and :meth:`stop`. All else runs on the output thread, in :meth:`run`.

    Args:
        counts: the engine's counters; it counts the ends of requests.
        look: called when a request needs no more steps and the loop does not know it yet.
        told: called when a request's end has been delivered.
    """

    def __init__(self, counts: Counts, look: Callable[[], None], told: Callable[[Request], None]) -> None:
        self.counts = counts
        self._look, self._told = look, told
        self._news: queue.SimpleQueue = queue.SimpleQueue()

    def tell(self, request: Request, token: int, how: str | None) -> None:
        """Queue a token for delivery. ``how``: the finish reason, if the request ended with this token."""
        self._news.put((request, [token], how))

    def end(self, request: Request, how: str | BaseException) -> None:
        """Queue the end of a request. A second call does nothing."""
        if not request.ended:
            request.ended = True
            if isinstance(how, BaseException):
                clear_frames(how)
            self._news.put((request, [], how))

    def stop(self) -> None:
        """Let :meth:`run` return after all queued news."""
        self._news.put(None)

    def run(self) -> None:
        """Deliver text, pieces and ends, until :meth:`stop`."""
        while (news := self._news.get()) is not None:
            request, tokens, how = news
            try:
                self._tell_one(request, tokens, how)
            except BaseException as error:  # a panic of tokenizers is not an Exception
                clear_frames(error)
                request.ended = True
                self._look()
                self._finish(request, error)

    def _tell_one(self, request: Request, tokens: list[int], how: str | BaseException | None) -> None:
        if request.handle.done:
            return
        shown = ""
        if request.text is not None and not isinstance(how, BaseException):
            for token in tokens:
                if token not in request.sampling.stop_token_ids:
                    shown += request.text.push(token)
            if request.text.stopped:
                how = "stop"
                if not request.ended:
                    request.ended = True
                    self._look()
            elif how is not None:
                shown += request.text.end()
            if shown:
                request.shown.append(shown)
        request.told += len(tokens)
        if shown or tokens:
            first = request.told - len(tokens)
            request.handle.push(Piece(shown, tuple(tokens), tuple(request.logprobs[first : request.told])))
        if how is not None:
            self._finish(request, how)

    def _finish(self, request: Request, how: str | BaseException) -> None:
        now = time.perf_counter()
        self.counts.total_s.add(now - request.arrived)
        try:
            self._answer(request, how, now)
        finally:
            self._told(request)

    def _answer(self, request: Request, how: str | BaseException, now: float) -> None:
        """End the handle. The counters come first, so that a listener finds the end counted."""
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
            logprobs=tuple(request.logprobs[:n]),
            stopped_by=None if request.text is None else request.text.stopped_by,
            prompt_logprobs=tuple(request.prompt_logprobs),
        )
        if how == "cancelled":
            self.counts.cancelled += 1
        else:
            self.counts.finished += 1
        request.handle.finish(output)
