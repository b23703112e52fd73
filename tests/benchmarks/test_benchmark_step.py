"""The step benchmark from its arguments to its rows, and the figure made of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from captured import imitated
from models import build
from read_rows import read_rows as rows

from benchmarks import decoding, filling, shapes
from benchmarks import step as bench_step
from benchmarks.baselines import VARIANTS, NotRun, make_cache
from benchmarks.report import Report
from hf_sparsekv import optimize

pytestmark = pytest.mark.slow

BATCH, CONTEXT = 2, 300


# ---------------------------------------------------------------------- rows


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


SETTINGS = {"block_size": 16, "window": 16, "dense_layers": 0}


def test_step_measures_all_that_it_names(stepped, monkeypatch):
    """Everything but the clocks, in small: two captures of one shape, one of another."""
    monkeypatch.setattr(filling, "CALIBRATION", 256)
    model = build("gemma3", "sparsekv", max_position_embeddings=2048)
    command = "--shapes 2x600 1x640 --tokens 6 --variants hf_dynamic hf_static two_level:lag"
    found = stepped(model, command, "two_level", token_budget=32, num_blocks=2, **SETTINGS)
    count = Counter((row["variant"], row["batch"], row["metric"]) for row in found)
    assert set(count.values()) == {1}
    always = "tpot_ms read steps_ms step_ms capture_s peak_gb generate_host_syncs"
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
    settings = {"mass": 0.6, "min_tokens": 16, "calibration_tokens": 64, **SETTINGS}
    rows = stepped(build("llama", "sparsekv"), command, "progressive:0.95", **settings)
    found = {(row["variant"], row["metric"]) for row in rows}
    for metric in ("tokens", "covered_mass:estimated", "step_ms", "tpot_ms"):
        assert ("progressive:0.95", metric) in found
    assert {metric for variant, metric in found if variant == "progressive:0.95:eager"} == {"tpot_ms", "peak_gb"}


def test_step_measures_predictive_caches(stepped, monkeypatch):
    """At a budget of one's own; a second device's choice attends to as much."""
    names, kept = ("predictive", "predictive:second"), []
    monkeypatch.setattr(bench_step, "COUNTED", 20)
    monkeypatch.setattr(bench_step, "replay_ms", lambda model, cache: kept.append(cache) or [1.0, 1.0])
    model, settings = build("llama", "sparsekv"), {"token_budget": 1024, "calibration_tokens": 64, **SETTINGS}
    command = f"--shapes 2x200 --tokens 6 --budget 48 --variants {' '.join(names)}"
    rows = stepped(model, command, "predictive", **settings)
    assert {row["variant"] for row in rows} == {"limit", *(f"{name}:budget=48" for name in names)}
    ours, second = (cache.stats() for cache in kept)
    assert ours.attended_tokens == second.attended_tokens
    assert ours.sparse_calls == second.sparse_calls > 0 == ours.dense_calls
    assert kept[1].sparse_layers[0].store.replica.length == kept[1].get_seq_length()


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


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_step_on_a_gpu(tmp_path, monkeypatch):
    config = shapes.known_config("qwen3-0.6b")
    config.num_hidden_layers, config.layer_types = 3, config.layer_types[:3]
    monkeypatch.setitem(shapes.SHAPES, "toy", lambda: config)
    path = tmp_path / "step.csv"
    args = f"--model toy --shapes 1x16k --tokens 32 --csv {path}".split()
    assert bench_step.main([*args, "--variants", *bench_step.DEFAULT, "hf_offloaded", "hf_static"]) == 0
    found = {(row["variant"], row["metric"]) for row in rows(path)}
    ours = "tpot_ms step_ms capture_s:cold capture_s peak_gb"
    for metric in (*ours.split(), "allocations", "host_syncs", "generate_host_syncs"):
        assert ("two_level:lag+fused", metric) in found
    for variant in ("hf_dynamic", "hf_offloaded", "hf_static"):
        assert (variant, "tpot_ms") in found
    assert ("sdpa_best+fused", "step_ms") in found
