"""Differences on the same samples, their errors, and the samples that one point takes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hf_sparsekv_eval.measures import Measure, Record
from hf_sparsekv_eval.paired import differences, table

SCORE, STEPPED = Measure("score", "score", percent=True), Measure("score in steps", "stepped", percent=True)


def records(task: str, cache: str, scores, value: str = "score", length: int = 1000) -> list[Record]:
    return [Record(task, length, i, cache, {value: float(score)}) for i, score in enumerate(scores)]


def test_a_task_by_hand() -> None:
    held = [*records("a", "full", (1, 1, 1, 0)), *records("a", "ours", (1, 0, 1, 0, 1))]
    (found,) = differences(held, (SCORE, STEPPED), "full")
    assert (found.task, found.cache, found.measure, found.samples) == ("a", "ours", "score", 4), "pairs only"
    assert found.value == -0.25 and found.error == pytest.approx(np.std([0, -1, 0, 0], ddof=1) / 2)
    assert found.needed == 10_000  # a variance of 1/4, and 4 * 0.25 / 0.01**2
    assert found.error * (found.samples / found.needed) ** 0.5 == pytest.approx(0.005)
    assert "| 1,000 | ours | score | -25.00 | 25.00 | 4 | 10,000 |" in table([found])


def test_tasks_are_averaged_and_pairs_are_closer_than_figures() -> None:
    rng = np.random.default_rng(0)
    held, drawn = [], []
    for task, lost in (("a", 0.1), ("b", 0.3)):
        full = rng.random(200) < 0.5
        ours = full & (rng.random(200) >= lost)
        held += [*records(task, "full", full), *records(task, "ours", ours)]
        drawn.append(ours.astype(float) - full)
    random.Random(0).shuffle(held)
    found = {d.task: d for d in differences(held, (SCORE,), "full")}
    assert list(found) == [*dict.fromkeys(r.task for r in held if r.cache == "ours"), "average"] and len(found) == 3
    whole = found["average"]
    assert whole.value == pytest.approx(np.mean(drawn)) and whole.samples == 400
    again = [np.mean([d[rng.integers(0, 200, 200)].mean() for d in drawn]) for _ in range(2000)]
    assert whole.error == pytest.approx(np.std(again), rel=0.1)
    assert whole.error < 0.7 * (0.25 / 400 * 2) ** 0.5, "smaller than of two figures that know nothing of each other"
    assert whole.error * (whole.samples / whole.needed) ** 0.5 == pytest.approx(0.005, rel=0.01)
    assert table(list(found.values())).count("| ours |") == 1, "the average stands for its tasks"


def test_nothing_is_said_of_what_cannot_be_known() -> None:
    assert differences(records("a", "ours", (1, 0)), (SCORE,), "full") == [] and table([]) == ""
    single = [*records("a", "full", (1,)), *records("a", "ours", (0,))]
    assert differences(single, (SCORE,), "full") == []
    alike = [*records("a", "full", (1, 0, 1), "stepped"), *records("a", "ours", (1, 0, 1), "stepped")]
    (found,) = differences(alike, (SCORE, STEPPED), "full")
    assert (found.value, found.error, found.needed) == (0, 0, None)
    assert "| +0.00 | 0.00 | 3 | - |" in table([found])
