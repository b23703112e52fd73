"""A request's results, and the handle through which a client and the engine share it.

Nothing here needs torch or knows the engine: the engine, its HTTP server and tests share these types.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

log = logging.getLogger(__name__)


class Logprob(NamedTuple):
    """Log probabilities of the model in one place of an answer.

    Attributes:
        token_id: the token there.
        logprob: its log probability.
        top: the likeliest tokens with theirs, by falling probability: as many as :class:`.Sampling` asks for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Piece(NamedTuple):
    """New text and tokens of an answer, from one or more steps.

    Attributes:
        text: whole characters only, without text that may still become a stop string. So it may be empty, or belong to
            tokens of earlier pieces.
        token_ids: the new tokens.
        logprobs: theirs, if they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()

    def __add__(self, other: Piece) -> Piece:
        """Both as one; a tuple's own ``+`` would give six fields."""
        return Piece(self.text + other.text, self.token_ids + other.token_ids, self.logprobs + other.logprobs)


@dataclass(frozen=True)
class Output:
    """A finished request.

    Attributes:
        text: the whole answer without special and end tokens, up to the stop string if one appeared.
        token_ids: all generated tokens, including the end-of-sequence token and those of a stop string.
        finish_reason: ``"stop"`` (end of sequence, or a stop string), ``"length"`` or ``"cancelled"``.
        prompt_tokens: tokens of the prompt.
        cached_tokens: tokens of the prompt that were in the prefix cache.
        queued_s: seconds from arrival to the start of prefill.
        ttft_s: seconds from arrival to the first token; 0 if there was none.
        total_s: seconds from arrival to the end.
        token_times: ``time.perf_counter()`` when the host received each token.
        logprobs: of the tokens, if they were asked for.
        stopped_by: the stop string that has ended it. ``None``: none has.
        prompt_logprobs: of the prompt's tokens but the first, if they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int = 0
    queued_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    token_times: tuple[float, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    stopped_by: str | None = None
    prompt_logprobs: tuple[Logprob, ...] = ()


class TooLong(ValueError):
    """A prompt and its answer do not fit the context: ``tokens`` of the prompt, ``answer``, and ``most`` of both."""

    def __init__(self, message: str, tokens: int, answer: int, most: int) -> None:
        super().__init__(message)
        self.tokens, self.answer, self.most = tokens, answer, most


class Busy(RuntimeError):
    """Too many requests wait already. ``retry_after`` estimates the seconds until a retry may succeed."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotFollowed(ValueError):
    """An answer has come to a place where its schema or grammar takes more work than a step may have."""


class Closed(RuntimeError):
    """The engine takes no requests: it drains, has failed, or is closed."""


Heard = Callable[["Piece | Output | BaseException"], None]


class Handle:
    """One submitted request: the client reads or cancels it, the engine writes to it. Thread-safe.

    The engine calls :meth:`push` for each piece, then :meth:`finish` or :meth:`fail` once. The client iterates over the
    pieces, registers a callback with :meth:`listen`, or waits for the :meth:`result`. If the client never reads, the
    handle holds no more memory than the answer.

    Args:
        id: the request's id.
        prompt_tokens: tokens of its prompt.
        on_cancel: called once on the thread that cancels, unless the request is done by that time. It wakes the engine.
    """

    def __init__(self, id: str, prompt_tokens: int, on_cancel: Callable[[Handle], None] | None = None) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.cancelled = threading.Event()  # checked by the engine
        self._on_cancel = on_cancel
        self._lock = threading.Lock()  # guards the attributes below; never held during callbacks
        self._changed = threading.Condition(self._lock)
        self._pieces: deque[Piece] = deque()  # not read yet
        self._end: Output | BaseException | None = None
        self._reader: str | None = None
        self._heard: Heard | None = None
        self._telling = False  # a thread is calling the listener
        self._told_end = False

    def __repr__(self) -> str:
        end = self._end
        state = "running" if end is None else end.finish_reason if isinstance(end, Output) else repr(end)
        return f"Handle({self.id!r}, prompt_tokens={self.prompt_tokens}, {state})"

    # For the client.

    @property
    def done(self) -> bool:
        """Whether it has finished, failed or been cancelled."""
        return self._end is not None

    def __iter__(self) -> Iterator[Piece]:
        """Yield pieces as they arrive. Pieces that arrived since the last one are merged.

        Raises:
            RuntimeError: the request has a reader already.
            BaseException: the request's error, after the last piece.
        """
        self._claim("an iteration")
        return self._iterate()

    def _iterate(self) -> Iterator[Piece]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._end is not None)
                pieces, end = list(self._pieces), self._end
                self._pieces.clear()
            if pieces:
                yield merged(pieces)
            elif isinstance(end, BaseException):
                raise end
            else:
                return

    def result(self, timeout: float | None = None) -> Output:
        """Wait until the request ends, and return its output.

        Args:
            timeout: seconds to wait. ``None``: no limit.

        Raises:
            TimeoutError: the request has not ended; it continues.
            BaseException: the request's error.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._end is not None, timeout):
                raise TimeoutError(f"request {self.id} is not finished after {timeout:g} s")
            end = self._end
        if isinstance(end, BaseException):
            raise end
        return end

    def cancel(self) -> None:
        """Ask the engine to end the request at its next step, with ``finish_reason="cancelled"``.

        It returns at once, on any thread. It does nothing if the request is done or cancelled already.
        """
        with self._lock:
            if self._end is not None or self.cancelled.is_set():
                return
            self.cancelled.set()
            call = self._on_cancel
        if call is not None:
            call(self)

    def listen(self, heard: Heard) -> None:
        """Call ``heard`` with each piece, then once with the :class:`Output` or the error.

        Pieces that have arrived already are delivered before this returns. The rest follow in order on the engine's
        output thread, one call at a time. ``heard`` must return quickly, because that thread serves all requests. With
        asyncio, let it call ``loop.call_soon_threadsafe``. If it raises, the error is logged, the request is cancelled,
        and it is not called again.

        Raises:
            RuntimeError: the request has a reader already.
        """
        self._claim("a listener")
        with self._lock:
            self._heard = heard
        self._tell()

    def _claim(self, reader: str) -> None:
        with self._lock:
            if self._reader is not None:
                raise RuntimeError(f"request {self.id} has {self._reader} already: its pieces can be read once")
            self._reader = reader

    # For the engine.

    def push(self, piece: Piece) -> None:
        """Add a piece; nothing happens if the request is done."""
        with self._changed:
            if self._end is not None:
                return
            self._pieces.append(piece)
            self._changed.notify_all()
        self._tell()

    def finish(self, output: Output) -> bool:
        """End the request. Returns False, and does nothing, if it was done already."""
        return self._finish(output)

    def fail(self, error: BaseException) -> bool:
        """End the request with an error. Returns False, and does nothing, if it was done already."""
        return self._finish(error)

    def _finish(self, end: Output | BaseException) -> bool:
        with self._changed:
            if self._end is not None:
                return False
            self._end = end
            self._on_cancel = None  # may hold the engine
            self._changed.notify_all()
        self._tell()
        return True

    def _tell(self) -> None:
        """Call the listener with all news. If another thread is doing that, leave it to that thread."""
        with self._lock:
            if self._heard is None or self._telling:
                return
            self._telling = True
        while True:
            with self._lock:
                heard, news = self._heard, None
                if heard is not None and self._pieces:
                    news = self._pieces.popleft()
                elif heard is not None and self._end is not None and not self._told_end:
                    news, self._told_end = self._end, True
                if news is None:
                    self._telling = False
                    return
            try:
                heard(news)
            except Exception:
                log.exception("the listener of request %s has failed; the request is cancelled", self.id)
                with self._lock:
                    self._heard, self._telling = None, False
                    self._pieces.clear()
                self.cancel()
                return


def merged(pieces: Iterable[Piece]) -> Piece:
    """Several pieces as one."""
    pieces = list(pieces)
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        "".join(one.text for one in pieces),
        tuple(token for one in pieces for token in one.token_ids),
        tuple(logprob for one in pieces for logprob in one.logprobs),
    )
