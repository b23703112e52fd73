"""Files of the repository that GitHub shows: notes of a release, and forms for issues."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hf_sparsekv import __version__

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/release_notes.py"
CHANGELOG = """# Changelog

## Unreleased

## 0.2.0

- [one](docs/one.md#a), [two](https://two)

## 0.1.0

- old
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("release_notes", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notes_are_the_version_s_part(tool):
    assert tool.notes(CHANGELOG, "0.2.0") == "- [one](docs/one.md#a), [two](https://two)\n"
    there = tool.notes(CHANGELOG, "0.2.0", "https://here/me/it/", "v0.2.0")
    assert there == "- [one](https://here/me/it/blob/v0.2.0/docs/one.md#a), [two](https://two)\n"
    for missing in ("Unreleased", "0.3.0"):
        with pytest.raises(ValueError, match=f"nothing under `## {missing}`; it has Unreleased, 0.2.0, 0.1.0"):
            tool.notes(CHANGELOG, missing)


def test_this_version_has_notes():
    done = subprocess.run([sys.executable, TOOL, f"v{__version__}"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("### ")
    wrong = subprocess.run([sys.executable, TOOL, "9.9"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: CHANGELOG.md has nothing under `## 9.9`")


FORMS = [path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_are_as_github_reads_them(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "labels", "body"} == set(form)
    fields = [one for one in form["body"] if one["type"] != "markdown"]
    assert fields and {one["type"] for one in fields} <= {"textarea", "input", "dropdown"}
    assert len({one["id"] for one in fields}) == len(fields)
    assert all(one["attributes"]["label"] for one in fields)
    assert any(one.get("validations", {}).get("required") for one in fields)
