"""Results of a race so far, as numbers for a page, a table or a file."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from hf_sparsekv import BlockMap, CacheStats

from .race import Ended, Event, Reading, Started, Stepped, Waiting

MISSED = (
    "Full attention does not find the hidden fact here: that is the model's limit, not the cache's. Take another "
    "depth, a shorter context, or a larger model."
)

ON_HOST = "Its keys and values are in host memory, those of full attention on the GPU."


@dataclass
class LaneView:
    """One pane.

    Args:
        ids: new tokens; ``seconds``: that each took, the first one included.
        latest: statistics of the last steps that were looked at; ``totals``: of the whole answer.
        answer: its text so far; ``after``: text decoded after its end, for the clocks.
    """

    name: str = ""
    ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    latest: CacheStats | None = None
    totals: CacheStats | None = None
    blocks: BlockMap | None = None
    memory: dict[str, int] | None = None
    ended: Ended | None = None
    answer: str = ""
    after: str = ""

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
class Asked:
    """A question of the chat, and what its answer took.

    Args:
        first_s: seconds from the question to the first token of its answer, reading the document included.
        read_s: of them, seconds of reading the document; None if it was not read for this question.
    """

    question: str
    answer: str = ""
    first_s: float | None = None
    read_s: float | None = None
    median_ms: float | None = None
    share: float | None = None


@dataclass
class RaceView:
    """Both panes and what is common to them; :meth:`add` every event.

    Args:
        read_s: seconds that reading the document took; None while it lasts, or if it was read before.
        reading: ``(done, total)`` tokens of the document.
        others: other tabs that run.
        question: what is asked; ``wanted``: what the answer must contain, if a fact is hidden.
        rows: sequences that decode together.
        on_gpu: where it runs, or ran.
        recorded: in words what was recorded where and when; None of a race that runs here.
    """

    lanes: tuple[LaneView, LaneView] = field(default_factory=lambda: (LaneView(), LaneView()))
    read_s: float | None = None
    reading: tuple[int, int] | None = None
    reused: bool = False
    others: int = 0
    question: str = ""
    wanted: str | None = None
    rows: int = 1
    on_gpu: bool = False
    recorded: str | None = None

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
            lane.blocks = event.blocks or lane.blocks
        else:
            report = event.report
            lane.ids.append(report.tokens[0])
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

    def found(self, lane: LaneView) -> bool | None:
        """The answer holds the hidden fact. None: nothing is hidden, or the answer may still come to it."""
        if self.wanted is None or not lane.ids:
            return None
        if self.wanted in lane.answer:
            return True
        return False if lane.after or lane.ended is not None else None

    @property
    def model_missed(self) -> bool:
        """Full attention itself has not found the hidden fact: what a cache finds says little then."""
        return self.found(self.lanes[0]) is False

    @property
    def same_answer(self) -> bool | None:
        """Both say the same, as far as both have come. None: they say nothing, as models of random weights do."""
        texts = [lane.answer for lane in self.lanes]
        if not all(texts):
            return None
        whole = [bool(lane.after) or lane.ended is not None for lane in self.lanes]
        if all(whole):
            return texts[0] == texts[1]
        short, long = sorted(texts, key=len)
        return long.startswith(short)

    def verdict(self) -> tuple[str, str] | None:
        """A headline, and the sentence below it: on a GPU the time per token, on a CPU what was read.

        Returns:
            None while either lane has fewer than 8 tokens.
        """
        dense, sparse = self.lanes
        if not dense.median_ms or not sparse.median_ms or min(len(dense.ids), len(sparse.ids)) < 8:
            return None
        ratio = dense.median_ms / sparse.median_ms
        if sparse.stats is None:
            apart = f"Their medians are {abs(1 - ratio):.0%} apart. So much is noise."
            return "Both panes are full attention", apart
        stats, steps = sparse.stats, max(1, sparse.stats.decode_steps)
        reads = f"Reads {_percent(stats.attended_share)} of the context{self._answers()}"
        taken = (stats.kv_bytes_read + stats.index_bytes_read) / steps
        amount = f"{size(taken)} of KV cache a token instead of {size(stats.kv_bytes_dense / steps)}"
        if ratio >= 1.02:
            factor = f"{_times(ratio)} faster"
        else:
            factor = "as fast" if ratio > 0.98 else f"{_times(1 / ratio)} slower here"
        on_host = self.on_gpu and sparse.memory and dense.memory and sparse.memory["host"] > 0
        why = "" if ratio >= 1.02 else " " + (ON_HOST if on_host else self._why(stats))
        why += " " + MISSED if self.model_missed else ""
        if self.on_gpu:
            times = f"{sparse.median_ms:.1f} ms a token, full attention {dense.median_ms:.1f} ms"
            gain = f"{factor[0].upper()}{factor[1:]}"
            if on_host and ratio < 1.02:
                saved = dense.memory["device"] - sparse.memory["device"]
                gain, times = f"Frees {size(saved)} of the GPU", f"{times} ({factor})"
            headline = f"{gain}, {reads[0].lower()}{reads[1:]}"
            return headline, f"{times}: {amount}.{why}"
        times = f"Time: {sparse.median_ms:.0f} ms a token, full attention {dense.median_ms:.0f} ms ({factor})."
        return reads, f"{amount[0].upper()}{amount[1:]}, index included. {times}{why}"

    def _answers(self) -> str:
        same = self.same_answer
        if same is None:
            return ""
        ended = all(bool(lane.after) or lane.ended is not None for lane in self.lanes)
        if same and ended:
            return ", same answer: both find the hidden fact" if self.found(self.lanes[0]) else ", same answer"
        if same:
            return ", same answer so far"
        if all(self.found(lane) for lane in self.lanes):
            return ", both find the hidden fact"
        if ended and self.model_missed:
            return ", the model itself misses the hidden fact"
        return ", another answer"

    def _why(self, stats: CacheStats) -> str:
        """Why the sparse lane was not faster."""
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
        if self.on_gpu:
            return (
                "Choosing what to read takes a fixed time; so short a context is read in less. It pays with longer "
                "contexts, larger batches, or keys and values that do not fit the GPU."
            )
        return (
            "On a CPU, choosing what to read from so short a context can take longer than reading all of it: less is "
            "read, and no time is gained."
        )


def _times(ratio: float) -> str:
    """A factor for a headline."""
    return f"{ratio:.1f}x" if ratio >= 1.1 else f"{ratio:.2f}x"


def _percent(share: float) -> str:
    """A share for a headline: no decimals unless they are all there is."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def size(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit != "MB" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"
