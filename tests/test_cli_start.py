"""The command's own help and completion: without torch, and the same as the whole command's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_sparsekv.cli.app import app
from hf_sparsekv_cli import COMMANDS, asks_for_names, names_only

ROOT = Path(__file__).parents[1]
IMPORTS = """
import sys
import hf_sparsekv_cli
sys.argv = ["hf-sparsekv", *{args}]
try:
    hf_sparsekv_cli.main()
except SystemExit as end:
    print("status", end.code)
print("loaded", sorted({{"torch", "transformers", "numpy", "hf_sparsekv"}} & set(sys.modules)))
"""


def python(code: str, **environment) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.quick
@pytest.mark.parametrize("args", [[], ["--help"], ["--show-completion", "bash"]])
def test_help_imports_neither_torch_nor_transformers(args):
    told = python(IMPORTS.format(args=args), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "loaded []" in told
    assert ("complete -o default -F _hf_sparsekv_completion" if "bash" in args else "calibrate-device") in told


def test_everything_else_is_the_command_itself():
    assert "loaded ['hf_sparsekv', 'numpy', 'torch', 'transformers']" in python(IMPORTS.format(args=["--version"]))


def test_both_say_the_same():
    """So nothing is missing in the list, and no line of it is old."""
    light, whole = (CliRunner().invoke(one, ["--help"], prog_name="hf-sparsekv") for one in (names_only(), app))
    assert light.exit_code == whole.exit_code == 0
    assert light.stdout == whole.stdout
    assert all(name in light.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("hf-sparsekv ge", {"generate"}),
        ("hf-sparsekv ca", {"calibrate", "calibrate-device"}),
        ("hf-sparsekv plan --cont", {"--context"}),
        ("hf-sparsekv eval ne", {"needle"}),
    ],
)
def test_completion(line, found):
    words = line.split()
    shell = {"_HF_SPARSEKV_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    told = python(IMPORTS.format(args=[]), **shell)
    assert found == {word for word in told.split() if word.startswith(words[-1])}
    assert ("loaded []" in told) == (len(words) == 2)


@pytest.mark.parametrize(
    ("line", "names"),
    [("hf-sparsekv", True), ("hf-sparsekv ", True), ("hf-sparsekv eval", True), ("hf-sparsekv\neval\n", False)],
)
def test_who_completes(line, names):
    """Behind a command's name, the command itself; bash gives words by lines, other shells one line."""
    for variable in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS"):
        assert asks_for_names([], {"_HF_SPARSEKV_COMPLETE": "complete", variable: line}) == names
