"""Time and statistics of each decode step, while ``generate()`` runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from .prompt_stats import PromptStats
from .stats import CacheStats
from .timing import TokenTimer
from .watch import BlockMap


@dataclass(frozen=True)
class StepReport:
    """One new token of every row.

    Args:
        index: 0 for the token from the prompt's forward pass, then the decode steps in order.
        tokens: the new ids, one a row.
        seconds: time of the token, without the time of reports and streamers. For token 0 it counts from the creation
            or start of the monitor, prefill included.
        stats: statistics of the steps since the last report that had them. None where they were not requested
            (``every``), for token 0, and for transformers' own caches.
        blocks: blocks that this step attended to; None unless requested.
        prompts: with token 0, what the cache's sparse prompts have covered, per layer. Empty where they were exact, and
            without statistics (``every=0``).
    """

    index: int
    tokens: tuple[int, ...]
    seconds: float
    stats: CacheStats | None = None
    blocks: BlockMap | None = None
    prompts: tuple[PromptStats, ...] = ()


@runtime_checkable
class Reporting(Protocol):
    """Interface that a monitor needs of a cache: every sparse cache has it, transformers' own do not."""

    def stats(self) -> CacheStats: ...

    def watch_blocks(self, on: bool = True) -> None: ...

    def chosen_blocks(self) -> BlockMap | None: ...


class StepMonitor(TokenTimer):
    """A streamer that reports every decode step: its time, and at intervals the statistics of the cache.

        def show(report):
            print(report.index, f"{1e3 * report.seconds:.1f} ms", report.stats or "")

        model.generate(**inputs, past_key_values=cache, streamer=StepMonitor(cache, show, every=8))

    Reading counters waits for the GPU and takes milliseconds. Token times exclude this, but the whole call takes
    longer; ``every`` limits it. The loop waits for each token, which costs a third of a millisecond; without a monitor
    an optimised model does not wait (docs/generating.md). Raising in ``on_step`` ends ``generate()`` and leaves the
    cache usable. ``generate()`` accepts no streamer with beam search.

    Args:
        cache: the cache passed to ``generate()``. For transformers' own caches only times are reported.
        on_step: called with a :class:`StepReport` for every token.
        every: number of tokens between statistics; 0 for none.
        interval: least number of seconds between statistics, in addition to ``every``.
        blocks: include the chosen blocks whenever there are statistics; turns ``cache.watch_blocks()`` on.
        streamer: also receives the prompt and the tokens, for example a ``TextIteratorStreamer``.
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
        prompts = self.cache.stats().prompts if not index and self.cache is not None and self.every else ()
        if index and self.cache is not None and self._before is not None and self._due(index):
            now = self.cache.stats()
            stats, self._before = now.since(self._before), now
            blocks = self.cache.chosen_blocks() if self.blocks else None
            self._looked = self._clock()
        self.on_step(StepReport(index, tuple(value.flatten().tolist()), seconds, stats, blocks, prompts))

    def _due(self, index: int) -> bool:
        return index % self.every == 0 and self._clock() - self._looked >= self.interval
