"""Models with an indexer of their own (DSA) in continuous batching: requests get the tokens of ``generate()`` alone."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from captured import Imitation
from engines import greedy, inside
from models import REFERENCE, build, model, prompt, reference

from hf_sparsekv import Engine, OffloadConfig, ServingConfig, SparseCache, TokenConfig
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.serving.opening import reserve
from hf_sparsekv.tuning.plan import model_shape, plan_memory

SMALL = TokenConfig(block_size=16, window=16, max_draft=4)
SERVING = ServingConfig(max_rows=3, max_length=260, chunk=64, prefix_cache=False)
ASKED = (150, 20), (40, 30), (1, 25), (200, 12), (77, 40)  # tokens of prompts and answers; 24 are chosen
PLACES = pytest.mark.parametrize(
    "offload", [OffloadConfig(), OffloadConfig(device_pool=0), None], ids=["host", "bare", "device"]
)
SERVED = [(name, place) for name in ("deepseek-v32", "glm-moe-dsa") for place in (OffloadConfig(), None)]
SERVED += [("axk2", None), ("hy-v4", OffloadConfig())]


def answered(net) -> list[tuple[list[int], int, list[int]]]:
    """Prompts, how many tokens to answer, and what transformers' own generate() answers to each alone."""
    found = []
    for seed, (n, tokens) in enumerate(ASKED):
        ids = prompt(1, n, seed=seed)["input_ids"].to(net.device)
        text = net.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
        found.append((ids[0].tolist(), tokens, text[0, n:].tolist()))
    return found


asked = functools.cache(lambda name: answered(reference(name)))


def serve(net, wanted: list[tuple[list[int], int, list[int]]], offload: OffloadConfig | None) -> int:
    """Five requests of an engine of three rows, and the first once more. Returns how many steps were replayed."""
    with Engine(net, None, SMALL, offload, SERVING) as engine:
        handles = [engine.submit(ids, greedy(tokens)) for ids, tokens, _ in wanted]
        for handle, (_, _, expected) in zip(handles, wanted):
            assert list(handle.result(60).token_ids) == expected
        ids, tokens, expected = wanted[0]
        again = engine.submit(ids, greedy(tokens)).result(60)
        assert list(again.token_ids) == expected and again.cached_tokens == 0
        stats = inside(engine).cache.stats()
        assert stats.sparse_calls > 0 and stats.materialised == 0
        if offload is not None and offload.device_pool != 0:
            assert stats.hit_rate > 0.3
        runner = runner_of(net)
        return 0 if runner is None else runner.replays


@pytest.mark.parametrize(
    ("name", "offload"),  # glm-moe-dsa: in the next test, too
    [pytest.param(*one, marks=pytest.mark.slow if one[0] == "glm-moe-dsa" else ()) for one in SERVED],
)
def test_requests_get_the_tokens_of_generate(name, offload):
    serve(build(name, REFERENCE.get(name, "sdpa")), asked(name), offload)


@PLACES
def test_replayed_steps(offload):
    """All steps, of every width, are replayed; most were captured when the engine opened."""
    name = "glm-moe-dsa"
    runner = Imitation(build(name, "sparsekv"))
    runner.install()
    assert serve(runner.model, asked(name), offload) > 60 and runner.eligibility.cannot is None
    runner.remove()


@pytest.mark.gpu
@PLACES
@pytest.mark.parametrize("name", ["deepseek-v32", "glm-moe-dsa"])
def test_requests_on_a_gpu(name, offload, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "relu", torch.nn.functional.softplus)  # no equal scores
    assert serve(build(name, "sparsekv").cuda(), answered(build(name, "sdpa").cuda()), offload) > 60


def follow(net, rows, texts: dict[int, list[int]], steps: int) -> None:
    """So many steps of the active rows, each of whose logits are those of its text so far, alone and at once."""
    for step in range(steps):
        tokens = torch.zeros(rows.max_rows, dtype=torch.long)
        for row in rows.active:
            texts[row].append(3 + (7 * step + 11 * row) % 90)
            tokens[row] = texts[row][-1]
        found = rows.step(net, tokens)
        for row in rows.active:
            with torch.no_grad():
                expected = reference("deepseek-v32")(torch.tensor([texts[row]])).logits[0, -1]
            torch.testing.assert_close(found[row], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("offload", "replayed"), [(OffloadConfig(), True), (None, True), (OffloadConfig(), False)])
def test_the_life_of_rows(offload, replayed, monkeypatch):
    """Rows that join, wait, go on, fork, are shortened, move and leave, over blocks that become full."""
    monkeypatch.setattr(torch.nn.functional, "relu", torch.nn.functional.softplus)  # no equal scores
    net = build("deepseek-v32", "sparsekv")
    runner = Imitation(net)
    if replayed:
        runner.install()
    rows, texts = SparseCache(SMALL, offload).rows(4, 200), {}

    def join(n: int, seed: int, chunk: int | None = None) -> int:
        ids = prompt(1, n, seed=seed)["input_ids"]
        row = rows.join(rows.prefill(net, ids, chunk))
        texts[row] = ids[0].tolist()
        return row

    join(100, 0)
    join(30, 1, chunk=8)
    follow(net, rows, texts, 3)
    rows.hold(0)
    long = join(130, 2, chunk=50)
    follow(net, rows, texts, 18)
    rows.resume(0)
    rows.crop(long, 90)  # full blocks as well
    del texts[long][90:]
    new = rows.fork(0)
    texts[new] = list(texts[0])
    follow(net, rows, texts, 3)
    rows.leave(1)
    texts[1] = texts.pop(new)
    assert rows.move(new) == 1
    rows.hold(long)
    follow(net, rows, texts, 20)
    join(5, 3)
    rows.resume(long)
    follow(net, rows, texts, 4)
    assert (runner.replays > 40) == replayed
    if replayed:
        runner.remove()


def test_a_row_may_be_full():
    net, cache = model("deepseek-v32"), SparseCache(SMALL)
    rows, ids = cache.rows(2, 64), prompt(1, 60)["input_ids"]
    rows.join(rows.prefill(net, ids))
    rows.join(rows.prefill(net, ids[:, :40]))
    texts = {0: ids[0].tolist(), 1: ids[0, :40].tolist()}
    follow(net, rows, texts, 4)
    rows.hold(0)
    follow(net, rows, texts, 20)
    rows.leave(1)
    with pytest.raises(ValueError, match=r"rows \[0\] hold max_length=64 tokens"):
        rows.resume(0)
        rows.step(net, [1, 1])


def test_rows_share_no_blocks():
    net, cache = model("deepseek-v32"), SparseCache(SMALL)
    rows = cache.rows(2, 200)
    row = rows.join(rows.prefill(net, prompt(1, 100)["input_ids"]))
    assert rows.alike_tokens is None and rows.calibration_tokens == 0
    with pytest.raises(ValueError, match="cannot share blocks: its trained indexer"):
        rows.begin(rows.blocks(row), rows.channels(row))
    with pytest.warns(UserWarning, match="share no prefixes"), Engine(net, None, SMALL):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Engine(net, None, SMALL, serving=SERVING):
            pass
    with pytest.raises(ValueError, match="leave exact out"):
        Engine(net, None, serving=ServingConfig(exact=True))


def test_what_rows_take():
    """No more than the plan says."""
    cache = SparseCache(SMALL)
    rows = cache.rows(3, 260)
    rows.join(rows.prefill(model("glm-moe-dsa"), prompt(1, 150)["input_ids"]))
    held = sum(keys.nbytes for layer in cache.layers if (keys := layer.policy.index_keys) is not None)
    plan = plan_memory(model_shape(model("glm-moe-dsa").config, torch.float32), SMALL, None, context=260, batch=3)
    assert 0 < held <= plan.index_keys


def test_blocks_with_nothing_on_the_device(monkeypatch):
    """Host memory alone limits them: no label, mean or bound of theirs is beside the indexer's keys."""
    cache = SparseCache(SMALL, OffloadConfig())
    rows = cache.rows(2, 200)
    rows.join(rows.prefill(model("deepseek-v32"), prompt(1, 100)["input_ids"]))
    assert {pool.nbytes()[0] for pool in cache.block_pools.values()} == {0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    most = SERVING.max_rows * (-(-200 // SMALL.block_size) + 1)
    assert reserve(on_gpu, cache, SERVING, 200, None) == most
    assert reserve(on_gpu, cache, replace(SERVING, max_tokens=100_000), 200, None) == most, (
        "more fit than rows can take"
    )
