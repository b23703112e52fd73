"""A request's settings and results, and the handle through which a client and the engine share it.

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
MAX_STOP = 1024  # characters of a stop string: each character of an answer is compared, and tables are kept
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
    """Sampling and stopping of one request. Names and meanings are those of vLLM's ``SamplingParams``.

    Attributes:
        max_tokens: most tokens of the answer, 1 or more.
        temperature: from 0 to 100. 0 is greedy: it takes the likeliest token and ignores the other fields.
        top_p: draw from the likeliest tokens that together have this share of the probability, in (0, 1].
        top_k: draw from this many likeliest tokens. 0: from all.
        min_p: drop tokens whose probability is below this share of the likeliest one's, in [0, 1].
        repetition_penalty: CTRL's penalty, from 0.01 to 100. Above 1, tokens of the prompt and of the answer so far
            become less likely.
        seed: seed of this request's draws, a signed 64-bit integer. ``None``: a new one for each request.
        stop: up to four strings of up to 1,024 characters; a single string is allowed. The text ends before the first
            one that appears.
        ignore_eos: continue after the end-of-sequence token, up to ``max_tokens``.

    Raises:
        ValueError: a field has a value or type that is not allowed.
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
    """New text and tokens of an answer, from one or more steps.

    Attributes:
        text: whole characters only, without text that may still become a stop string. So it may be empty, or belong to
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
        text: the whole answer without special tokens, up to the stop string if one appeared.
        token_ids: all generated tokens, including the end-of-sequence token and those of a stop string.
        finish_reason: ``"stop"`` (end of sequence, or a stop string), ``"length"`` or ``"cancelled"``.
        prompt_tokens: tokens of the prompt.
        cached_tokens: tokens of the prompt that were in the prefix cache.
        queued_s: seconds from arrival to the start of prefill.
        ttft_s: seconds from arrival to the first token; 0 if there was none.
        total_s: seconds from arrival to the end.
        token_times: ``time.perf_counter()`` when the host received each token.
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
    """Too many requests wait already. ``retry_after`` estimates the seconds until a retry may succeed."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


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
    return Piece("".join(one.text for one in pieces), tuple(token for one in pieces for token in one.token_ids))
