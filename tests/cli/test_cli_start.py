"""Messages before anything heavy is imported: help, completion and wrong usage of every command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from inside import own_methods
from typer.main import get_command
from typer.testing import CliRunner

from hf_sparsekv import __version__
from hf_sparsekv.cli import loading
from hf_sparsekv_cli import version
from hf_sparsekv_cli.app import app
from hf_sparsekv_eval import reference_policies  # noqa: F401 (registers them before a test replaces the registry)

ROOT = Path(__file__).parents[2]
IMPORTS = """
import sys
import hf_sparsekv_cli
sys.argv = ["hf-sparsekv", *{args}]
try:
    hf_sparsekv_cli.main()
except SystemExit as end:
    print("status", end.code)
print("loaded", sorted({heavy} & set(sys.modules)))
"""
# What takes long to import, or is of use only once a command does its work.
HEAVY = {"torch", "transformers", "numpy", "hf_sparsekv", "hf_sparsekv_eval", "gradio", "fastapi", "uvicorn", "triton"}
HEAVY |= {"safetensors", "huggingface_hub", "tokenizers", "psutil", "pandas", "matplotlib", "datasets", "lm_eval"}


# Told before torch is imported.
WRONG_USAGE = [
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
    (["serve", "x", "--max-body", "2000", "KiB"], "write sizes in one word, as 80KiB"),
    (["plan", "x", "--context", "3k", "--gpu-memory", "80"], "80 bytes? Write the unit, too: 80GiB"),
    (
        ["plan", "x", "--context", "3k", "--cache", "predictive", "--predictor", "layr"],
        ": did you mean layer?",
    ),
    (["eval", "needl", "small"], "No such command 'needl': did you mean needle? (hf-sparsekv eval --help)"),
    (["generate", "small", "hello", "you"], "(hello you): the prompt is given by --prompt, in quotes"),
    (["doctor", "x"], "(x) (hf-sparsekv doctor --help)"),
    (["generate", "x", "--prompt"], "--prompt' requires an argument."),
    (["generate", "x"], "give either --prompt or --prompt-file"),
    (["generate", "x", "--prompt", "a", "--cache", "streaming", "--compare", "token"], "--compare takes dense"),
    (
        ["generate", "x", "--prompt", "a", "--cache", "dense", "--sinks", "4"],
        "--sinks has no meaning without a spa",
    ),
    (["generate", "x", "--prompt", "a", "--seed", "3"], "--seed has no meaning without"),
    (["generate", "x", "--prompt", "a", "--kv-dtype", "int8", "--no-offload"], "leave --no-offload out"),
    (
        ["generate", "x", "--prompt", "a", "--exact", "--cache", "dense"],
        "--exact has no meaning with --cache dense",
    ),
    (["generate", "x", "--prompt", "a", "--exact", "--offload"], "leave --offload and --kv-dtype out"),
    (["serve", "x", "--cache", "dense"], "serve has sparse caches only"),
    (["serve", "x", "--exact", "--host-kv", "3GiB"], "leave --offload and --kv-dtype out"),
    (["serve", "x", "--exact", "--tensor-parallel"], "leave --tensor-parallel out"),
    (["serve", "x", "--max-length", "9"], "--context says how long requests may be"),
    (["serve", "x", "--api-key", " "], "is empty: give a key"),
    (["serve", "x", "--cors-origin", "chat.example.org"], "'chat.example.org' is no origin of web pages"),
    (["serve", "x", "--no-offload", "--host-kv", "3GiB"], "--host-kv is for keys and values in host memory"),
    (["serve", "x", "--context", "4kk"], "'4kk' is no length"),
    (["plan", "x", "--context", "3k", "--cache", "dense"], "--cache takes token, two_level, "),
    (["calibrate-device", "--heads", "9x2"], "query heads a multiple of KV heads"),
    (["demo", "--port", "x"], "Invalid value for '--port'"),
    (["demo", "--port", "99999"], "Invalid value for '--port'"),
    (["eval", "ruler", "x", "--families", "qa_1"], "give --data DIRECTORY"),
    (["eval", "ruler", "x", "--lengths", "4q"], "'4q' is no length"),
    (["eval", "needle", "x", "--samples", "3:2"], "--samples 3:2: give how many"),
    (["eval", "output", "x", "--join"], "--join is of --documents"),
    (["eval", "output", "x", "--documents", "d", "--text-file", "t"], "are both given"),
    (["plan", "x", "--context", "3k", "--sinks", "-1"], "--sinks must be an integer >= 0, got -1"),
    (["serve", "x", "--max-rows", "5000"], "--max-rows must be an integer in [1, 4096], got 5000"),
]
# Names that the evaluation knows.
WRONG_NAMES = [
    (["eval", "needle", "x", "--cache", "dense"], "unknown method 'dense' (did you mean 'full'?)"),
    (["eval", "ruler", "x", "--families", "vtt"], "no family 'vtt' (did you mean 'vt'?)"),
    (["eval", "needle", "x", "--cache", "two_levl"], "unknown method 'two_levl' (did you mean 'two_level'?)"),
    (["eval", "tasks", "x", "--families", "chain"], "no task 'chain' (did you mean 'chain_"),
    (["eval", "longbench", "x", "--tasks", "qaspr"], "no task 'qaspr' (did you mean 'qasper'?)"),
    (["eval", "all", "x", "--only", "longbench"], "LongBench's data are not part of this package"),
    (["eval", "all", "x", "--only", "ruler", "--longbench", "d"], "add longbench to it"),
    (["eval", "needle", "x", "--cache", "token:token_budge=3"], "(did you mean 'token_budget'?)"),
    (["eval", "needle", "x", "--cache", "token", "--cache", "token"], "cache 'token' is given twice"),
    (["eval", "needle", "x", "--cache", "token:lag"], "write options as name=value, got 'lag'"),
    (["eval", "needle", "x", "--cache", "full:lag=true"], "full attention takes no options"),
]


def python(code: str, **environment) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def told(args: list[str], **environment: str) -> str:
    """Both outputs of the command with these arguments in a process of its own, its status and what it imported."""
    return python(IMPORTS.format(args=args, heavy=HEAVY), **environment)


def commands() -> dict[tuple[str, ...], list]:
    """The words of all commands that parse their arguments themselves, with their parameters."""
    found = {}
    for name, made in get_command(app).commands.items():
        inner = getattr(made, "commands", None)
        found |= {(name, word): one.params for word, one in inner.items()} if inner else {(name,): made.params}
    return {words: params for words, params in found.items() if words[0] != "lm-eval"}


@pytest.mark.quick
def test_help_and_wrong_usage_of_every_command_import_nothing_heavy():
    """By what is imported, not by the time that a busy machine takes. One process, as a new one for each takes long."""
    asked = [[], ["--help"], ["--show-completion", "bash"], ["eval"], ["eval", "--help"], ["eval", "nedle"]]
    for words, parameters in commands().items():
        asked += [[*words, "--help"], [*words, "--no-such-option"]]
        asked += [[*words, *["x"] * 9]] if words != ("demo",) else []  # which takes any number of models
        asked += [list(words)] if any(one.required for one in parameters) else []
    asked += [args for args, _ in WRONG_USAGE]
    code = f"""
import sys
import hf_sparsekv_cli
for args in {asked}:
    sys.argv = ["hf-sparsekv", *args]
    try:
        hf_sparsekv_cli.main()
    except SystemExit as end:
        status = end.code
    expected = 0 if "--help" in args or "--show-completion" in args else 2
    assert status == expected, (args, status)
    found = {HEAVY} & set(sys.modules)
    assert not found, (args, found)
print("asked", len({asked}))
"""
    said = python(code, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert f"asked {len(asked)}" in said and len(asked) > 40
    assert "complete -o default -F _hf_sparsekv_completion" in said and "calibrate-device" in said


def test_a_command_whose_arguments_are_of_another_program():
    code = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'lm_eval' else f(n, *a)"
    )
    said = python(code + IMPORTS.format(args=["lm-eval", "--help"], heavy=HEAVY))
    assert "status 1\nloaded []" in said and "error: this needs lm-evaluation-harness: pip install" in said


def test_right_usage_reaches_the_command_itself():
    said = told(["plan", "no/such/model/at-all", "--context", "4k"])
    assert "status 1" in said and "there is no directory" in said
    assert {"torch", "transformers", "hf_sparsekv"} <= set(re.findall(r"'(\w+)'", said.split("loaded")[1]))


@pytest.mark.quick
def test_the_version_imports_nothing():
    """Not typer either, whose import takes longer than all the rest."""
    assert version() == __version__
    code = IMPORTS.format(args=["--version"], heavy=HEAVY) + "print(sorted({'typer', 'rich'} & set(sys.modules)))"
    assert f"hf-sparsekv {__version__}\nloaded []\n[]" in python(code, PYTHONSAFEPATH="1")


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
    assert sorted(told(args).splitlines()) == sorted(["status 2", "loaded []", line])


@pytest.mark.parametrize(("args", "line"), [*WRONG_USAGE, *WRONG_NAMES])
def test_wrong_usage_is_one_line(args, line, tmp_path, monkeypatch):
    """With what was probably meant; nothing is loaded or written before."""
    known = own_methods(monkeypatch)
    for name in [name for name, one in known.items() if not one.config.__module__.startswith("hf_sparsekv")]:
        del known[name]  # of other tests
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load", lambda *args: pytest.fail("a model was loaded"))
    done = CliRunner().invoke(app, args, prog_name="hf-sparsekv")
    assert (done.exit_code, done.stdout) == (2, ""), (done.stderr, done.exception)
    (said,) = done.stderr.splitlines()
    assert said.startswith("error: ") and line in said, said
    assert not list(tmp_path.iterdir())


def test_a_group_without_a_command_is_help():
    done = CliRunner().invoke(app, ["eval"])
    assert done.exit_code == 2 and "needle" in done.output and "error" not in done.output


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
    said = told([], **shell)
    assert "loaded []" in said
    assert found == {word for word in said.split() if word.startswith(words[-1])}


WRONG = (
    [
        ("token", name, value)
        for name in ("token_budget", "num_blocks", "max_length", "label_channels")
        for value in (0, -3)
    ]
    + [("token", "label_channels", 3), ("token", "mass", 0.0), ("token", "mass", 1.5), ("token", "window", 0)]
    + [("token", "block_size", value) for value in (0, 8, 24, 256)]
    + [("token", name, -1) for name in ("sinks", "window", "dense_layers")]
    + [("progressive", "mass", 2.0), ("progressive", "token_budget", 0)]
    + [("predictive", "start_length", -1), ("predictive", "cache_rank", "a b"), ("predictive", "predictor", "asembled")]
    + [("token", "preset", "fastest"), ("streaming", "preset", "fast"), ("streaming", "mass", 0.5)]
)


@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_a_cache_s_values_are_checked(kind, name, value):
    """By the configuration, whose fields are told as options."""
    option = "--" + name.replace("_", "-")
    done = CliRunner().invoke(app, ["plan", "x", "--context", "3k", "--cache", kind, option, str(value)])
    assert done.exit_code == 2 and (option in done.stderr or "has no preset" in done.stderr), done.stderr


def test_no_bars_where_there_is_no_terminal(tiny):
    """Of libraries, that is; what is being done is a line. One writes its bars by tqdm alone, as for GGUF files."""
    more = "from tqdm.auto import tqdm\nprint([*tqdm([7], desc='a bar')])"
    args = ["generate", str(tiny), "--prompt", "abc", "--max-new-tokens", "2"]
    said = python(IMPORTS.format(args=args, heavy="set()") + more)
    assert f"loading {tiny}\n" in said and "[7]" in said and "status 0" in said
    assert not re.search(r"Loading weights|a bar|\d%\|", said)
