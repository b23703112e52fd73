"""Differences of caches from full attention on the same prompts, and how many prompts it takes to see one point.

Figures are of one cache each. Pairs leave out how hard a prompt is, so their error is smaller than the intervals of two
figures suggest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .measures import Measure, Record

POINT = 0.01


@dataclass(frozen=True)
class Difference:
    """A cache's mean difference from full attention over the samples that both have.

    Args:
        task: or ``"average"``: the mean over tasks.
        value: of the cache minus full attention's; a score of 1 is 100 points.
        error: standard error of ``value``, within each task.
        samples: of all tasks.
        needed: samples of all tasks at which one point is two standard errors; ``None``: no sample differs, or all
            differ alike, so that nothing is known.
    """

    task: str
    length: int
    cache: str
    measure: str
    value: float
    error: float
    samples: int
    needed: int | None


def differences(records: Iterable[Record], measures: Iterable[Measure], base: str) -> list[Difference]:
    """The differences of each task with two samples or more, and of their average, for all caches but ``base``.

    Args:
        measures: without weights.
        base: name of the cache that the others are compared with.
    """
    held = list(records)
    out = []
    for measure in measures:
        mine = {r.key: r.values[measure.value] for r in held if measure.value in r.values}
        groups: dict[tuple[int, str], dict[str, list[float]]] = {}
        for (task, length, index, cache), value in mine.items():
            whole = mine.get((task, length, index, base))
            if cache != base and whole is not None:
                groups.setdefault((length, cache), {}).setdefault(task, []).append(value - whole)
        for (length, cache), tasks in groups.items():
            enough = {task: np.array(pairs) for task, pairs in tasks.items() if len(pairs) > 1}
            for task, pairs in enough.items():
                out.append(_difference(task, length, cache, measure, [pairs]))
            if len(enough) > 1:
                out.append(_difference("average", length, cache, measure, list(enough.values())))
    return out


def _difference(task: str, length: int, cache: str, measure: Measure, tasks: list[np.ndarray]) -> Difference:
    value = float(np.mean([pairs.mean() for pairs in tasks]))
    variances = [float(pairs.var(ddof=1)) for pairs in tasks]
    count = len(tasks)
    error = math.sqrt(sum(v / len(pairs) for v, pairs in zip(variances, tasks))) / count
    # With as many samples of each task as of the others, n of all: error**2 = sum(variances) / (count * n).
    needed = math.ceil(4 * sum(variances) / count / POINT**2) if error > 1e-12 else None
    return Difference(task, length, cache, measure.name, value, error, sum(map(len, tasks)), needed)


def table(found: list[Difference]) -> str:
    """The averages, or the only task's differences, as markdown; empty if there is none."""
    averaged = {(d.length, d.cache, d.measure) for d in found if d.task == "average"}
    shown = [d for d in found if d.task == "average" or (d.length, d.cache, d.measure) not in averaged]
    if not shown:
        return ""
    lines = [
        "## difference from full attention on the same prompts, in points",
        "| tokens | cache | measure | difference | standard error | prompts | prompts at which one point shows |\n"
        "|---|---|---|---|---|---|---|",
    ]
    for d in sorted(shown, key=lambda d: d.length):
        needed = "-" if d.needed is None else f"{d.needed:,}"
        cells = f"{100 * d.value:+.2f} | {100 * d.error:.2f} | {d.samples:,} | {needed}"
        lines[1] += f"\n| {d.length:,} | {d.cache} | {d.measure} | {cells} |"
    lines.append("One point shows where it is two standard errors. -: no prompt differs, or all differ alike.")
    return "\n\n".join(lines) + "\n"
