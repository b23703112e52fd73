"""``hf-sparsekv plan``: what it prints, and what it refuses."""

from __future__ import annotations

import enum
import inspect
import re

import pytest
from command_line import error, run

import hf_sparsekv
from hf_sparsekv import Engine, OffloadedSparseCache, SparseCache
from hf_sparsekv.cli.loading import placed
from hf_sparsekv.tuning.shapes import SHAPES
from hf_sparsekv_cli import options as opt
from hf_sparsekv_cli import values
from hf_sparsekv_serve.rank_processes import Served


@pytest.mark.quick
def test_plan(tiny):
    size = ("--context", 1000, "--batch", 2, "--gpu-memory", "1GiB", "--host-memory", "1MiB")
    out = run("plan", tiny, *size, "--dense-layers", 0, "--offload").stdout
    assert "llama, float32, layers: 2 full; 2 x 1,000 tokens" in out
    # 2 layers x 32 physical blocks x 64 tokens x 2 heads x 32 channels x 4 bytes; dense: 2 x 2 x 1000 x 2 x 32 x 4
    row = next(line for line in out.splitlines() if line.startswith("KV blocks"))
    assert row.split() == ["KV", "blocks", "-", "1", "MiB", "1000", "KiB"]
    assert "GPU 1.00 GiB (as given): sparse fits, dense fits" in out
    assert "host 1 MiB (as given): fits" in out


def test_plan_of_a_progressive_cache(tiny):
    out = run("plan", tiny, "--context", 3000, "--cache", "progressive", "--dense-layers", 0).stdout
    assert re.search(r"token labels +[1-9]", out) and re.search(r"block bounds +- +-", out)
    assert "plan compares" in error("plan", tiny, "--context", 10, "--cache", "dense", status=2)


def test_plan_does_not_fit(tiny):
    size = ("--context", 1000, "--gpu-memory", "100KiB", "--host-memory", "1KiB", "--offload")
    out = run("plan", tiny, *size, "--dense-layers", 0, status=1).stdout
    assert re.search(r"GPU 100 KiB \(as given\): sparse does not fit \(.* too much\), dense does not fit", out)
    assert re.search(r"host 1 KiB \(as given\): does not fit", out)


def test_plan_without_offload_names_no_host(tiny):
    out = run("plan", tiny, "--context", 1000, "--no-offload", "--gpu-memory", "1GiB").stdout
    assert "host " not in out.replace("sparse: host", "")


def test_plan_with_codes_in_host_memory(tiny):
    options = ("--context", "32k", "--gpu-memory", "80GiB", "--offload")
    plain, coded = (run("plan", "qwen3-8b", *options, *more).stdout for more in ((), ("--kv-dtype", "int8")))
    kv = [next(line for line in out.splitlines() if line.startswith("KV blocks")).split() for out in (plain, coded)]
    assert float(kv[0][4]) == pytest.approx(2 * float(kv[1][4]), rel=0.01) and kv[0][5] == kv[1][5]
    assert "scales of 8-bit KV" in coded and "scales" not in plain
    line = error("plan", tiny, "--context", 1000, "--kv-dtype", "int8", "--no-offload", status=2)
    assert "leave --no-offload out" in line
    assert "'fp8' is not" in error("plan", tiny, "--context", 1000, "--kv-dtype", "fp8", status=2)


def test_plan_with_a_second_gpu(tiny):
    rank = ("--cache", "predictive", "--cache-rank", "cuda:1", "--dense-layers", 0)
    out = run("plan", tiny, "--context", 1000, *rank, "--gpu-memory", "1GiB").stdout
    assert re.search(r"second GPU, which chooses and keeps the blocks: \d.*iB: (fits|does not fit)", out)
    row = next(line for line in out.splitlines() if line.startswith("KV blocks"))
    assert row.split()[2] == "-"
    line = error("plan", tiny, "--context", 1000, *rank, "--offload", status=2)
    assert "--cache-rank" in line and "offload" in line


@pytest.mark.parametrize("command", [("plan", "--context", 1000), ("generate", "--prompt", "a")], ids=lambda c: c[0])
def test_blocks_have_one_place(tiny, command):
    name, *rest = command
    line = error(name, tiny, *rest, "--cache", "predictive", "--cache-rank", "host", "--no-offload", status=2)
    assert "leave --no-offload out" in line


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (("--context", 10, "--gpu-memory", "much"), "write for example 24GiB"),
        ((), "Missing option '--context'"),
        (("--context", "4m"), "Invalid value for '--context': '4m' is no length; write for example 4k or 16384"),
        (("--context", 0), "'0' is no length"),
    ),
)
def test_plan_usage(tiny, options, message):
    assert message in error("plan", tiny, *options, status=2)


def test_plan_takes_a_context_as_eval_does(tiny):
    out, plain = (run("plan", tiny, "--context", text).stdout for text in ("2k", 2048))
    assert "1 x 2,048 tokens" in out and out == plain


@pytest.mark.parametrize(
    ("text", "value"), (("10", 10), ("1KiB", 1024), ("80GB", 80 * 10**9), ("1.5 GiB", 3 << 29), ("2m", 2 * 10**6))
)
def test_sizes(text, value):
    assert values.parse_bytes(text) == value


def test_plan_proposes_a_preset():
    """More rows, fewer tokens; what does not fit the GPU goes to host memory, and long prompts are read in pieces."""

    def proposed(context: str, batch: int, gpu: str = "80GiB", host: str = "512GiB") -> str:
        size = ("--context", context, "--batch", batch, "--gpu-memory", gpu, "--host-memory", host)
        done = run("plan", "qwen3-8b", *size)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("proposed: "))
        assert ("prefill_chunk_size=4096" in done.stderr) == (context == "64k")
        assert ('more than those of "fast"' in done.stderr) == (" tokens a step" in line and '"fast"' not in line)
        return line.removeprefix("proposed: ")

    def by_mass(call: str, share: str, tokens: str) -> str:
        return f"{call}: {share} of each head's attention mass, some {tokens} tokens a step; keys and values "

    few, usual, many = "1,909 of 32,768", "3,796 of 32,768", "6,384 of 32,768"
    assert proposed("32k", 1).startswith(by_mass('sparse(model, "accurate")', "95%", many) + "on the GPU")
    assert proposed("32k", 2).startswith(by_mass("sparse(model)", "90%", usual) + "on the GPU, ")
    assert proposed("32k", 4).startswith(by_mass('sparse(model, "fast")', "75%", few) + "on the GPU, ")
    offloaded = by_mass('sparse(model, "fast", offload=True)', "75%", "3,818 of 65,536")
    assert proposed("64k", 16).startswith(offloaded + "in host memory")
    assert proposed("64", 1).startswith(
        'full attention, which sparse(model, "accurate") does by itself at this length; '
    )


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory):
    """A directory with nothing but a configuration, of Qwen3-8B's shape."""
    path = tmp_path_factory.mktemp("qwen3-8b-alike")
    SHAPES["qwen3-8b"]().save_pretrained(path)
    return path


LONG = ("--context", "128k", "--batch", 4, "--offload")
ROOMY, CODES = ("--host-memory", "256GiB"), ("--kv-dtype", "int8")
NOTHING, MORE_HOST, GIVE_HOST = "nothing fits", "give a --host-memory of more than", "give --host-memory, as 256GiB"


@pytest.mark.parametrize(
    ("size", "gpu_line", "proposed", "reasons"),
    [
        (("--context", "32k", "--gpu-memory", "80GiB", *ROOMY), "sparse fits, dense fits", "on the GPU", None),
        ((*LONG, "--gpu-memory", "95GiB", *ROOMY), "sparse fits, dense fits with", "in host memory", None),
        (
            (*LONG, "--gpu-memory", "60GiB", *ROOMY),
            "sparse fits with prefill_chunk_size=4096 (in one piece 33.70 GiB too much), dense does not",
            "in host memory",
            None,
        ),
        # As README's example on a laptop, which has no such host memory.
        (
            (*LONG, "--gpu-memory", "80GiB"),
            "sparse does not fit (host memory 51.00 GiB too small), dense does not",
            "no preset fits",
            (NOTHING, "host memory of 19.00 GiB is", GIVE_HOST),
        ),
        (
            (*LONG, "--gpu-memory", "80GiB", "--host-memory", "40GiB"),
            "sparse does not fit (host memory 30.00 GiB too small), dense does not",
            "no preset fits",
            (NOTHING, "host memory of 40.00 GiB is", f"{MORE_HOST} 40.00 GiB"),
        ),
        # Codes take half of the host memory that presets do.
        (
            (*LONG, "--gpu-memory", "80GiB", "--host-memory", "40GiB", *CODES),
            "sparse fits",
            "no preset fits; what does is said above",
            None,
        ),
        ((*LONG, "--gpu-memory", "80GiB", *ROOMY, "--no-offload"), "sparse does not fit", "in host memory", None),
        (
            (*LONG, "--gpu-memory", "16GiB", *ROOMY),
            "sparse does not fit",
            "no preset fits",
            (NOTHING, "GPU memory of 16.00 GiB is", "even with keys and values in host memory: take fewer rows"),
        ),
        (
            (*LONG, "--gpu-memory", "16GiB", "--host-memory", "1GiB"),
            "sparse does not fit",
            "no preset fits",
            (NOTHING, "GPU memory of 16.00 GiB is", "host memory of 1.00 GiB is", "take fewer rows"),
        ),
        (LONG, None, None, (NOTHING, GIVE_HOST)),
        ((*LONG, *ROOMY), None, None, None),
        (("--serve", "--context", "128k", "--gpu-memory", "80GiB"), None, None, None),
        (("--serve", "--context", "128k", "--gpu-memory", "16GiB"), None, None, (NOTHING, "Take fewer tokens")),
    ],
    ids=(
        "on the GPU", "offloaded", "in pieces", "host too small", "given host too small", "only codes", "only a preset",
        "GPU too small", "both too small", "no GPU, host too small", "no GPU", "rows", "no row",
    ),
)  # fmt: skip
def test_plan_says_one_thing_and_its_status_is_that(eight_billion, monkeypatch, size, gpu_line, proposed, reasons):
    """Plan, proposal and exit status agree; if nothing fits, the reason and an option are named."""
    monkeypatch.setattr("hf_sparsekv.cli.plan.detected_gpu", lambda: None)
    monkeypatch.setattr("hf_sparsekv.cli.plan.host_memory_limit", lambda: int(19 / 0.8 * 2**30) + 1)
    done = run("plan", eight_billion, *size, status=0 if reasons is None else 1)
    lines = done.stdout.splitlines()
    told = [line for line in lines if line.startswith("GPU ")]
    assert [gpu_line in line for line in told] == ([True] if gpu_line else [])
    told = [line for line in lines if line.startswith("proposed: ")]
    assert [proposed in line for line in told] == ([True] if proposed else [])
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == (reasons is not None)
    assert all(reason in told[0] for reason in reasons or ())


def test_plan_says_what_the_model_was_not_made_for(tiny):
    told = "more than the 2,048 that the model was made for"
    assert told in run("plan", tiny, "--context", "4k").stderr
    assert told not in run("plan", tiny, "--context", "2k").stderr


def test_plan_compares_fast_with_nothing():
    """It reads 0 % more than itself, which need not be said."""
    size = ("--context", "64k", "--batch", 16, "--gpu-memory", "80GiB", "--host-memory", "512GiB")
    done = run("plan", "qwen3-8b", *size)
    assert 'sparse(model, "fast"' in done.stdout and 'those of "fast"' not in done.stderr


def test_plan_proposes_nothing_without_a_size(tiny, monkeypatch):
    monkeypatch.setattr("hf_sparsekv.cli.plan.detected_gpu", lambda: None)
    assert "proposed" not in run("plan", tiny, "--context", 1000).stdout


def test_plan_takes_a_shape_as_serve_does():
    size = ("--context", "1k", "--gpu-memory", "80GiB")
    assert run("plan", "random:qwen3-8b", *size).stdout == run("plan", "qwen3-8b", *size).stdout
    assert "there is no shape 'qwen-8b'" in error("plan", "random:qwen-8b", *size)


def test_plan_of_a_server(tiny):
    size = ("--gpu-memory", "1GiB", "--host-memory", "330MiB", "--dense-layers", 0)
    out = run("plan", tiny, "--context", "32k", "--serve", *size).stdout
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line[:1].isdigit()}
    assert list(rows) == ["4,096", "16,384", "32,768"]
    dense, sparse, offloaded = ([int(of[i].replace(",", "")) for of in rows.values()] for i in range(3))
    for of in (dense, sparse, offloaded):
        assert of[0] > of[1] > of[2] > 0
    assert all(a <= b for a, b in zip(sparse, dense))  # labels and means come on top
    # Keys and values are 512 bytes a token, 16 MiB a row: 20 rows in 330 MiB, and no more than 64 in 1 GiB.
    assert rows["32,768"][2:] == ["20", "(by", "the", "host)"] and dense[2] < 64


def test_plan_of_a_server_needs_a_gpu_s_size(tiny, monkeypatch):
    monkeypatch.setattr("hf_sparsekv.cli.plan.detected_gpu", lambda: None)
    assert "give --gpu-memory" in error("plan", tiny, "--context", 1000, "--serve", status=2)


def test_plan_says_whose_memory_it_reckons_with(tiny, monkeypatch):
    """As a user who forgot an option would read this machine's memory for that of the one in mind."""
    monkeypatch.setattr("hf_sparsekv.cli.plan.detected_gpu", lambda: 8 << 30)
    monkeypatch.setattr("hf_sparsekv.cli.plan._this_gpu", lambda: "this machine's GPU")
    out = run("plan", tiny, "--context", "2k", "--offload").stdout
    assert "GPU 8.00 GiB (this machine's GPU): sparse fits" in out
    assert re.search(r"host [\d.]+ GiB \(80 % of this machine's or container's\): fits", out)
    given = ("--gpu-memory", "9GiB", "--host-memory", "7GiB", "--offload")
    out = run("plan", tiny, "--context", "2k", *given).stdout
    assert "GPU 9.00 GiB (as given): sparse fits" in out and "host 7.00 GiB (as given): fits" in out
    rows = run("plan", tiny, "--context", "2k", "--serve", *given[:2]).stdout
    assert "rows at a time: GPU 9.00 GiB (as given), host " in rows and "(80 % of this machine" in rows


def test_blocks_are_on_the_device_unless_the_user_asks(tiny):
    """By one rule for every command, API and configuration file (docs/host-memory.md)."""

    int8 = enum.Enum("KVDType", {"int8": "int8"}, type=str).int8  # as typer gives it

    def of(**given) -> bool:
        options = opt.CacheOptions(**given)
        return placed(options.config(opt.CacheKind.token), options).offload

    assert [of(), of(offload=True), of(offload=False), of(kv_dtype=int8)] == [False, True, False, True]
    for entry in (hf_sparsekv.sparse, hf_sparsekv.enable, hf_sparsekv.generate, Engine, SparseCache, Served):
        assert not inspect.signature(entry).parameters["offload"].default, entry
    assert OffloadedSparseCache().offload_config is not None  # its name asks
    assert "KV blocks" in (out := run("plan", tiny, "--context", 1000, "--gpu-memory", "1GiB").stdout)
    assert next(line for line in out.splitlines() if line.startswith("KV blocks")).split()[4] == "-"


def test_plan_for_several_gpus(tiny):
    """Replicas of a model that fits one GPU; shares of one that does not; latents and odd heads are not divided."""
    given = ("--context", "128k", "--serve", "--gpu-memory", "140GiB", "--host-memory", "400GiB", "--gpus")
    out = run("plan", "qwen3-8b", *given, 4).stdout
    lines = [line.split()[:5] for line in out.splitlines() if " of " in line and "replica" in line.split()[1]]
    assert lines == [line.split() for line in ("4 replicas of 1 GPU", "2 replicas of 2 GPUs", "1 replica of 4 GPUs")]
    assert "most tokens a second: 4 replicas of one GPU each" in out
    assert "soonest first token and answer of one request: one replica, each on 4 GPUs (tensor parallel)" in out
    out = run("plan", "llama-3.3-70b", *given, 4).stdout
    assert re.search(r"4 replicas of 1 GPU +0 +0 +0\n2 replicas of 2 GPUs +[1-9]", out)
    assert "most tokens a second: 2 replicas, each on 2 GPUs (tensor parallel)" in out
    assert "of 2 GPUs" not in run("plan", "glm-4.7-flash", *given, 2).stdout
    assert "of 3 GPUs" not in run("plan", "qwen3-8b", *given, 3).stdout
    assert "or more GPUs" in error("plan", "llama-3.3-70b", *given[:4], "40GiB", *given[5:], 2)
    assert "add --serve" in error("plan", tiny, "--context", 1000, "--gpus", 2, status=2)
