"""The step benchmark from its arguments to its rows, and the figure made of them."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from captured import imitated
from models import build
from read_rows import read_rows as rows

from benchmarks import decoding, filling, kernels, plot, readme, shapes
from benchmarks import step as bench_step
from benchmarks.baselines import VARIANTS, NotRun, make_cache
from benchmarks.report import Report, spread
from hf_sparsekv import optimize

pytestmark = pytest.mark.slow

BATCH, CONTEXT = 2, 300


# ---------------------------------------------------------------------- rows


def test_spread():
    assert spread([3.0]) == (3.0, None, None)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 1.5, 4.5)


def test_rows_are_written_after_each_variant_and_after_a_crash(tmp_path, capsys):
    path = tmp_path / "step.csv"
    with Report("step", "tiny", path, 4) as report:
        with report.measuring(1, 512, "first"):
            report.add("tpot_ms", [1.0, 2.0, 3.0])
            assert not path.exists()
        assert len(rows(path)) == 1
        with report.measuring(1, 512, "second"):
            report.add("tpot_ms", 4.0)
            report.rename("second+dense")
            report.add("peak_gb", 5.0, "GB")
            raise KeyError("broken")
        assert [row["variant"] for row in rows(path)] == ["first", "second", "second+dense"]
        with report.measuring(1, 512, "third"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        with report.measuring(1, 512, "fourth"):
            raise NotRun("no such thing here")
        with report.measuring(1, 512, "fifth"):
            report.add("allocations", 0, "count")
    assert report.close() == 1
    out = capsys.readouterr().out
    assert "third: not run, out of memory: CUDA out of memory" in out
    assert "fourth: not run: no such thing here" in out
    assert "second: FAILED: 'broken'" in out
    last = rows(path)[-1]
    found = [last[name] for name in ("variant", "metric", "value", "unit", "low")]
    assert found == ["fifth", "allocations", "0", "count", ""]


def test_a_variant_that_did_not_run_takes_the_runner_out(monkeypatch):
    """A runner that has met an error does not capture again, so the next variant gets a new one."""
    taken = []
    monkeypatch.setattr("benchmarks.report.unoptimize", taken.append)
    with Report("step", "tiny", None, 3) as report:
        for name, error in (("fine", None), ("broken", KeyError("x")), ("full", MemoryError("x"))):
            with report.measuring(1, 512, name, f"the model of {name}"):
                if error:
                    raise error
    assert taken == ["the model of broken", "the model of full"]


def test_interruption_keeps_what_was_measured(tmp_path):
    path = tmp_path / "step.csv"
    with (
        pytest.raises(KeyboardInterrupt),
        Report("step", "tiny", path, 1) as report,
        report.measuring(1, 512, "first"),
    ):
        report.add("tpot_ms", 1.0)
        raise KeyboardInterrupt
    assert len(rows(path)) == 1


def test_a_failing_variant_of_step_does_not_lose_the_others(tmp_path, monkeypatch):
    path = tmp_path / "step.csv"
    args = bench_step.arguments().parse_args(
        ["--shapes", "1x200", "2x100", "--variants", "hf_dynamic", "two_level", "captured_dense", "--csv", str(path)]
    )
    model = build("llama", "sparsekv")

    def measure(self, variant, batch, context):
        if variant.name == "two_level":
            raise RuntimeError("a kernel broke" if batch == 1 else "CUDA out of memory")
        self.report.add("tpot_ms", [1.0, 2.0])

    monkeypatch.setattr(bench_step.Bench, "measure", measure)
    with Report("step", "tiny", path, 8) as report:
        bench_step.run(bench_step.Bench(model, report, args), args, rate=1e12)
    found = [(row["variant"].partition("+")[0], row["batch"]) for row in rows(path)]
    assert found == [(name, batch) for batch in "12" for name in ("limit", "hf_dynamic", "captured_dense")]
    assert len(report.failed) == len(report.left_out) == 1
    expected = bench_step.limit_ms(shapes.weight_bytes(model), model.config, 1, 200, 4, 1e12)
    assert float(rows(path)[0]["value"]) == pytest.approx(expected, rel=1e-4)


SETTINGS = {"block_size": 16, "window": 16, "dense_layers": 0}


def test_step_measures_all_that_it_names(stepped, monkeypatch):
    """Everything but the clocks, in small: two captures of one shape, one of another, growth."""
    monkeypatch.setattr(filling, "CALIBRATION", 256)
    model = build("gemma3", "sparsekv", max_position_embeddings=2048)
    command = "--shapes 2x600 1x640 --tokens 6 --recapture --variants hf_dynamic hf_static two_level:lag"
    found = stepped(model, command, "two_level", token_budget=32, num_blocks=2, **SETTINGS)
    count = Counter((row["variant"], row["batch"], row["metric"]) for row in found)
    assert set(count.values()) == {1}
    always = "tpot_ms steps_ms step_ms capture_s growth_s recapture_s peak_gb generate_host_syncs"
    always += " allocations allocations:seal host_syncs host_syncs:seal"
    first, second = ({metric for v, batch, metric in count if (v, batch) == ("two_level:lag", b)} for b in "21")
    assert first - second == {"capture_s:cold"}, "cold once in a process"
    assert second == set(always.split())
    units = {row["metric"]: row["unit"] for row in found}
    assert (units["allocations"], units["peak_gb"], units["capture_s"]) == ("count", "GB", "s")
    counts = [row for row in found if row["metric"] == "allocations"]
    assert {row["value"] for row in counts} == {"1"}, "the imitation counts how often it is asked"


def test_step_measures_progressive_caches(stepped):
    """Captured and not; how many tokens a walk took is a figure, too."""
    command = "--shapes 2x200 --tokens 6 --variants progressive:0.95 progressive:0.95:eager"
    settings = {"threshold": 0.6, "min_tokens": 16, "calibration_tokens": 64, **SETTINGS}
    rows = stepped(build("llama", "sparsekv"), command, "progressive:0.95", **settings)
    found = {(row["variant"], row["metric"]) for row in rows}
    for metric in ("tokens", "covered_mass:estimated", "step_ms", "tpot_ms"):
        assert ("progressive:0.95", metric) in found
    assert {metric for variant, metric in found if variant == "progressive:0.95:eager"} == {"tpot_ms", "peak_gb"}


def test_step_measures_predictive_caches(stepped, monkeypatch):
    """At a budget of one's own; the selection that is given for free attends to as much and chooses nothing."""
    names, kept = ("predictive", "predictive:free", "predictive:second"), []
    monkeypatch.setattr(bench_step, "COUNTED", 20)
    monkeypatch.setattr(bench_step, "replay_ms", lambda model, cache: kept.append(cache) or [1.0, 1.0])
    model, settings = build("llama", "sparsekv"), {"token_budget": 1024, "calibration_tokens": 64, **SETTINGS}
    command = f"--shapes 2x200 --tokens 6 --budget 48 --variants {' '.join(names)}"
    rows = stepped(model, command, "predictive", **settings)
    assert {row["variant"] for row in rows} == {"limit", *(f"{name}:budget=48" for name in names)}
    ours, free, second = (cache.stats() for cache in kept)
    assert ours.attended_tokens == free.attended_tokens == second.attended_tokens
    assert ours.sparse_calls == free.sparse_calls == second.sparse_calls > 0 == ours.dense_calls
    assert kept[2].sparse_layers[0].store.replica.length == kept[2].get_seq_length()
    policies = [cache.sparse_layers[0].policy for cache in kept]
    first = policies[1].ids.clone()
    assert not torch.equal(policies[0].ids, first)
    decoding.Steps(build("llama", "sparsekv"), kept[1], 2, 4)()
    assert torch.equal(policies[1].ids, first)


def test_a_step_that_is_not_captured_is_an_error():
    model = optimize(build("llama", "sparsekv"))  # on a CPU
    cache = make_cache(model, VARIANTS["two_level"], CONTEXT + 20)
    filling.fill_cache(model, cache, BATCH, CONTEXT)
    step = decoding.Steps(model, cache, BATCH, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        with pytest.raises(RuntimeError, match="no decode step was captured: decode steps run eagerly: the model is"):
            decoding.capture_seconds(model, step)


def two_steps(room: int):
    """A cache that has taken two captured steps, what takes the next one, and the graph."""
    model, runner = imitated(max_position_embeddings=2048)
    cache = make_cache(model, VARIANTS["two_level"], CONTEXT + room)
    filling.fill_cache(model, cache, BATCH, CONTEXT)
    step = decoding.Steps(model, cache, BATCH, room)
    for _ in range(2):
        step()
    (graph,) = (held.graph for held in runner.graphs[cache].values())
    return model, cache, step, graph


@torch.no_grad()
def test_the_step_that_is_repeated_is_the_same():
    """Each replay begins with the rows that the cache holds, and the next step of the cache as well."""
    model, cache, step, graph = two_steps(90)
    steps, began, replay = cache.row_table.steps(model.device), [], graph.replay
    graph.replay = lambda: (replay(), began.append(steps.past.tolist()))
    assert len(decoding.replay_ms(model, cache)) == 25
    step()
    assert began == [[CONTEXT + 2] * BATCH] * 31
    assert cache.row_table.rows.lengths == (CONTEXT + 3,) * BATCH


@torch.no_grad()
def test_steps_that_are_taken_again_seal_the_same_blocks():
    model, cache, step, graph = two_steps(190)
    began = cache.joined_rows()
    for _ in range(70):
        step()
    rows, steps, seen, replay = cache.joined_rows(), cache.row_table.steps(model.device), [], graph.replay
    assert rows.sealed > began.sealed
    graph.replay = lambda: (replay(), seen.append(steps.after.tolist()))
    assert len(decoding.replay_ms(model, cache, began)) == 70 - decoding.LEFT_OUT
    assert [row[0][0] for row in seen] == list(range(CONTEXT + 3, CONTEXT + 73))
    assert seen[-1] == rows.on[model.device].tolist()


def test_synchronisations_are_found_by_place(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with decoding.synchronisations() as so_far:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("Synchronization debug mode is a prototype", stacklevel=1)
        assert so_far().total() == 3
        ((place, times),) = so_far().items()
    assert place.startswith("test_benchmark_step.py:")
    assert times == 3
    assert modes == ["warn", "default"]


def test_arguments_of_step():
    args = bench_step.arguments().parse_args(
        ["--shapes", "1x8k", "8x32k", "--variants", "two_level", "--compile", "--offload"]
    )
    assert args.shapes == [(1, 8192), (8, 32768)]
    found = bench_step.variants(args)
    assert [v.label(True) for v in found] == ["two_level+fused+offload", "hf_static_compile"]
    assert bench_step.variants(bench_step.arguments().parse_args([]))[0].name == "hf_dynamic"


def test_codes_in_host_memory_have_rows_of_their_own(tmp_path):
    args = bench_step.arguments().parse_args(
        ["--variants", "two_level", "hf_dynamic", "--offload", "--kv-dtype", "int8", "--device-pool", "0.25kv"]
    )
    model = build("llama", "sparsekv")
    with Report("step", "tiny", tmp_path / "rows.csv", 1) as report:
        bench = bench_step.Bench(model, report, args)
        ours, stock = (bench.label(variant) for variant in bench_step.variants(args))
    assert ours.endswith("+offload:pool=0.25kv:kv_dtype=int8") and "int8" not in stock
    cache = bench_step.make_cache(model, bench_step.variants(args)[0], 600, kv_dtype=args.kv_dtype)
    assert cache.offload_config.kv_dtype == "int8"
    with pytest.raises(SystemExit):
        bench_step.main(["--variants", "two_level", "--kv-dtype", "int8"])


# ---------------------------------------------------------------------- the figure


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    path = tmp_path / "step.csv"
    for case in ("qwen3-8b", "other"):
        with Report("step", case, path, 1) as report:
            for context in (8192, 32768):
                for variant, metric in (*plot.LINES, ("something_else", "tpot_ms")):
                    with report.measuring(1, context, variant):
                        report.add(metric, 5.0)
    for args in (["--out", tmp_path / "a.svg"], ["--out", tmp_path / "b.png", "--case", "other"]):
        plot.main(["--csv", str(path), *map(str, args)])
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"no rows of none-such, batch 1; there are other x 1, qwen3-8b x 1"):
        plot.main(["--csv", str(path), "--case", "none-such"])


def test_the_ladder(tmp_path):
    """Whatever rows there are: some systems, one rate or several, seeds, and what was not finished."""
    pytest.importorskip("matplotlib")
    pd = pytest.importorskip("pandas")
    path = tmp_path / "serving.csv"

    def add(system: str, rate: float | None, seed: int, out: str = "256", clip: int = 32, **metrics: float) -> None:
        parts = [f"rate={rate:g}"] if rate is not None else []
        label = ":".join([system, "gpu=24gb", *parts, f"out={out}", f"seed={seed}", "kv=replayed"])
        with Report("serving", "qwen3-8b", path, 32) as report, report.measuring(32, 1024 * clip, label):
            for name, value in metrics.items():
                report.add(name.replace("__", ":"), value)

    times = {"ttft_s__mean": 1.0, "between_ms__p99": 50.0, "failed": 0}
    add("sparse", 0.8, 1, out="64", tokens_per_s=1.0, **times)  # another kind of trace
    add("dense", 0.8, 1, out="256:most=512", tokens_per_s=1.0, **times)  # and another
    for seed in (1, 2):
        for rate in (0.8, 0.4):
            add("segments", rate, seed, tokens_per_s=100 * rate * seed, **times)
    add("segments:budget=1024", 0.8, 2, tokens_per_s=200.0, **times)  # measured again
    add("segments:budget=2048", 0.8, 2, tokens_per_s=300.0, **times)  # something else
    add("segments", None, 1, goodput_rps=0.4, iteration_ms=7.0)
    add("transformers", 0.4, 1, tokens_per_s=8.0, failed=3, requests=9)
    add("vllm", 0.4, 1, failed=9, requests=9)  # no figures at all
    add("dense", 0.4, 1, out="64", clip=128, tokens_per_s=1.0, **times)  # longer prompts: not in the picture
    with Report("serving", "tiny", path, 1) as report, report.measuring(1, 8192, "soak:minutes=60"):
        report.add("requests", 1.0)
    rows, goodput = plot.ladder_rows([path], "qwen3-8b")
    assert set(rows.system) == {"segments", "transformers", "vllm"} and list(goodput.value) == [0.4]
    table = rows[(rows.system == "segments") & (rows.metric == "tokens_per_s")].set_index(["rate", "seed"]).value
    assert table.to_dict() == {(0.8, 1): 80.0, (0.4, 1): 40.0, (0.4, 2): 80.0, (0.8, 2): 200.0}
    for name in ("a.svg", "b.png"):
        plot.main(["--what", "ladder", "--csv", str(path), "--out", str(tmp_path / name)])
    text = (tmp_path / "a.svg").read_text()
    assert text.startswith("<?xml") and (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    add("segments", 0.8, 1, out="64", tokens_per_s=1.0, **times)  # the newest kind: of one rate
    plot.main(["--what", "ladder", "--csv", str(path), "--out", str(tmp_path / "bars.svg")])
    with pytest.raises(SystemExit, match="no rows of traces of tiny; there are qwen3-8b, tiny"):
        plot.main(["--what", "ladder", "--csv", str(path), "--case", "tiny"])
    assert len(pd.read_csv(path)) > 20


def test_newest_rows_win(tmp_path):
    pytest.importorskip("pandas")
    path = tmp_path / "step.csv"
    for value in (1.0, 2.0):
        with Report("step", "m", path, 1) as report, report.measuring(1, 8192, "limit"):
            report.add("step_ms", value)
    assert list(plot.newest([path], "m", 1).value) == [2.0]


def test_a_picture_is_of_one_device_and_of_todays_defaults(tmp_path):
    """Rows of a slower GPU, or of earlier defaults, would be points of the same line."""
    pytest.importorskip("pandas")
    path, old = tmp_path / "step.csv", "case,variant,batch,context,metric,value,device,commit\n"
    old += "m,token_only+fused,1,8192,tpot_ms,9,A,before\nm,limit,1,8192,step_ms,3,A,before\n"
    path.write_text(old)
    assert list(plot.newest([path], "m", 1).value) == [9, 3]
    since = readme.DATA["since"]["defaults"][0]
    path.write_text(old + f"m,token_only+fused,1,32768,tpot_ms,5,A,{since}\n")
    assert list(plot.newest([path], "m", 1).value) == [3, 5]
    with path.open("a") as file:
        file.write("m,limit,1,32768,step_ms,7,B,later\n")
    assert list(plot.newest([path], "m", 1).value) == [7], "the last row's device"
    assert list(plot.newest([path], "m", 1, device="A").value) == [3, 5]
    with pytest.raises(ValueError, match="no rows of C, but of A, B"):
        plot.newest([path], "m", 1, device="C")


def test_step_prints_its_kernels(stepped, monkeypatch, capsys):
    """Of a step that is made for it, of an offloaded cache, too."""
    found, steps = [kernels.Kernel("attends", 0.0, 5.0)], []
    monkeypatch.setattr(bench_step, "launched", lambda step: steps.append(step()) or found)
    settings = {"token_budget": 32, "num_blocks": 2, **SETTINGS}
    for offload in ("", " --offload"):
        stepped(
            build("llama", "sparsekv"),
            f"--shapes 2x300 --variants two_level --kernels{offload}",
            "two_level",
            **settings,
        )
        assert "5.00 us more,     5.00 us attends" in capsys.readouterr().out
    assert len(steps) == 2


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_step_on_a_gpu(tmp_path, monkeypatch):
    config = shapes.known_config("qwen3-0.6b")
    config.num_hidden_layers, config.layer_types = 3, config.layer_types[:3]
    monkeypatch.setitem(shapes.SHAPES, "toy", lambda: config)
    path = tmp_path / "step.csv"
    args = f"--model toy --shapes 1x16k --tokens 32 --recapture --csv {path}".split()
    assert bench_step.main([*args, "--variants", *bench_step.DEFAULT, "hf_offloaded", "hf_static"]) == 0
    found = {(row["variant"], row["metric"]) for row in rows(path)}
    ours = "tpot_ms step_ms capture_s:cold capture_s growth_s recapture_s peak_gb"
    for metric in (*ours.split(), "allocations", "host_syncs", "generate_host_syncs"):
        assert ("two_level:lag+fused", metric) in found
    for variant in ("hf_dynamic", "hf_offloaded", "hf_static"):
        assert (variant, "tpot_ms") in found
    assert ("sdpa_best+fused", "step_ms") in found


def test_what_kernels_add_to_a_step():
    """Of one that was launched early, what it ends behind the others; of one that ended before them, less than none."""
    found = [kernels.Kernel(*one) for one in (("a", 0.0, 5.0), ("b", 1.0, 9.0), ("c", 2.0, 3.0), ("d", 8.0, 4.0))]
    assert [us for _, us in kernels.added(found, 0)] == [5.0, 5.0, -5.0, 2.0]
    assert [us for _, us in kernels.added(found, 1, 1)] == [5.0]
    assert [line.split() for line in kernels.describe_step(found).splitlines()[-2:]] == [
        ["-5.00", "us", "more,", "3.00", "us", "c"],
        ["2.00", "us", "more,", "4.00", "us", "d"],
    ]
