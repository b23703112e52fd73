"""A request's settings, what comes of it, and the handle between who asks and the engine.

Nothing here needs torch or knows the engine: the engine, its HTTP server and tests share these types.
"""

from __future__ import annotations

import logging
import math
import reprlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

MAX_STOPS = 4  # as OpenAI's API
MAX_STOP = 1024  # characters of one: each character of an answer is compared, and tables are kept
# Logits are float32 when settings are applied. Within these bounds neither overflows, and a masked token stays masked.
MAX_TEMPERATURE = 100.0
PENALTIES = 0.01, 100.0
DIGITS = 80  # of an integer that an error quotes

log = logging.getLogger(__name__)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


_QUOTED = reprlib.Repr()
_QUOTED.maxstring = _QUOTED.maxother = 80
_QUOTED.maxlevel = 2


def shown(value: object) -> str:
    """A value as an error quotes it: briefly, whatever its size."""
    if isinstance(value, int) and abs(value) >= 10**DIGITS:  # converting it takes quadratic time, or fails
        return f"an integer of more than {DIGITS} digits"
    return _QUOTED.repr(value)


@dataclass(frozen=True)
class Sampling:
    """How one request's tokens are drawn and when they end; names and meaning as vLLM's ``SamplingParams``.

    Attributes:
        max_tokens: of the answer, 1 or more.
        temperature: 0 takes the likeliest token, whatever the other fields say; at most 100.
        top_p: draw from the likeliest tokens that together have this share of the probability, in (0, 1].
        top_k: draw from so many likeliest tokens; 0: from all.
        min_p: leave out tokens less likely than this share of the likeliest's probability, in [0, 1].
        repetition_penalty: above 1 makes tokens of the prompt and the answer so far less likely (CTRL's);
            from 0.01 to 100.
        seed: of this request's draws, a signed 64-bit integer; ``None``: another one each time.
        stop: up to four strings of up to 1,024 characters (one may be given as it is); the text is cut before the first
            that appears.
        ignore_eos: go on behind the end-of-sequence token, up to ``max_tokens``.

    Raises:
        ValueError: a field has another value or type than allowed.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1,
            f"max_tokens must be an integer >= 1, got {shown(self.max_tokens)}",
        )
        _require(
            _is_finite(self.temperature) and self.temperature >= 0,
            f"temperature must be a finite number >= 0 (0: greedy), got {shown(self.temperature)}",
        )
        _require(
            self.temperature <= MAX_TEMPERATURE,
            f"temperature must be at most {MAX_TEMPERATURE:g}, got {shown(self.temperature)}",
        )
        _require(
            _is_finite(self.top_p) and 0 < self.top_p <= 1, f"top_p must be in (0, 1] (1: all), got {shown(self.top_p)}"
        )
        _require(
            _is_int(self.top_k) and self.top_k >= 0, f"top_k must be an integer >= 0 (0: all), got {shown(self.top_k)}"
        )
        _require(
            _is_finite(self.min_p) and 0 <= self.min_p <= 1,
            f"min_p must be in [0, 1] (0: all), got {shown(self.min_p)}",
        )
        _require(
            _is_finite(self.repetition_penalty) and self.repetition_penalty > 0,
            f"repetition_penalty must be a finite number > 0 (1: none), got {shown(self.repetition_penalty)}",
        )
        low, high = PENALTIES
        _require(
            low <= self.repetition_penalty <= high,
            f"repetition_penalty must be from {low:g} to {high:g} (1: none), got {shown(self.repetition_penalty)}",
        )
        _require(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63),
            f"seed must be None or a signed 64-bit integer, got {shown(self.seed)}",
        )
        object.__setattr__(self, "stop", _stops(self.stop))
        _require(isinstance(self.ignore_eos, bool), f"ignore_eos must be True or False, got {shown(self.ignore_eos)}")


def _stops(stop: object) -> tuple[str, ...]:
    """Stop strings as a tuple: one, several, or none."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else None
    _require(
        stops is not None and all(isinstance(one, str) for one in stops), f"stop must be strings, got {shown(stop)}"
    )
    _require(all(stops), "stop must not have an empty string: it would end the answer at once")
    _require(len(stops) <= MAX_STOPS, f"stop may have {MAX_STOPS} strings at most, got {len(stops)}")
    longest = max(map(len, stops), default=0)
    _require(longest <= MAX_STOP, f"stop may have strings of {MAX_STOP} characters at most, got {longest}")
    return stops


class Piece(NamedTuple):
    """What one step, or several, have added to an answer.

    Attributes:
        text: never half a character, and nothing that may still become a stop string: it may be empty, or belong to
            tokens of earlier pieces.
        token_ids: the new tokens.
    """

    text: str
    token_ids: tuple[int, ...]

    def __add__(self, other: Piece) -> Piece:
        """Both as one; a tuple's own ``+`` would give four fields."""
        return Piece(self.text + other.text, self.token_ids + other.token_ids)


@dataclass(frozen=True)
class Output:
    """A finished request.

    Attributes:
        text: of the whole answer, before the stop string if one came; without special tokens.
        token_ids: all that were generated, with the end-of-sequence token and those of a stop string.
        finish_reason: ``"stop"`` (end of sequence, or a stop string), ``"length"`` or ``"cancelled"``.
        prompt_tokens: of the request.
        cached_tokens: of the prompt, found in the prefix cache.
        queued_s: seconds from its arrival to the beginning of its prefill.
        ttft_s: seconds from its arrival to its first token; 0 if there was none.
        total_s: seconds from its arrival to its end.
        token_times: ``time.perf_counter()`` of each token, as the host learned of it.
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


class Busy(RuntimeError):
    """Too many requests wait already; ``retry_after``: seconds until it may be otherwise (an estimate)."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Closed(RuntimeError):
    """The engine takes no requests: it drains, has failed, or is closed."""


Heard = Callable[["Piece | Output | BaseException"], None]


class Handle:
    """One request: who asked reads from it or cancels it, the engine writes to it. Thread-safe.

    The engine calls :meth:`push` for each piece, then :meth:`finish` or :meth:`fail` once. Whoever asked iterates over
    the pieces, or has them told by :meth:`listen`, or waits for the :meth:`result`; memory that is kept for a reader
    who does not come is that of the answer.

    Args:
        id: of the request.
        prompt_tokens: that its prompt has.
        on_cancel: called once, on the thread that cancels, if the request is not done then: wakes the engine.
    """

    def __init__(self, id: str, prompt_tokens: int, on_cancel: Callable[[Handle], None] | None = None) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.cancelled = threading.Event()  # which the engine looks at
        self._on_cancel = on_cancel
        self._lock = threading.Lock()  # of what follows; never held while calling out
        self._changed = threading.Condition(self._lock)
        self._pieces: deque[Piece] = deque()  # that no reader has taken
        self._end: Output | BaseException | None = None
        self._reader: str | None = None
        self._heard: Heard | None = None
        self._telling = False  # a thread is calling the listener
        self._told_end = False

    def __repr__(self) -> str:
        end = self._end
        state = "running" if end is None else end.finish_reason if isinstance(end, Output) else repr(end)
        return f"Handle({self.id!r}, prompt_tokens={self.prompt_tokens}, {state})"

    # Who asked.

    @property
    def done(self) -> bool:
        """It has ended: finished, cancelled or failed."""
        return self._end is not None

    def __iter__(self) -> Iterator[Piece]:
        """The pieces as they come; what has come since the last one is one piece.

        Raises:
            RuntimeError: the request has a reader already.
            BaseException: what the request failed with, behind the last piece.
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
        """Wait for the end.

        Args:
            timeout: seconds; ``None``: for ever.

        Raises:
            TimeoutError: it has not come; the request goes on.
            BaseException: what the request failed with.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._end is not None, timeout):
                raise TimeoutError(f"request {self.id} is not finished after {timeout:g} s")
            end = self._end
        if isinstance(end, BaseException):
            raise end
        return end

    def cancel(self) -> None:
        """Ask the engine to end it at its next step, with ``finish_reason="cancelled"``; at once, from any thread.

        Nothing happens if it is done or cancelled already.
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

        What has come already is told before this returns; the rest on the engine's output thread, one call at a time
        and in order. ``heard`` must return quickly: all requests' text passes that thread. With asyncio it calls
        ``loop.call_soon_threadsafe``. If it raises, the error is logged, the request cancelled, and it hears no more.

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

    # The engine.

    def push(self, piece: Piece) -> None:
        """Add a piece; nothing happens if the request is done."""
        with self._changed:
            if self._end is not None:
                return
            self._pieces.append(piece)
            self._changed.notify_all()
        self._tell()

    def finish(self, output: Output) -> bool:
        """End it; False if it was done already, then nothing happens."""
        return self._finish(output)

    def fail(self, error: BaseException) -> bool:
        """End it with an error; False if it was done already, then nothing happens."""
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
        """Tell the listener what it has not heard; a thread that finds another one telling leaves it to that one."""
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
    return Piece("".join(one.text for one in pieces), tuple(token for one in pieces for token in one.token_ids))
