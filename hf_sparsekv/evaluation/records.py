"""What evaluations give: a line of JSON a sample and cache as it is measured, tables at the end.

A run that was interrupted goes on where it stopped: what ``samples.jsonl`` holds is not measured again.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ..benchmark.results import Row

RESAMPLES = 2000
SAMPLES, SETTINGS = "samples.jsonl", "settings.json"


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
        """What identifies it."""
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
    """

    name: str
    value: str
    weight: str | None = None
    exponential: bool = False
    percent: bool = False

    def of(self, sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The figure from sums ``[...]``."""
        mean = sums / np.maximum(weights, 1e-12)
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


class Results:
    """The records of a run.

    Args:
        out: directory; ``None`` keeps records in memory.
        settings: what the records depend on. A directory with other settings is refused.

    Raises:
        ValueError: ``out`` holds records of another run.
    """

    def __init__(self, out: Path | None, settings: dict) -> None:
        self.out, self.settings = out, json.loads(json.dumps(settings, default=str))
        self.records: dict[tuple, Record] = {}
        self._file = None
        if out is None:
            return
        held = out / SETTINGS
        if held.exists():
            before = json.loads(held.read_text())
            names = sorted({*before, *self.settings})
            other = [name for name in names if before.get(name) != self.settings.get(name)]
            if "task" in other:  # whose options are others
                other = ["task"]
            if other:
                detail = "; ".join(f"then {_spell(n, before)}, now {_spell(n, self.settings)}" for n in other)
                raise ValueError(f"{out} holds results of another run ({detail}): choose another directory with --out")
        if (out / SAMPLES).exists():
            self._load(out / SAMPLES)

    def _load(self, path: Path) -> None:
        whole = path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):  # a line that an interruption cut off
            os.truncate(path, end)
        for line in whole[:end].decode().splitlines():
            record = Record(**json.loads(line))
            self.records[record.key] = record

    def has(self, task: str, length: int, index: int, cache: str) -> bool:
        """This sample has been measured with this cache."""
        return (task, length, index, cache) in self.records

    def add(self, record: Record) -> None:
        """Keep a record, on disk at once."""
        self.records[record.key] = record
        if self.out is not None:
            if self._file is None:  # not before: a run that fails at once leaves no directory behind
                self.out.mkdir(parents=True, exist_ok=True)
                (self.out / SETTINGS).write_text(json.dumps(self.settings, indent=1) + "\n")
                self._file = (self.out / SAMPLES).open("a", encoding="utf-8")
            self._file.write(json.dumps(asdict(record)) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def figures(self, measures: Iterable[Measure], seed: int = 0) -> list[Figure]:
        """All measures of all tasks, lengths and caches, in the order of the records; an ``average`` over tasks."""
        groups: dict[tuple[str, int, str], list[Record]] = {}
        for record in self.records.values():
            groups.setdefault((record.task, record.length, record.cache), []).append(record)
        out = []
        for measure in measures:
            drawn: dict[tuple[int, str], list[tuple[float, np.ndarray, int]]] = {}
            for (task, length, cache), records in groups.items():
                values = _values(records, measure)
                if values is None:
                    continue
                value, resampled = bootstrap(*values, measure, seed)
                drawn.setdefault((length, cache), []).append((value, resampled, len(records)))
                out.append(_figure(task, length, cache, measure.name, value, resampled, len(records)))
            for (length, cache), tasks in drawn.items():
                if len(tasks) > 1:
                    value = float(np.mean([v for v, _, _ in tasks]))
                    mean = np.mean([r for _, r, _ in tasks], axis=0)
                    out.append(_figure("average", length, cache, measure.name, value, mean, sum(n for *_, n in tasks)))
        return out

    def rows(self, measures: Iterable[Measure], case: str) -> list[Row]:
        """The figures as rows of the benchmarks' tables; ``case`` is the model."""
        run = self.settings.get("task")
        out = []
        for measure in measures:
            metric = measure.name.lower().replace("-", "").replace(" ", "_")
            unit = "share" if measure.percent else "nats" if metric == "kl" else ""
            for f in self.figures([measure]):
                variant = ":".join(dict.fromkeys(x for x in (run, f.task, f.cache) if x))
                out.append(Row("accuracy", case, variant, 1, f.length, metric, f.value, f.low, f.high, unit))
        return out

    def write(self, measures: list[Measure], title: str) -> str:
        """Write ``results.json``, ``results.csv`` and ``results.md``; returns the tables as markdown."""
        figures = self.figures(measures)
        text = markdown(figures, measures, title)
        if self.out is not None:
            rows = [asdict(figure) for figure in figures]
            whole = {"settings": self.settings, "figures": rows}
            (self.out / "results.json").write_text(json.dumps(whole, indent=1) + "\n")
            with (self.out / "results.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(Figure.__dataclass_fields__))
                writer.writeheader()
                writer.writerows(rows)
            (self.out / "results.md").write_text(text)
        return text


def _spell(name: str, settings: dict) -> str:
    """A setting as it was written on the command line."""
    value = settings.get(name)
    if name in ("task", "model"):
        return f"{name} {value}"
    option = "--" + {"text": "text-file"}.get(name, name).replace("_", "-")
    if value is None:
        return f"no {option}"
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    return f"{option} {value}"


def _values(records: list[Record], measure: Measure) -> tuple[np.ndarray, np.ndarray] | None:
    held = [r for r in records if measure.value in r.values]
    if not held:
        return None
    values = np.array([r.values[measure.value] for r in held], dtype=float)
    weights = np.array([r.values[measure.weight] if measure.weight else 1.0 for r in held], dtype=float)
    return values, weights


def bootstrap(values: np.ndarray, weights: np.ndarray, measure: Measure, seed: int = 0) -> tuple[float, np.ndarray]:
    """The figure, and what it is for samples drawn with replacement (``RESAMPLES`` of them)."""
    at = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    value = measure.of(values.sum(), weights.sum())
    return float(value), measure.of(values[at].sum(-1), weights[at].sum(-1))


def _figure(task, length, cache, name, value, resampled, samples) -> Figure:
    low, high = np.percentile(resampled, (2.5, 97.5))
    return Figure(task, length, cache, name, value, float(low), float(high), samples)


@dataclass
class _Grid:
    columns: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, row: str, column: str, text: str) -> None:
        if column not in self.columns:
            self.columns.append(column)
        self.rows.setdefault(row, {})[column] = text

    def text(self) -> str:
        lines = ["| | " + " | ".join(self.columns) + " |", "|---|" + "---|" * len(self.columns)]
        for name, cells in self.rows.items():
            lines.append(f"| {name} | " + " | ".join(cells.get(c, "") for c in self.columns) + " |")
        return "\n".join(lines)


def markdown(figures: list[Figure], measures: list[Measure], title: str) -> str:
    """Tables, one a length: a row a cache; a column a task (several tasks) or a measure (one task)."""
    by_name = {measure.name: measure for measure in measures}
    parts = [f"# {title}"]
    for length in sorted({f.length for f in figures}):
        here = [f for f in figures if f.length == length]
        tasks = list(dict.fromkeys(f.task for f in here))
        several = len(tasks) > 1
        parts.append(f"## {length} tokens" if length else "## all lengths")
        grids: dict[str, _Grid] = {}
        for f in here:
            measure = by_name[f.measure]
            if not math.isfinite(f.value):
                continue
            text = measure.show(f.value)
            if f.high > f.low:
                text += f" ({measure.show(f.low)}-{measure.show(f.high)})"
            unit = f"{f.measure}, %" if measure.percent else f.measure
            grids.setdefault(unit if several else "", _Grid()).put(f.cache, f.task if several else unit, text)
        for name, grid in grids.items():
            parts += [f"**{name}**"] if name else []
            parts.append(grid.text())
    parts.append(f"In brackets: 95 % intervals, bootstrap over samples ({RESAMPLES} draws).")
    return "\n\n".join(parts) + "\n"
