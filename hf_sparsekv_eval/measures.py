"""Measurements of a sample, and figures over samples with their intervals: numbers, no files.

Reports and tables need no more than this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class Record:
    """One sample with one cache.

    Args:
        task, length, index: which sample; length in tokens.
        cache: name of the cache.
        values: what was measured.
        output: generated text.
    """

    task: str
    length: int
    index: int
    cache: str
    values: dict[str, float]
    output: str = ""

    @property
    def key(self) -> tuple[str, int, int, str]:
        """The key that identifies the record."""
        return self.task, self.length, self.index, self.cache


@dataclass(frozen=True)
class Measure:
    """A figure over records: ``sum(value) / sum(weight)``.

    Args:
        name: what tables call it.
        value: key of :attr:`Record.values`.
        weight: key of what it is divided by; ``None``: the number of records.
        exponential: e to the power of it (perplexity).
        percent: shown as a percentage.
        beside: name of the measure in whose cells tables of several tasks print it, after a slash.
    """

    name: str
    value: str
    weight: str | None = None
    exponential: bool = False
    percent: bool = False
    beside: str | None = None

    def of(self, sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The figure from sums ``[...]``; NaN where there is nothing to divide by."""
        mean = np.divide(sums, weights, out=np.full(np.shape(sums), np.nan), where=np.asarray(weights) > 0)
        return np.exp(mean) if self.exponential else mean

    def show(self, value: float, digits: int = 1) -> str:
        """As tables print it."""
        return f"{100 * value:.{digits}f}" if self.percent else f"{value:.4g}"


@dataclass(frozen=True)
class Figure:
    """A measure over the samples of a task and length, with its 95 % bootstrap interval."""

    task: str
    length: int
    cache: str
    measure: str
    value: float
    low: float
    high: float
    samples: int


def figures(records: Iterable[Record], measures: Iterable[Measure], seed: int = 0) -> list[Figure]:
    """All measures of all tasks, lengths and caches, in the order of the records; an ``average`` over tasks."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.task, record.length, record.cache), []).append(record)
    out = []
    for measure in measures:
        drawn: dict[tuple[int, str], list[tuple[float, np.ndarray, int]]] = {}
        for (task, length, cache), held in groups.items():
            values = _values(held, measure)
            if values is None:
                continue
            value, resampled = bootstrap(*values, measure, seed)
            drawn.setdefault((length, cache), []).append((value, resampled, len(held)))
            out.append(_figure(task, length, cache, measure.name, value, resampled, len(held)))
        for (length, cache), tasks in drawn.items():
            if len(tasks) > 1:
                value = float(np.mean([v for v, _, _ in tasks]))
                mean = np.mean([r for _, r, _ in tasks], axis=0)  # NaN where a task's draw weighs nothing
                out.append(_figure("average", length, cache, measure.name, value, mean, sum(n for *_, n in tasks)))
    return out


def _values(records: list[Record], measure: Measure) -> tuple[np.ndarray, np.ndarray] | None:
    held = [r for r in records if measure.value in r.values]
    if not held:
        return None
    for record in held:
        if measure.weight and measure.weight not in record.values:
            raise ValueError(
                f"the record {record.key} has {measure.value!r} but no {measure.weight!r}: delete its line in "
                "samples.jsonl"
            )
    values = np.array([r.values[measure.value] for r in held], dtype=float)
    weights = np.array([r.values[measure.weight] if measure.weight else 1.0 for r in held], dtype=float)
    return (values, weights) if weights.any() else None


def bootstrap(values: np.ndarray, weights: np.ndarray, measure: Measure, seed: int = 0) -> tuple[float, np.ndarray]:
    """The figure, and what it is for samples drawn with replacement (``RESAMPLES`` of them)."""
    at = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    value = measure.of(values.sum(), weights.sum())
    return float(value), measure.of(values[at].sum(-1), weights[at].sum(-1))


def _figure(task, length, cache, name, value, resampled, samples) -> Figure:
    low, high = np.nanpercentile(resampled, (2.5, 97.5))  # NaN: a draw that weighs nothing
    return Figure(task, length, cache, name, value, float(low), float(high), samples)
