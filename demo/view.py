"""What a race has shown so far, as numbers for a page, a table or a file."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from hf_sparsekv import BlockMap, CacheStats

from .race import Ended, Event, Reading, Started, Stepped, Waiting


@dataclass
class LaneView:
    """One pane.

    Args:
        ids: new tokens; ``seconds``: that each took, the first one included.
        latest: statistics of the last steps that were looked at; ``totals``: of the whole answer.
    """

    name: str = ""
    ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    latest: CacheStats | None = None
    totals: CacheStats | None = None
    blocks: BlockMap | None = None
    memory: dict[str, int] | None = None
    ended: Ended | None = None

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds of each token after the first."""
        return [1e3 * s for s in self.seconds[1:]]

    @property
    def median_ms(self) -> float | None:
        steps = self.step_ms
        return statistics.median(steps) if steps else None

    @property
    def stats(self) -> CacheStats | None:
        """The newest statistics: of the whole answer when it has ended."""
        return self.totals or self.latest


@dataclass
class RaceView:
    """Both panes and what is common to them; :meth:`add` every event.

    Args:
        read_s: seconds that reading the document took; None while it lasts, or if it was read before.
        reading: ``(done, total)`` tokens of the document.
        others: other tabs that run.
    """

    lanes: tuple[LaneView, LaneView] = field(default_factory=lambda: (LaneView(), LaneView()))
    read_s: float | None = None
    reading: tuple[int, int] | None = None
    reused: bool = False
    others: int = 0

    def add(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, Reading):
            self.reading, self.read_s = (event.done, event.total), event.seconds
            self.reused = event.seconds is None
        elif isinstance(event, Waiting):
            self.others = max(0, event.others)
        else:
            self._lane(self.lanes[event.lane], event)

    @staticmethod
    def _lane(lane: LaneView, event: Started | Stepped | Ended) -> None:
        if isinstance(event, Started):
            lane.name = event.name
        elif isinstance(event, Ended):
            lane.ended, lane.totals = event, event.totals
        else:
            report = event.report
            lane.ids += report.tokens
            lane.seconds.append(report.seconds)
            lane.latest = report.stats or lane.latest
            lane.blocks = report.blocks or lane.blocks
            lane.memory = event.memory or lane.memory

    @property
    def decoding(self) -> bool:
        """The document is read, and a lane has not ended."""
        return any(lane.name and lane.ended is None for lane in self.lanes)

    @property
    def ended(self) -> bool:
        return all(lane.ended is not None for lane in self.lanes)

    def ttft_s(self, lane: LaneView) -> float | None:
        """Seconds to the first token: reading the document (unless it was read before) and the question."""
        return None if not lane.seconds else lane.seconds[0] + (self.read_s or 0.0)

    def verdict(self, on_gpu: bool) -> str | None:
        """One sentence: which was quicker, and why, if it was not the sparse one."""
        dense, sparse = self.lanes
        if not dense.median_ms or not sparse.median_ms or min(len(dense.ids), len(sparse.ids)) < 8:
            return None
        ratio = dense.median_ms / sparse.median_ms
        if sparse.stats is None:
            return f"Both panes are full attention; their medians are {abs(1 - ratio):.0%} apart. So much is noise."
        if ratio >= 1.02:
            return (
                f"The sparse cache takes {sparse.median_ms:.1f} ms a token, full attention {ratio:.2f} times as long."
            )
        slower = f"{1 / ratio:.2f} times as long as full attention" if ratio <= 0.98 else "as long as full attention"
        return f"Here the sparse cache takes {slower}. {self._why(sparse.stats, on_gpu)}"

    @staticmethod
    def _why(stats: CacheStats, on_gpu: bool) -> str:
        if stats.crossover_calls:
            return (
                "At this length reading everything is as quick as choosing, so most of its steps read everything "
                "(dense_below): a longer context shows the difference."
            )
        if stats.attended_share > 0.9:
            return (
                f"It attends to {stats.attended_share:.0%} of the context, so there is little to save: lower the "
                "budget, or take a longer context."
            )
        if on_gpu:
            return (
                "Choosing what to read takes a fixed time; so short a context is read in less. It pays with longer "
                "contexts, larger batches, or keys and values that do not fit the GPU."
            )
        return (
            f"It reads {stats.attended_share:.0%} of the context, but without a GPU its operators run as plain torch, "
            "made to be right and not fast, and a context of this length is read quickly. On a GPU: see the README."
        )
