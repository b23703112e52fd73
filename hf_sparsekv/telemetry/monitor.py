"""What each decode step took and did, while ``generate()`` runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from .stats import CacheStats
from .timing import TokenTimer
from .watch import BlockMap


@dataclass(frozen=True)
class StepReport:
    """One new token of every row.

    Args:
        index: 0 for the token that the prompt's forward pass gave, then the decode steps' in order.
        tokens: the new ids, one a row.
        seconds: that it took, without the time that reports and streamers take; of token 0 since the monitor was made
            or started, prefill included.
        stats: of the steps since the last report that had them; None where they were not asked for (``every``), for
            token 0, and for caches of transformers' own.
        blocks: which blocks this step attended to; None where it was not asked for.
    """

    index: int
    tokens: tuple[int, ...]
    seconds: float
    stats: CacheStats | None = None
    blocks: BlockMap | None = None


@runtime_checkable
class Reporting(Protocol):
    """What a monitor asks of a cache: every sparse cache answers, transformers' own do not."""

    def stats(self) -> CacheStats: ...

    def watch_blocks(self, on: bool = True) -> None: ...

    def chosen_blocks(self) -> BlockMap | None: ...


class StepMonitor(TokenTimer):
    """A streamer that reports every decode step: its time, and from time to time what the cache did.

        def show(report):
            print(report.index, f"{1e3 * report.seconds:.1f} ms", report.stats or "")

        model.generate(**inputs, past_key_values=cache, streamer=StepMonitor(cache, show, every=8))

    Looking at counters waits for the GPU and takes milliseconds, which is left out of the times of tokens but makes the
    whole call longer: hence ``every``. The loop waits for each token, which it otherwise does not in an optimised model
    (docs/generating.md): a third of a millisecond. Raising in ``on_step`` ends ``generate()`` and leaves the cache
    usable. ``generate()`` takes no streamer with beam search.

    Args:
        cache: the one that ``generate()`` is given; of one that is not ours only times are reported.
        on_step: called with a :class:`StepReport` for every token.
        every: statistics with every so many tokens; 0 never.
        interval: statistics at most every so many seconds, beside ``every``.
        blocks: also which blocks were chosen, whenever there are statistics; turns ``cache.watch_blocks()`` on.
        streamer: receives what this one receives, for example a ``TextIteratorStreamer``.
        clock: for tests.
    """

    waits = True

    def __init__(
        self,
        cache: Cache,
        on_step: Callable[[StepReport], None],
        every: int = 1,
        interval: float = 0.0,
        blocks: bool = False,
        streamer: BaseStreamer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every < 0 or interval < 0:
            raise ValueError(f"every and interval must not be negative, got {every} and {interval}")
        self.cache = cache if isinstance(cache, Reporting) else None
        self.on_step, self.every, self.interval, self.blocks = on_step, every, interval, blocks
        if blocks and self.cache is not None:
            self.cache.watch_blocks()
        super().__init__(streamer, clock)

    def start(self) -> None:
        """Forget all times and start the clock; ``generate()`` is about to be called."""
        super().start()
        self._index, self._looked = 0, float("-inf")
        self._before: CacheStats | None = None

    def _pass_on(self, value: Tensor) -> None:
        super()._pass_on(value)
        if not self._prompt_seen:
            if self.cache is not None and self.every:
                self._before = self.cache.stats()
            return
        index, self._index = self._index, self.tokens
        seconds = self.steps_s[-1] if self.steps_s else self.first_s or 0.0
        stats = blocks = None
        if index and self.cache is not None and self._before is not None and self._due(index):
            now = self.cache.stats()
            stats, self._before = now.since(self._before), now
            blocks = self.cache.chosen_blocks() if self.blocks else None
            self._looked = self._clock()
        self.on_step(StepReport(index, tuple(value.flatten().tolist()), seconds, stats, blocks))

    def _due(self, index: int) -> bool:
        return index % self.every == 0 and self._clock() - self._looked >= self.interval
