"""Statistics of an engine: a snapshot, and histograms of times.

The server's metrics, Ray's replicas and benchmarks read only these.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..telemetry.prompt_stats import PromptStats

TIMES = tuple(2.0**k for k in range(-10, 11))  # seconds, a millisecond to 17 minutes: bounds of the histograms


@dataclass(frozen=True)
class Samples:
    """The data of a Prometheus histogram.

    Attributes:
        bounds: upper bounds of the buckets, ascending, without infinity.
        counts: samples in each bucket alone, not accumulated; one more than bounds, the last one above all of them.
        sum: of all samples.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float = 0.0

    def __post_init__(self) -> None:
        finite = all(math.isfinite(bound) for bound in self.bounds)
        if not finite or list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"bounds must be finite and ascending, got {self.bounds}")
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError(f"counts must be one more than the {len(self.bounds)} bounds, got {len(self.counts)}")

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(self.counts)


class SampleCounter:
    """Counts samples into buckets; thread-safe.

    Args:
        bounds: as in :class:`Samples`.
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()
        self.samples()  # the bounds are checked

    def add(self, value: float) -> None:
        """Count one sample; a sample that equals a bound is in that bound's bucket."""
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._sum += value

    def samples(self) -> Samples:
        """All so far."""
        with self._lock:
            return Samples(self._bounds, tuple(self._counts), self._sum)


def _times() -> SampleCounter:
    return SampleCounter(TIMES)


@dataclass
class Counts:
    """Counters of an engine for :class:`EngineStats`, from its start.

    The loop's thread counts. Threads that submit count ``requests``, one at a time; the output thread counts ends.
    """

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    step_s: float = 0.0
    queue_s: SampleCounter = field(default_factory=_times)
    ttft_s: SampleCounter = field(default_factory=_times)
    between_s: SampleCounter = field(default_factory=_times)
    total_s: SampleCounter = field(default_factory=_times)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of an engine: counts since its start, except where it says "now".

    Attributes:
        running: rows that decode, now.
        waiting: requests that have not begun, now.
        held: rows that are held back because their working set does not fit, now.
        prefilling: requests in prefill, now.
        requests: accepted requests.
        finished: requests that finished.
        cancelled: requests that were cancelled.
        failed: requests that ended with an error.
        refused: requests that were not accepted, by reason: ``"waiting"``, ``"wait_s"``, ``"grammars"``, ``"closed"``.
        prompt_tokens: tokens of prompts, after their prefill.
        generated_tokens: tokens of all answers.
        cached_tokens: tokens of prompts that were in the prefix cache.
        steps: decode steps.
        step_s: seconds in decode steps.
        prefill_s: seconds in prefill.
        drafted: drafts of exact requests; accepted: those that full attention chose too.
        captures: captured graphs, including those at the start.
        device_tokens: slots for copies of tokens on the device, now (offloaded).
        device_tokens_used: slots that rows have, now.
        host_bytes: bytes of keys and values in host memory, now.
        host_limit: most bytes of keys and values in host memory; ``None``: no limit.
        link_bytes: bytes of keys and values between host and device, in both directions: copied, or read in host memory
            (offloaded). It covers this process, and is the last count. Reading it makes the loop count again, at most
            once a second.
        queue_s: seconds from arrival to prefill.
        ttft_s: seconds from arrival to the first token.
        between_s: seconds between two tokens of a request.
        total_s: seconds from arrival to the end.
        prompts: what sparse prompts attended to and covered, per layer, of requests whose prompts have been read.
            Empty without any. As ``link_bytes``, it is the last count.
    """

    running: int
    waiting: int
    held: int
    prefilling: int
    requests: int
    finished: int
    cancelled: int
    failed: int
    refused: Mapping[str, int]
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    steps: int
    step_s: float
    prefill_s: float
    drafted: int
    accepted: int
    captures: int
    device_tokens: int
    device_tokens_used: int
    host_bytes: int
    host_limit: int | None
    link_bytes: int
    queue_s: Samples
    ttft_s: Samples
    between_s: Samples
    total_s: Samples
    prompts: tuple[PromptStats, ...] = ()
