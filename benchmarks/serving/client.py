"""Plays requests against a system and notes their times.

A system is anything with ``submit(ids, sampling) -> handle`` and ``handle.result(timeout) -> Output``; times are
``time.perf_counter()``. All are counted from a request's arrival in the trace, not from when a busy client or system
took it. A late submission is the system's delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from hf_sparsekv.serving.request import Output
from hf_sparsekv.serving.sampling import Sampling

from ..report import Report
from .trace import Request, request_record

TBT_ITERATIONS = 25  # of a decode iteration: what the 99th percentile of times between tokens may be
MEAN_DELAY = 2.0  # seconds that requests may wait for their first work, on average


class Handle(Protocol):
    """A request that was submitted."""

    def result(self, timeout: float | None = None) -> Output:
        """Wait for it; raises what it failed with, or TimeoutError."""
        ...

    def cancel(self) -> None:
        """It is not wanted any more, if the system can do that."""
        ...


class System(Protocol):
    """A system that answers requests."""

    def submit(self, ids: Sequence[int], sampling: Sampling) -> Handle:
        """Take a request, or raise."""
        ...


class Clock:
    """The time, and waiting for it."""

    now = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


@dataclass(frozen=True)
class Played:
    """The result of a request. Times are seconds from the beginning of the trace, unless stated.

    Args:
        request: as in the trace.
        queued_s: from its arrival until work on it began.
        token_times: of its tokens.
        error: why it has no answer, or None.
    """

    request: Request
    queued_s: float = 0.0
    token_times: tuple[float, ...] = ()
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token."""
        return self.token_times[0] - self.request.arrival

    @property
    def total_s(self) -> float:
        """From its arrival to its last token."""
        return self.token_times[-1] - self.request.arrival

    @property
    def between_s(self) -> list[float]:
        """From each token to the next."""
        return [b - a for a, b in pairwise(self.token_times)]

    def record(self) -> dict:
        """All of it, for a line of JSON."""
        found = {**request_record(self.request), "error": self.error}
        if self.error is None:
            found |= {"queued_s": self.queued_s, "ttft_s": self.ttft_s, "total_s": self.total_s}
            found["token_times"] = [round(time, 6) for time in self.token_times]
        return found


def greedy(tokens: int) -> Sampling:
    """So many tokens, the likeliest each."""
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def play(
    system: System,
    requests: Iterable[Request],
    vocabulary: int,
    timeout: float | None = None,
    clock: type[Clock] | Clock = Clock,
) -> list[Played]:
    """Submit requests as they arrive, and wait for all of them.

    Args:
        vocabulary: of the model.
        timeout: seconds after the last arrival, when missing answers count as failed; None: any.
    """
    ready = [(request, request.ids(vocabulary)) for request in requests]
    begin, submitted = clock.now(), []
    for request, ids in ready:
        wait = begin + request.arrival - clock.now()
        if wait > 0:
            clock.sleep(wait)
        at = clock.now() - begin
        try:
            submitted.append((request, at, system.submit(ids, greedy(request.output_tokens))))
        except Exception as error:  # refused: too many wait, or it fits no system of this size
            submitted.append((request, at, error))
    end = None if timeout is None else clock.now() + timeout
    return [_outcome(*each, begin, end, clock) for each in submitted]


def _outcome(
    request: Request, at: float, handle: Handle | Exception, begin: float, end: float | None, clock: type[Clock] | Clock
) -> Played:
    if isinstance(handle, Exception):
        return Played(request, error=f"{type(handle).__name__}: {handle}")
    try:
        output = handle.result(None if end is None else max(0.0, end - clock.now()))
    except Exception as error:
        if isinstance(error, TimeoutError):
            handle.cancel()
        return Played(request, error=f"{type(error).__name__}: {error}")
    times = tuple(time - begin for time in output.token_times)
    if len(times) != request.output_tokens:
        return Played(request, error=f"{len(times)} tokens instead of {request.output_tokens}")
    return Played(request, at - request.arrival + output.queued_s, times)


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values in proportion; NaN of none."""
    return float(np.quantile(values, share)) if len(values) else float("nan")


def mean(values: Sequence[float]) -> float:
    """NaN of none."""
    return float(np.mean(values)) if len(values) else float("nan")


@dataclass(frozen=True)
class Figures:
    """Figures of all requests of a trace; seconds.

    Args:
        requests, failed: how many; the others have answers, and all else is of these.
        tokens_per_s: generated tokens from the first arrival to the last token, over that time.
        requests_per_s: likewise.
        ttft, between, queued: mean, median and 99th percentile. ``ttft``: time to the first token. ``between``: all
            times between two tokens of a request. ``queued``: time until work on a request began.
    """

    requests: int
    failed: int
    tokens_per_s: float
    requests_per_s: float
    ttft: tuple[float, float, float]
    between: tuple[float, float, float]
    queued: tuple[float, float, float]

    def meets(self, iteration_s: float) -> bool:
        """Whether the service is as SparseServe's section 4.2 asks.

        The 99th percentile of times between tokens is at most 25 decode iterations, and requests wait 2 s on average at
        most. None may fail.
        """
        if self.failed or not self.requests:
            return False
        tbt = self.between[2]
        return self.queued[0] <= MEAN_DELAY and (np.isnan(tbt) or tbt <= TBT_ITERATIONS * iteration_s)


def figures(played: Sequence[Played]) -> Figures:
    """Figures from the times of all requests."""
    done = [one for one in played if one.error is None]
    between = [gap for one in done for gap in one.between_s]
    end = max((one.token_times[-1] for one in done), default=float("nan"))
    lasted = end - min((one.request.arrival for one in played), default=float("nan"))
    tokens = sum(len(one.token_times) for one in done)

    def spread(values: Sequence[float]) -> tuple[float, float, float]:
        return mean(values), quantile(values, 0.5), quantile(values, 0.99)

    return Figures(
        requests=len(played),
        failed=len(played) - len(done),
        tokens_per_s=tokens / lasted if done else 0.0,
        requests_per_s=len(done) / lasted if done else 0.0,
        ttft=spread([one.ttft_s for one in done]),
        between=spread(between),
        queued=spread([one.queued_s for one in done]),
    )


def add_figures(report: Report, found: Figures, queued: bool = True) -> None:
    """As rows; ``queued``: whether the system says when work on a request began."""
    add = report.add
    add("requests", found.requests, "count")
    add("failed", found.failed, "count")
    if found.failed == found.requests:
        return
    add("tokens_per_s", found.tokens_per_s, "1/s")
    add("requests_per_s", found.requests_per_s, "1/s")
    spreads = [("ttft_s", found.ttft, 1, "s"), ("between_ms", found.between, 1e3, "ms")]
    for name, values, scale, unit in spreads + [("queued_s", found.queued, 1, "s")] * queued:
        for kind, value in zip(("mean", "p50", "p99"), values):
            add(f"{name}:{kind}", scale * value, unit)


def goodput(swept: dict[float, Figures], iteration_s: float) -> float:
    """The highest of the rates at which the service meets its limits, and at all lower ones, too; 0 if there is none.

    Args:
        swept: figures by requests a second.
        iteration_s: seconds of a decode iteration.
    """
    best = 0.0
    for rate in sorted(swept):
        if not swept[rate].meets(iteration_s):
            break
        best = rate
    return best


# ---------------------------------------------------------------------- a fixed number of rows


@dataclass(frozen=True)
class Together:
    """Tokens and times of rows while all of them decoded.

    Args:
        seconds: how long that was.
        tokens: of all rows in that time.
        between_s: times between tokens of a row.
        answered: tokens that each row had answered halfway through.
    """

    seconds: float
    tokens: int
    between_s: list[float]
    answered: list[int]


class NotTogether(Exception):
    """The rows never decoded all at a time, or not for long enough."""


def closed_loop(
    system: System,
    requests: Sequence[Request],
    vocabulary: int,
    least: int,
    timeout: float | None = None,
    held: bool = False,
) -> Together:
    """Submit all requests at once; what counts is the time when all of them decode.

    Args:
        requests: the first ones read their prompts first, and need longer answers, because they decode meanwhile.
        least: tokens of each row that have to come in that time.
        held: the system may hold rows back that have begun to answer: some row has to make so many.

    Raises:
        NotTogether: fewer did.
    """
    ready = [(request.ids(vocabulary), greedy(request.output_tokens)) for request in requests]
    handles = [system.submit(ids, sampling) for ids, sampling in ready]
    times = [handle.result(timeout).token_times for handle in handles]
    return together(times, least, held)


def together(times: Sequence[Sequence[float]], least: int, held: bool = False) -> Together:
    """From the latest first token to the earliest last one; see :func:`closed_loop`."""
    begin, end = max(row[0] for row in times), min(row[-1] for row in times)
    inside = [[time for time in row if begin <= time <= end] for row in times]
    few = (max if held else min)(map(len, inside)) - 1
    if few < least:
        raise NotTogether(
            f"all {len(times)} rows decoded together for {max(few, 0)} tokens only, {least} are needed: the system "
            "does not hold so many at a time, or answers are too short (--tokens, --lead)"
        )
    gaps = [b - a for row in inside for a, b in pairwise(row)]
    answered = [sum(2 * time <= begin + end for time in row) for row in times]
    return Together(end - begin, sum(sum(begin < time <= end for time in row) for row in times), gaps, answered)


def fixed_rows(rows: int, context: int, tokens: int, lead: int) -> list[Request]:
    """Requests of a closed loop: prompts of the same length, each answer ``lead`` tokens longer than the next one's."""
    return [Request(0.0, context, tokens + lead * (rows - 1 - row), 7_000_001 + row) for row in range(rows)]


# ---------------------------------------------------------------------- as many as there is room for


@dataclass(frozen=True)
class Saturated:
    """Tokens and times of a system while requests always waited.

    Args:
        seconds: how long that was.
        tokens: generated in it.
        finished: requests that ended in it.
        rows: requests that had begun to answer and had not ended, in the mean over that time.
        between_s: times between tokens of a request.
    """

    seconds: float
    tokens: int
    finished: int
    rows: float
    between_s: list[float]


class RanDry(Exception):
    """At the end no request waited any more."""


def saturate(
    system: System,
    requests: Sequence[Request],
    vocabulary: int,
    warm: float,
    seconds: float,
    timeout: float | None = None,
    clock: type[Clock] | Clock = Clock,
    look: Callable[[], None] = lambda: None,
) -> Saturated:
    """Submit all requests at once; count for a time, ``warm`` seconds later; cancel the rest.

    Args:
        look: called where that time begins and ends.

    Raises:
        RanDry: all had begun to answer by then, so the system was not full all that time.
    """
    ready = [(request.ids(vocabulary), greedy(request.output_tokens)) for request in requests]
    handles = [system.submit(ids, sampling) for ids, sampling in ready]
    clock.sleep(warm)
    begin = clock.now()
    look()
    clock.sleep(seconds)
    end = clock.now()
    look()
    for handle in handles:
        handle.cancel()
    times = [handle.result(timeout).token_times for handle in handles]
    if all(row and row[0] <= end for row in times):
        raise RanDry(
            f"all {len(requests)} requests had begun to answer within {warm + seconds:g} s: give a trace of more"
        )
    lengths = [request.output_tokens for request in requests]
    return within([row for row in times if row], [n for n, row in zip(lengths, times) if row], begin, end)


def within(times: Sequence[Sequence[float]], lengths: Sequence[int], begin: float, end: float) -> Saturated:
    """Tokens in ``(begin, end]``, from the ``times`` of requests' tokens and the number that each was to have."""
    done = [row[-1] if len(row) == n else end for row, n in zip(times, lengths)]
    answering = sum(max(0.0, min(last, end) - max(row[0], begin)) for row, last in zip(times, done))
    gaps = [b - a for row in times for a, b in pairwise(row) if begin < b <= end]
    return Saturated(
        seconds=end - begin,
        tokens=sum(begin < time <= end for row in times for time in row),
        finished=sum(len(row) == n and begin < row[-1] <= end for row, n in zip(times, lengths)),
        rows=answering / (end - begin),
        between_s=gaps,
    )
