"""The operator benchmark: its inputs and its check, on the CPU through the references; sweeps on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from read_rows import read_rows

pytest.importorskip("triton")

from benchmarks.operators import run as module
from benchmarks.operators.check import check
from benchmarks.operators.run import main
from benchmarks.operators.sweep import differs, variants
from benchmarks.report import Report
from hf_sparsekv import TokenConfig
from hf_sparsekv.tuning.layer_step import Layer, Shape
from hf_sparsekv.tuning.timing import Time

pytestmark = pytest.mark.slow

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off where there is a GPU"
)

CONFIG = TokenConfig(block_size=16, num_blocks=4, token_budget=32, window=16, max_draft=4, sinks=2)
SHAPE = Shape(2, 300, q_heads=4, heads=2, dim=16, dtype=torch.float32, config=CONFIG)


LATENTS = Shape(2, 300, q_heads=5, heads=1, dim=24, value_dim=16, dtype=torch.float32, config=CONFIG)


@pytest.fixture
def layer() -> Layer:
    return Layer(SHAPE, torch.device("cpu"), seed=0)


@pytest.mark.parametrize("shape", [SHAPE, LATENTS], ids=["keys-values", "latents"])
def test_a_correct_step_passes_the_check(shape):
    layer = Layer(shape, torch.device("cpu"), seed=0)
    check(layer)
    assert layer.out.shape == (2, shape.q_heads, shape.values)


@pytest.mark.parametrize("part", ["append", "block_score", "block_select", "token_select", "token_score", "decode"])
def test_an_operator_that_does_nothing_fails_the_check(layer, part, monkeypatch):
    monkeypatch.setattr(Layer, part, lambda self, *args: None)
    with pytest.raises(AssertionError):
        check(layer)


def test_inputs_are_what_a_store_would_hold(layer):
    """Physical blocks in allocation order, the ring as full as it gets, room for the new token only."""
    assert SHAPE.full_blocks == (300 - 35) // 16 == 16
    assert layer.block_table[:, :3].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert (layer.block_table >= 0).sum() == 2 * SHAPE.full_blocks
    assert layer.rows.tolist() == [[SHAPE.length, 256]] * 2
    assert layer.past.tolist() == [256 + SHAPE.recent - 1] * 2
    layer.step()
    assert (layer.attended == CONFIG.sinks + SHAPE.recent + CONFIG.token_budget).all()


def test_bytes_of_the_target_shape():
    """1 x 32k of Qwen3-8B by hand: bounds, labels of 128 blocks, 1024 tokens and the recent buffer, 8 heads."""
    shape = Shape(1, 32768)
    assert shape.full_blocks == 509
    assert shape.bytes_read("two_level") == 8 * (509 * 512 + 128 * 64 * 36 + (1024 + 4 + 143) * 512)
    assert shape.bytes_read("dense") == 8 * (509 * 64 + 4 + 143) * 512


@INTERPRETED
@pytest.mark.parametrize("operator", ["long_select", "long_score"])
def test_ways_to_run_an_operator_agree(layer, operator):
    layer.step()
    first = None
    for name, run, result in variants([layer], operator):
        run(0)
        got = result().clone()
        first = got if first is None else first
        assert not differs(got, first), name


@pytest.fixture
def reported(tmp_path):
    """Reports of measurements: values by variant, and what failed."""

    def run(measure) -> tuple[dict[str, float], list[str]]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        with Report("operator", "qwen3-8b", path, None) as report:
            measure(report)
        return {row["variant"]: float(row["value"]) for row in read_rows(path)}, report.failed

    return run


@INTERPRETED
def test_sweeps_name_the_quickest_and_the_wrong(layer, monkeypatch, capsys, reported):
    times = iter((9.0, 3.0, 1.0))
    monkeypatch.setattr(module, "captured", lambda step, sets: (step(0), Time(next(times), 0.0, 10.0))[1])
    layer.step()
    ways = list(module.variants([layer], "token_select"))
    ways[2] = (ways[2][0], lambda i: layer.tokens.zero_(), ways[2][2])
    monkeypatch.setattr(module, "variants", lambda layers, operator: ways)
    _, failed = reported(lambda report: module.sweep([layer], report, ["token_select"]))
    assert len(failed) == 1 and "warps=16: another result" in failed[0]
    assert "token_select, quickest: warps=8, 3.00 us" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "operator.csv"
    command = f"--shapes 1x16k --heads 4x2 --dim 64 --sweep token_select mass_select --csv {path}"
    assert main(command.split()) == 0
    rows = read_rows(path)
    assert {row["metric"] for row in rows} == {"token_select_us", "mass_select_us"}
    assert all(float(row["value"]) > 0 for row in rows)
