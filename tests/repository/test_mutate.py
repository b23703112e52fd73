"""``tools/mutate.py`` breaks what runs and nothing else, and tells what a test notices from what none does."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import mutations  # noqa: E402

SOURCE = '''"""A docstring of 3 words."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from a import b

def within(x: int = 3, *, most: "1 | 2" = None) -> bool:
    """At most 7."""
    if x is None or x < 0:
        raise ValueError(f"{x + 1} is less than {0}")
    print(x + 1)
    return not max(x, 8) >= 1.5 and f(x, y=True)


def __repr__(self):
    return 5
'''

TESTS = """from hf_sparsekv.sums import seen

def test_fails():
    assert seen(1) == 7

def test_sum():
    assert seen(2) == 3
"""


def test_what_is_broken():
    """Each mutation is another program. Messages, annotations, docstrings, and what only types need stay."""
    source, whole = SOURCE.encode(), ast.dump(ast.parse(SOURCE))
    found = mutations.places("a.py", source)
    made = [m.apply(source) for m in found]
    assert len({*made}) == len(made)
    assert all(ast.dump(ast.parse(text)) != whole for text in made)
    changed = {(m.line, source[m.start : m.end].decode(), m.text) for m in found}
    assert {line for line, *_ in changed} == {8, 10, 11, 13}
    for one in (
        (8, "3", "(4)"),
        (10, "x is None", "(x is not None)"),
        (10, "x is None or x < 0", "(x is None and x < 0)"),
        (10, "x is None or x < 0", "(x < 0)"),
        (10, "x < 0", "(x <= 0)"),
        (11, 'raise ValueError(f"{x + 1} is less than {0}")', "pass"),
        (13, "max(x, 8)", "(min(x, 8))"),
        (13, "max(x, 8)", "(max(8, x))"),
        (13, "f(x, y=True)", "(f(x))"),
        (13, "True", "False"),
        (13, "return not max(x, 8) >= 1.5 and f(x, y=True)", "return None"),
    ):
        assert one in changed


def test_cuda_sources():
    source = b"#define A(x) (x + 1)\nfor (int i = 0; i < n; i++)  // i < n\n  /* a + b */ c = min(a, b);\n"
    made = {m.apply(source).decode().splitlines()[m.line - 1] for m in mutations.places("a.cu", source)}
    assert made == {"for (int i = 0; i <= n; i++)  // i < n", "  /* a + b */ c = max(a, b);"}


@pytest.fixture
def tree(tmp_path):
    """A package whose one test sees half of it, beside one that always fails."""
    for folder in ("hf_sparsekv", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "Makefile").write_text("NOT_SLOW := not gpu\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "hf_sparsekv/__init__.py").touch()
    (tmp_path / "hf_sparsekv/sums.py").write_text(
        "def seen(x):\n    return x + 1\n\n\ndef unseen(x):\n    return x + 1\n"
    )
    (tmp_path / "tests/test_sums.py").write_text(TESTS)
    return tmp_path


@pytest.mark.slow
def test_what_is_noticed(tree):
    out = tree / "found.json"
    command = [sys.executable, TOOLS / "mutate.py", "--near-only", "--count", "9", "--jobs", "2", "--out", out]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {one["line"]: one["test"] for one in found["mutations"]} == {2: "tests/test_sums.py::test_sum", 6: ""}
    assert (found["killed"], found["survived"], found["failing before"]) == (1, 1, 1)
    assert "def unseen" in (tree / "hf_sparsekv/sums.py").read_text(), "the tree itself stays as it was"
