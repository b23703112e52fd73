"""The command's own help and completion: without torch, and the same as the whole command's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from typer.testing import CliRunner

from hf_sparsekv import __version__
from hf_sparsekv.cli import loading
from hf_sparsekv.cli.app import app
from hf_sparsekv_cli import version
from hf_sparsekv_cli.names import COMMANDS, asks_for_names, names_only

ROOT = Path(__file__).parents[2]
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
    told = python(IMPORTS.format(args=["doctor", "--help"]))
    assert "loaded ['hf_sparsekv', 'numpy', 'torch', 'transformers']" in told


@pytest.mark.quick
def test_the_version_imports_nothing():
    """Not typer either, whose import takes longer than all the rest."""
    assert version() == __version__
    code = IMPORTS.format(args=["--version"]) + "print(sorted({'typer', 'rich'} & set(sys.modules)))"
    told = python(code, PYTHONSAFEPATH="1")
    assert f"hf-sparsekv {__version__}\nloaded []\n[]" in told


def test_a_wrong_name_is_told_what_there_is(tmp_path):
    """Two languages have a family of one name."""
    (tmp_path / "options.yaml").write_text("sampels: 1\n")
    done = CliRunner().invoke(app, ["eval", "ruler", "x", "--config", str(tmp_path / "options.yaml")])
    assert "no option 'sampels' (did you mean 'samples'?); there are batch, cache, " in done.stderr
    done = CliRunner().invoke(app, ["eval", "ruler", "x", "--families", "q"])
    assert done.stderr.count(" vt") == 1


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["generat", "small"], "error: No such command 'generat': did you mean generate? (hf-sparsekv --help)"),
        (["xyz"], "error: No such command 'xyz'. (hf-sparsekv --help)"),
    ],
)
def test_an_unknown_command_is_told_at_once(args, line):
    told = python(IMPORTS.format(args=args)).splitlines()
    assert sorted(told) == sorted(["status 2", "loaded []", line])


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ["plan", "x", "--contxt", "3k"],
            "No such option: --contxt: did you mean --context? (hf-sparsekv plan --help)",
        ),
        (["plan", "x", "--token_budget", "3"], "did you mean --token-budget? (hf-sparsekv plan --help)"),
        (["plan", "x", "--qqq"], "No such option: --qqq (hf-sparsekv plan --help)"),
        (
            ["plan", "x", "--context", "3k", "--cache", "Two-Levl"],
            ": did you mean two_level? (hf-sparsekv plan --help)",
        ),
        (["plan", "x", "--context", "3k", "--preset", "acurate"], "has no preset 'acurate' (did you mean 'accurate'?)"),
        (["plan"], "Missing argument"),
        (["plan", "x", "--context", "3k", "--dtype", "bf16"], "--dtype': 'bf16' is not one of 'auto', 'float32'"),
        (["plan", "x", "--context", "3k", "--dtype", "bf16"], ": did you mean bfloat16? (hf-sparsekv plan --help)"),
        (["generate", "x", "--cache", "full"], ": did you mean dense? (hf-sparsekv generate --help)"),
        (["eval", "needle", "x", "--cache", "dense"], "unknown method 'dense' (did you mean 'full'?)"),
        (["plan", "x", "--context", "3k", "--gpu-memory", "80", "GiB"], "write sizes in one word, as 80GiB"),
        (["plan", "x", "--context", "3k", "--gpu-memory", "80"], "80 bytes? Write the unit, too: 80GiB"),
        (
            ["plan", "x", "--context", "3k", "--cache", "predictive", "--predictor", "ridg"],
            "(did you mean 'ridge'?), got",
        ),
        (["eval", "needl", "small"], "No such command 'needl': did you mean needle? (hf-sparsekv eval --help)"),
        (["eval", "ruler", "x", "--families", "vtt"], "no family 'vtt' (did you mean 'vt'?)"),
        (["eval", "needle", "x", "--cache", "two_levl"], "unknown method 'two_levl' (did you mean 'two_level'?)"),
        (["generate", "small", "hello", "you"], "(hello you): the prompt is given by --prompt, in quotes"),
        (["doctor", "x"], "(x) (hf-sparsekv doctor --help)"),
        (["generate", "x", "--prompt"], "--prompt' requires an argument."),
    ],
)
def test_wrong_usage_is_one_line(args, line, tmp_path, monkeypatch):
    """With what was probably meant; nothing is loaded or written before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load", lambda *args: pytest.fail("a model was loaded"))
    done = CliRunner().invoke(app, args)
    assert (done.exit_code, done.stdout) == (2, ""), done.stderr
    (told,) = done.stderr.splitlines()
    assert told.startswith("error: ") and line in told, told
    assert not list(tmp_path.iterdir())


def test_a_group_without_a_command_is_help():
    done = CliRunner().invoke(app, ["eval"])
    assert done.exit_code == 2 and "needle" in done.output and "error" not in done.output


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
    if len(words) == 2:
        told = python(IMPORTS.format(args=[]), **shell)
        assert "loaded []" in told
    else:  # with torch, which is there already in a fork
        told = forked.run(["-c", IMPORTS.format(args=[])], env={**os.environ, "PYTHONPATH": str(ROOT), **shell}).stdout
    assert found == {word for word in told.split() if word.startswith(words[-1])}


@pytest.mark.parametrize(
    ("line", "names"),
    [("hf-sparsekv", True), ("hf-sparsekv ", True), ("hf-sparsekv eval", True), ("hf-sparsekv\neval\n", False)],
)
def test_who_completes(line, names):
    """Behind a command's name, the command itself; bash gives words by lines, other shells one line."""
    for variable in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS"):
        assert asks_for_names([], {"_HF_SPARSEKV_COMPLETE": "complete", variable: line}) == names
