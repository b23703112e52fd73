"""A test that kills its worker: the run ends, says which one it was, and runs the others once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from grids import not_telling

HELPERS = Path(__file__).parents[1] / "helpers"
DIES = """
import os
import pytest

@pytest.mark.parametrize("i", range(24))
def test_one(i, worker_id):
    print(f"ran {i} end")
    if i == 9:
        os._exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("restarts", "run"), [(0, None), (2, 23)])
def test_a_worker_that_dies(tmp_path, restarts, run):
    """``run``: tests that pass; None: those that were under way."""
    (tmp_path / "conftest.py").write_text("from groups import pytest_xdist_make_scheduler\n")
    (tmp_path / "test_dies.py").write_text(DIES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env["PYTHONPATH"] = str(HELPERS)
    how = ["-n", "2", "--max-worker-restart", str(restarts), "-p", "no:cacheprovider", "-rA", "test_dies.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *how], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    out = done.stdout
    assert done.returncode == 1, out + done.stderr
    assert len(re.findall(r"^FAILED test_dies.py::test_one\[9\]", out, re.M)) == 1, out
    passed = re.findall(r"^PASSED test_dies.py::test_one\[(\d+)\]", out, re.M)
    assert len(passed) == len(set(passed)), out
    assert "9" not in passed
    assert run is None or len(passed) == run, out


@dataclass
class Item:
    """As much of a test as is looked at."""

    params: dict
    marks: tuple
    parent: None = None
    originalname: str = "test"

    __hash__ = object.__hash__
    nodeid = property(lambda self: str(self.params))
    callspec = property(lambda self: self)

    def iter_markers(self):
        return iter(self.marks)

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)


def grid(*marks, a=range(4), b=range(3)) -> list[Item]:
    return [Item({"a": x, "b": y}, tuple(mark.mark for mark in marks)) for x in a for y in b]


def values(items) -> set:
    return {pair for item in items for pair in item.params.items()}


@pytest.mark.parametrize("mark", [pytest.mark.few, pytest.mark.few(), pytest.mark.pairwise])
def test_the_quick_tier_has_each_value(mark):
    items = grid(mark)
    left = set(items) - not_telling(items)
    assert values(left) == values(items) and len(left) == 4
    assert not not_telling(grid(mark, pytest.mark.gpu)) and not not_telling(grid(mark, pytest.mark.slow))
    assert not not_telling(items[:1]), "one that is named on the command line"


def test_values_that_are_named_are_the_only_ones_of_their_parameter():
    items = grid(pytest.mark.few(a=(1, 3, 7)))
    left = set(items) - not_telling(items)
    assert values(left) == {("a", 1), ("a", 3), ("b", 0), ("b", 1), ("b", 2)} and len(left) == 3
    assert not not_telling(items[:1])
    with pytest.raises(KeyError):
        not_telling(grid(pytest.mark.few(c=(1,))))
