"""Times of captured GPU work, and rates of copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPETITIONS = 20  # in one graph
REPLAYS = 25
WARM_UP = 3  # replays that are not counted


@dataclass(frozen=True)
class Time:
    """Median and quartiles in microseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Time:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)

    @property
    def samples(self) -> list[float]:
        """Three samples with this median and these quartiles."""
        return [self.low, self.median, self.high]


def captured(run: Callable[[int], None], sets: int, repetitions: int = REPETITIONS, replays: int = REPLAYS) -> Time:
    """Time of one ``run(i)``: ``repetitions`` of them in one graph, ``i`` going round ``sets`` sets of inputs."""
    stream = torch.cuda.Stream(priority=-1)  # as a captured step has it
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(sets):
            run(i)  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(repetitions):
            run(i % sets)
    for _ in range(WARM_UP):
        graph.replay()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return Time.of([1e3 * start.elapsed_time(end) / repetitions for start, end in pairs])
