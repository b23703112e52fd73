"""Where the crossover comes from: the configuration, the table of GPUs, its file, and the command that measures."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from dataclasses import replace

import pytest
import torch
from caches import SMALL, TIGHT, two_level
from command_line import error, run
from models import model, prompt

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig, user_file
from hf_sparsekv.cli import calibrate_device as command
from hf_sparsekv.cli import plan as plan_command
from hf_sparsekv.ops._device import H200 as H200_FACTS
from hf_sparsekv.ops._device import Gpu
from hf_sparsekv.policies import crossover
from hf_sparsekv.policies.crossover import BUILT_IN, Rule
from hf_sparsekv.tuning.fitting import METHODS, Timing, fit, fit_verifications, wrong_by
from hf_sparsekv.tuning.plan import model_shape, plan_memory

H200 = "NVIDIA H200"
WIDTH = 4096  # bytes of a token: 8 KV heads of 128 + 128 channels, bf16
GPU = torch.device("cuda", 0)
SILENT = Gpu(132, 50 << 20, 227 << 10, None)  # says nothing of its memory
H100 = Gpu(132, 50 << 20, 227 << 10, 3.35e12)
L40S = Gpu(142, 96 << 20, 99 << 10, 0.864e12)


@pytest.fixture
def empty_table(monkeypatch, tmp_path):
    """No file of the user's; its place is free to write to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return crossover.table_path()


def limit(
    name: str,
    monkeypatch,
    method="two_level:lag",
    batch=1,
    width=WIDTH,
    offloaded=False,
    device="cuda",
    facts=SILENT,
    group=4,
) -> int:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(crossover, "gpu", lambda device: facts)
    monkeypatch.setattr(crossover, "has_triton", lambda: True)
    return crossover.dense_tokens("auto", method, torch.device(device), offloaded, batch, width, group=group)


# ---------------------------------------------------------------------- the configuration and the planner


def test_a_table_that_cannot_be_written_leaves_nothing_behind(monkeypatch, empty_table):
    def refuse(*paths):
        raise PermissionError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        user_file.save(empty_table, 1, dict, H200, {})
    assert not list(empty_table.parent.iterdir())


def test_plan(capsys):
    shape = model_shape(model("llama").config, torch.float32)
    for batch, context, below in ((1, 148, True), (1, 149, False), (2, 148, False)):
        config = TokenConfig(**{**SMALL, **TIGHT, "dense_below": 112})
        planned = plan_memory(shape, config, None, context=context, batch=batch)
        assert planned.dense_tokens == {1: 148, 2: 84}[batch]
        plan_command.show(planned, None, 1 << 30, plan_command.Owners("given", "given"))
        assert ("attend densely up to 148 tokens a row" in capsys.readouterr().err) == below
    assert plan_memory(shape, TokenConfig(dense_layers=2), None, context=100).dense_tokens == 0


def test_plan_on_a_measured_gpu(monkeypatch, empty_table):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: H200)
    shape, gpu = model_shape(model("llama").config, torch.float32), torch.device("cuda", 0)
    made = {"context": 100, "device": gpu}
    two_layers, none = TokenConfig(dense_layers=0), TokenConfig(dense_layers=2)
    assert plan_memory(shape, two_layers, None, **made).dense_tokens > 20_000  # narrow tokens
    assert plan_memory(shape, two_layers, OffloadConfig(), **made).dense_tokens == 0
    assert plan_memory(shape, none, None, **made).dense_tokens == 0  # both layers are dense anyway


# ---------------------------------------------------------------------- the table


def test_built_in(monkeypatch, empty_table):
    one, eight = limit(H200, monkeypatch), limit(H200, monkeypatch, batch=8)
    assert 8_000 < one < 16_000
    assert one / 8 < eight < one / 2, "each row costs selecting something, too"
    assert limit(H200, monkeypatch, width=WIDTH // 2) > one, "narrow tokens are read sooner"
    assert limit(H200, monkeypatch, method="two_level") > one, "without lag a step takes longer"
    assert limit(H200, monkeypatch, offloaded=True) == limit(H200, monkeypatch, device="cpu") == 0
    for unknown in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 5090"):
        assert limit(unknown, monkeypatch) == 0, "nothing is known of its memory"
    assert limit(H200, monkeypatch, method=None) == limit(H200, monkeypatch, method="new") == 0
    assert set(BUILT_IN[H200]) > set(METHODS)
    # 1,152 bytes a token; dense attention to 32k of them is as quick, to 128k it is not.
    assert all(24_000 < limit(H200, monkeypatch, method=f"{m}:mla", width=1152) < 96_000 for m in METHODS[:2])


def test_guessed(monkeypatch, empty_table):
    """A GPU without figures: what an H200 takes the same time for moves with bandwidth and processors."""
    name, methods = "NVIDIA L40S", BUILT_IN[H200]
    for method, rule in methods.items():
        assert crossover.guess(H200_FACTS, method) == rule
        rule = crossover.WITHOUT_CUDA_KERNELS.get(method, rule)  # which that GPU does not run
        slow = crossover.guess(L40S, method)
        assert slow.fixed_bytes == pytest.approx(0.18 * rule.fixed_bytes)
        assert slow.row_tokens == pytest.approx(0.18 * 132 / 142 * rule.row_tokens)
    assert 0 < limit(name, monkeypatch, facts=L40S) < limit(H200, monkeypatch) / 4
    for nothing in ({"offloaded": True}, {"device": "cpu"}, {"method": None}, {"method": "new"}):
        assert limit(name, monkeypatch, facts=L40S, **nothing) == 0
    assert limit(H200, monkeypatch, facts=L40S) == limit(H200, monkeypatch), "what is measured goes first"
    monkeypatch.setattr(crossover, "has_triton", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    assert crossover.dense_tokens("auto", "two_level", GPU, False, 1, WIDTH) == 0, "plain torch takes other times"
    crossover.save(name, {"two_level:lag": Rule(0.0, 5000.0)}, {})
    assert limit(name, monkeypatch, facts=L40S) == 5000


# Whole steps of Qwen3-8B's shape on an H200 (d4a22ac), in ms: rows, tokens of each, dense, by need (90 % of the mass).
STEPS = ((1, 32, 5.24, 4.82), (1, 128, 8.50, 5.89), (8, 32, 13.43, 7.48), (8, 64, 22.1, 9.85))


def test_by_need_as_whole_steps_say(monkeypatch, empty_table):
    """The gain of a step by need goes with the bytes beyond the rule's, for one row and for eight."""
    rule = BUILT_IN[H200]["progressive"]
    beyond = [
        rows * (thousands << 10) * WIDTH - rule.fixed_bytes - rows * WIDTH * rule.row_tokens
        for rows, thousands, _, _ in STEPS
    ]
    rate = sum(dense - sparse for *_, dense, sparse in STEPS) / sum(beyond)
    for more, (_, _, dense, sparse) in zip(beyond, STEPS):
        assert rate * more == pytest.approx(dense - sparse, abs=0.02 * dense)
    assert 15_000 < limit(H200, monkeypatch, method="progressive") < 16_000, "README's 32k tokens are selected from"
    assert 1_800 < limit(H200, monkeypatch, method="progressive", batch=8) < 2_000


# Whole steps on H200s by rows and thousands of tokens, in ms: dense, by need. Qwen2.5-Coder-0.5B (d4a22ac6), Qwen3-32B
# on one (16 layers, 293124d) and over two, Llama-3.3-70B over four (158c565).
MANY_QUERY_HEADS = {
    ("0.5B", 7, 2 * 2 * 64 * 2): ((1, 28, 1.03, 1.25), (32, 28, 3.27, 2.88)),
    ("32B", 8, 8 * 2 * 128 * 2): ((1, 32, 4.69, 4.63), (1, 128, 6.13, 5.33)),
    ("32B over two", 8, 4 * 2 * 128 * 2): ((1, 32, 11.21, 11.52), (1, 128, 14.11, 13.35), (8, 32, 19.25, 15.69)),
    ("70B over four", 8, 2 * 2 * 128 * 2): ((1, 128, 14.59, 15.09), (8, 32, 17.62, 16.60)),
}


def test_more_query_heads_for_each_kv_head(monkeypatch, empty_table):
    """Steps by need never where they lose, and everywhere where they gain more than 2 %."""
    for (name, group, width), steps in MANY_QUERY_HEADS.items():
        for rows, thousands, dense, sparse in steps:
            end = limit(H200, monkeypatch, method="progressive", batch=rows, width=width, group=group)
            selects = thousands << 10 > end
            assert selects == (sparse < 0.98 * dense), (name, rows, thousands)
    wide = {"method": "progressive", "width": WIDTH}
    assert limit(H200, monkeypatch, **wide, group=1) == limit(H200, monkeypatch, **wide, group=4)
    assert limit(H200, monkeypatch, **wide, group=16) == limit(H200, monkeypatch, **wide, group=8)
    assert limit(H200, monkeypatch, method="token_only", group=8) == limit(H200, monkeypatch, method="token_only")
    saves, takes = Rule(1e6, -100.0), Rule(1e6, 100.0)
    assert saves.times(2.0) == Rule(2e6, -100.0) and takes.times(2.0) == Rule(2e6, 200.0)


def test_an_entry_too_deep_to_write_again_goes(monkeypatch, empty_table):
    """Newer Pythons read deeper JSON than they write with an indent."""
    crossover.save("Other GPU", {"block_only": Rule(8192.0, 1.5)}, {"more": "deep"})
    dumps = json.dumps

    def shallow(held, **options):
        if "deep" in str(held):
            raise RecursionError
        return dumps(held, **options)

    monkeypatch.setattr(json, "dumps", shallow)
    crossover.save(H200, {"two_level:lag": Rule(0.0, 5000.0)}, {})
    assert limit(H200, monkeypatch) == 5000


def test_methods_have_names():
    names = {"two_level": "two_level:lag", "block": "block_only", "token": "progressive"}
    for level, name in names.items():
        assert two_level(True, level=level).shared.of_layer(0).method == name
    assert two_level(False).shared.of_layer(0).method == "two_level"
    automatic = {"level": "auto", "lag": False}
    assert two_level(False, **automatic).shared.of_layer(0).method == "progressive"
    assert two_level(False, **automatic, token_budget=32).shared.of_layer(0).method == "token_only"
    assert two_level(False, **automatic, num_blocks=128).shared.of_layer(0).method == "two_level"


def test_the_users_file_goes_first(monkeypatch, empty_table):
    saved = crossover.save(H200, {"two_level:lag": Rule(0.0, 5000.0)}, {"date": "today"})
    assert saved == empty_table
    assert limit(H200, monkeypatch) == 5000
    assert limit(H200, monkeypatch, method="two_level") > 5000, "what the file does not say is built in"
    crossover.save("Other GPU", {"block_only": Rule(8192.0, 1.5)}, {})
    assert limit(H200, monkeypatch) == 5000
    assert limit("Other GPU", monkeypatch, "block_only") == 3
    written = json.loads(empty_table.read_text())
    assert written["devices"][H200]["date"] == "today"
    assert [path.name for path in empty_table.parent.iterdir()] == ["crossover.json"]


BROKEN = {
    "not json": "{",
    "another format": '{"format": 99, "devices": {}}',
    "a list": "[]",
    "no devices": '{"format": 1, "devices": [1]}',
    "no rules": '{"format": 1, "devices": {"NVIDIA H200": {}}}',
    "no numbers": '{"format": 1, "devices": {"NVIDIA H200": {"rules": {"two_level": {"fixed_bytes": "many"}}}}}',
    "not finite": '{"format": 1, "devices": {"x": {"rules": {"two_level": {"fixed_bytes": NaN, "row_tokens": 1}}}}}',
    "too large": f'{{"format": 1, "devices": {{"x": {{"rules": {{"a": {{"fixed_bytes": 1{"0" * 400}}}}}}}}}}}',
    "deep": "[" * 100_000 + "]" * 100_000,
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_told_once(monkeypatch, empty_table, text):
    before = limit(H200, monkeypatch)
    empty_table.parent.mkdir(exist_ok=True)
    empty_table.write_text(text)
    crossover._read.cache_clear()
    with pytest.warns(UserWarning, match="calibrate-device"):
        assert limit(H200, monkeypatch) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limit(H200, monkeypatch)
    crossover.save(H200, {"two_level:lag": Rule(0.0, 7.0)}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert limit(H200, monkeypatch) == 7, "it has been written anew"


def test_no_home_directory(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(crossover, "table_path", fail)
    assert limit(H200, monkeypatch) > 0


# ---------------------------------------------------------------------- calibrate-device


def made_up(noise: float = 0.0) -> list[Timing]:
    """A GPU that reads 3 MB a microsecond; selecting takes 12 us more, 3 us a row, and reads a hundredth."""
    generator = torch.Generator().manual_seed(0)
    timings = []
    for batch, tokens in command.GRID:
        megabytes = batch * tokens * WIDTH / 1e6
        dense = 15 + megabytes / 3
        others = {"two_level": 27 + 3 * batch + megabytes / 300, "two_level:lag": 20 + batch + megabytes / 300}
        others |= {"block_only": 14 + batch / 2 + megabytes / 300, "token_only": 5 + 2 * dense}
        bent = 1 + noise * torch.randn(5, generator=generator)
        times = [t * float(b) for t, b in zip((dense, *others.values()), bent)]
        timings.append(Timing(batch, tokens, times[0], dict(zip(others, times[1:]))))
    return timings


def test_fit_finds_the_crossing():
    rules = fit(made_up(), WIDTH)
    assert set(rules) == {"two_level", "two_level:lag", "block_only"}, "twice the time at any length: no rule"
    rule = rules["two_level"]
    rate = 1e6 / (1 / 3 - 1 / 300)  # bytes a microsecond by which dense falls behind
    assert rule.fixed_bytes == pytest.approx(12 * rate)
    assert rule.row_tokens == pytest.approx(3 * rate / WIDTH)
    for batch in (1, 2, 8):
        tokens = rule.tokens(batch, WIDTH)
        megabytes = batch * tokens * WIDTH / 1e6
        assert 15 + megabytes / 3 == pytest.approx(27 + 3 * batch + megabytes / 300, rel=1e-3)
    assert rules["block_only"].fixed_bytes < 0, "quicker from the start, for one row"
    assert rules["block_only"].tokens(1, WIDTH) == 0
    assert all(wrong_by(rules[m], t, m, WIDTH) == 0 for m in rules for t in made_up())


def test_fit_bears_noise():
    exact = fit(made_up(), WIDTH)
    timings = made_up(0.03)
    rules = fit(timings, WIDTH)
    for batch in (1, 4, 16):
        found, true = (r["two_level"].tokens(batch, WIDTH) for r in (rules, exact))
        assert found == pytest.approx(true, rel=0.25)
    assert max(wrong_by(rules["two_level"], t, "two_level", WIDTH) for t in timings) < 0.15


# What `hf-sparsekv calibrate-device` measured on an H100 80GB HBM3 and an H200: rows, tokens, and microseconds of one
# layer's attention in a captured step, dense and by METHODS. Beyond 8k tokens one row's are chosen in another way, so
# no line goes through all.
TIMES = {
    "NVIDIA H100 80GB HBM3": (
        (1, 3904, 14.1, 17.9, 17.9, 16.4, 17.9),
        (1, 8000, 20.1, 20.2, 20.2, 16.4, 20.2),
        (1, 12096, 26.7, 28.3, 22.6, 16.8, 20.7),
        (1, 16192, 32.3, 28.3, 22.6, 16.9, 21.2),
        (1, 32576, 55.2, 28.6, 23.0, 17.4, 22.2),
        (4, 1856, 21.8, 28.6, 28.6, 24.9, 28.6),
        (4, 3904, 35.1, 31.8, 31.8, 26.2, 31.8),
        (4, 8000, 59.5, 39.5, 39.5, 26.6, 39.5),
        (4, 16192, 103.0, 52.6, 47.1, 27.7, 41.5),
        (16, 1856, 59.8, 45.9, 45.9, 46.6, 45.9),
        (16, 3904, 104.4, 50.0, 50.0, 48.0, 50.0),
        (16, 8000, 191.2, 56.4, 56.4, 49.5, 56.4),
    ),
    H200: (
        (1, 3904, 12.8, 17.4, 17.4, 15.9, 17.4),
        (1, 8000, 16.6, 19.6, 19.6, 16.0, 19.6),
        (1, 12096, 21.2, 27.7, 22.0, 16.2, 20.1),
        (1, 16192, 25.2, 27.8, 22.0, 16.2, 20.5),
        (1, 32576, 41.2, 28.0, 22.4, 16.5, 21.6),
        (4, 1856, 18.1, 27.0, 27.0, 24.0, 27.0),
        (4, 3904, 28.5, 30.1, 30.1, 25.2, 30.1),
        (4, 8000, 46.2, 37.9, 37.9, 25.6, 37.9),
        (4, 16192, 76.4, 50.4, 45.4, 26.7, 39.5),
        (16, 1856, 49.2, 38.4, 38.4, 41.5, 38.4),
        (16, 3904, 80.5, 42.1, 42.1, 42.9, 42.1),
        (16, 8000, 140.2, 47.2, 47.2, 44.0, 47.2),
    ),
}


def timings(gpu: str) -> list[Timing]:
    return [Timing(rows, tokens, dense, dict(zip(METHODS, others))) for rows, tokens, dense, *others in TIMES[gpu]]


def worst(rule: Rule, method: str, gpu: str) -> float:
    return max(wrong_by(rule, timing, method, WIDTH) for timing in timings(gpu))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gpu", TIMES)
def test_built_in_as_fitted(gpu, method):
    """No choice of the fitted rule, which is built in, costs more than 6 %."""
    fitted, built_in = fit(timings(gpu), WIDTH)[method], BUILT_IN[gpu][method]
    assert worst(fitted, method, gpu) < 0.06
    assert worst(built_in, method, gpu) == pytest.approx(worst(fitted, method, gpu), abs=0.001)
    for rows in (1, 4, 16):
        assert built_in.tokens(rows, WIDTH) == pytest.approx(fitted.tokens(rows, WIDTH), rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_guessed_of_an_h100(method):
    """From an H200's numbers: no choice costs more than 15 %, the default's 2."""
    guessed = crossover.guess(replace(H100, cuda_kernels=True), method)
    assert worst(guessed, method, "NVIDIA H100 80GB HBM3") < (0.02 if method == "token_only" else 0.15)


@pytest.mark.parametrize("keep", [lambda t: t.batch == 1, lambda t: t.tokens == 4096, lambda t: False])
def test_fit_needs_batches_and_lengths(keep):
    with pytest.raises(ValueError, match="two batches and two lengths"):
        fit([t for t in made_up() if keep(t)], WIDTH)


def test_calibrate_device_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "calibrate-device measures a GPU" in error("calibrate-device")
    assert "calibrate-device measures a GPU" in error("calibrate-device", "--device", "cpu")
    for heads in ("32", "8x3", "0x0", "axb"):
        assert "write for example 32x8" in error("calibrate-device", "--heads", heads, status=2)


def test_calibrate_device_writes_the_table(monkeypatch, empty_table):
    """Everything but the measurement."""
    monkeypatch.setattr(command.loading, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(command, "has_triton", lambda: True)
    monkeypatch.setattr(command, "measure", lambda *args, **kwargs: made_up())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Made-up GPU")
    out = run("calibrate-device", "--dry-run")
    assert "two_level: dense up to so many tokens a row" in out.stdout
    assert "token_only: gains nothing with the length" in out.stdout
    assert not empty_table.exists()
    assert run("calibrate-device").stdout.splitlines()[-1] == str(empty_table)
    entry = json.loads(empty_table.read_text())["devices"]["Made-up GPU"]
    assert (entry["heads"], entry["dim"], entry["dtype"]) == ("32x8", 128, "bfloat16")
    assert entry["versions"] and entry["date"] and len(entry["timings_us"]) == len(command.GRID)
    expected = fit(made_up(), WIDTH)["two_level"].tokens(2, WIDTH)
    assert limit("Made-up GPU", monkeypatch, "two_level", batch=2) == expected > 0
    monkeypatch.setattr(command, "measure", lambda *args, **kwargs: made_up()[:2])
    assert "two batches and two lengths" in error("calibrate-device")


def test_what_is_measured(monkeypatch):
    """Every step runs through the references, with and without the coarse level."""
    pytest.importorskip("triton")
    from hf_sparsekv.tuning import layer_step, timing

    ran = []

    def once(step, sets, **kwargs):
        for i in range(sets):
            step(i)
        ran.append(sets)
        return timing.Time(float(len(ran)), 0.0, 0.0)

    monkeypatch.setattr(timing, "captured", once)
    monkeypatch.setattr(layer_step, "set_count", lambda shape, device: 2)
    grid = ((2, 2048), (1, 9000))
    cpu = torch.device("cpu")
    short, long = command.measure(cpu, 4, 2, 16, torch.float32, grid)
    assert (short.batch, short.tokens, long.batch, long.tokens) == (2, 29 * 64, 1, 138 * 64)
    assert short.sparse["two_level"] == short.sparse["two_level:lag"] == short.sparse["token_only"]
    assert set(short.sparse) == set(long.sparse) == set(METHODS)
    assert len(set(long.sparse.values())) == 4
    assert ran == [2] * (6 + 8)
    assert set(short.verify) == set(long.verify) == {4, 8, 16}


def test_verifications_are_fitted_and_kept(empty_table):
    """Beyond a dense step: a fixed time, and one for each byte; never less than it."""
    made = [replace(t, verify={4: t.dense + 12 + 0.1 * t.dense, 8: t.dense - 1}) for t in made_up()]
    found = fit_verifications(made, WIDTH)
    assert (found[4].fixed, found[4].per_byte) == pytest.approx((13.5e-6, 1e-12 / 30), rel=1e-6)
    assert (found[8].fixed, found[8].per_byte) == (0, pytest.approx(0, abs=1e-18))
    assert crossover.measured("Made-up GPU").verifications == {}
    crossover.save("Made-up GPU", fit(made, WIDTH), {}, found)
    assert crossover.measured("Made-up GPU").verifications == found
    crossover.save("Made-up GPU", fit(made, WIDTH), {})
    assert crossover.measured("Made-up GPU").verifications == {}


def test_what_drafts_are_expected_to_save(monkeypatch):
    """At the crossover nothing; the bandwidth's time for what is beyond it, on each GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: H200)
    monkeypatch.setattr(crossover, "gpu", lambda device: H200_FACTS)
    rule = BUILT_IN[H200]["progressive"]
    end = rule.tokens(1, WIDTH)
    assert crossover.faster(GPU, "progressive", 1, end, WIDTH, 4) == pytest.approx(0.0, abs=1e-8)
    more = crossover.faster(GPU, "progressive", 1, end + 100_000, WIDTH, 4)
    assert more == pytest.approx(100_000 * WIDTH / (crossover.GAINS * H200_FACTS.bandwidth), rel=1e-3)
    assert crossover.faster(GPU, "progressive", 1, end, WIDTH, 8) < 0, "more query heads take longer"
    assert crossover.faster(GPU, "no method", 1, end, WIDTH, 4) is None


@pytest.mark.gpu
def test_calibrate_device_on_a_gpu(empty_table, monkeypatch):
    monkeypatch.setattr(command, "GRID", (*command.GRID[:3], (1, 65536)))
    assert "two_level:lag: dense up to" in run("calibrate-device", "--dry-run").stdout


# ---------------------------------------------------------------------- CPUs


def on_cpu(method, chosen, batch=1, width=1536, offloaded=False):
    return crossover.dense_tokens("auto", method, torch.device("cpu"), offloaded, batch, width, chosen)


def test_on_a_cpu_the_budget_counts():
    """The small model's lengths that the constants come from; what was not measured always selects."""
    assert on_cpu("token_only", 256) == pytest.approx(3370, rel=0.01)
    assert on_cpu("token_only", 1024) == pytest.approx(4640, rel=0.01)
    assert on_cpu("token_only", 1024, batch=8) < on_cpu("token_only", 1024)
    assert on_cpu("two_level", 1024) == on_cpu(None, 1024) == on_cpu("token_only", 1024, offloaded=True) == 0


def test_a_default_cache_on_a_cpu_reads_everything_of_short_prompts():
    for below, dense in (("auto", True), (None, False)):
        cache = OffloadedSparseCache(offload=None, token_budget=32, dense_below=below, window=16, dense_layers=0)
        model("llama").generate(**prompt(1, 300), past_key_values=cache, max_new_tokens=8)
        assert (cache.stats().crossover_calls > 0) == dense
        assert (cache.stats().attended_share > 0.99) == dense
