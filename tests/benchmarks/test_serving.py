"""The serving benchmark over systems: the same bytes for all, and each command's rows."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import inside
from models import build
from read_rows import read_rows

from benchmarks.serving import client, ours, run, trace
from benchmarks.serving.client import (
    play,
)
from benchmarks.serving.replayed import ReplayedKeys, RowQueries, replaying
from benchmarks.serving.settings import Settings
from benchmarks.serving.trace import Request, TraceConfig, make_trace, read_trace, write_trace
from benchmarks.serving.vllm_engine import VllmSystem
from hf_sparsekv import Sampling, SparseCache
from hf_sparsekv.kv.read_back import materialise

pytestmark = pytest.mark.slow

VOCABULARY = 97


# ---------------------------------------------------------------------- systems


def settings(**others) -> Settings:
    config = build("llama", "sdpa").config
    kind = {"kv_gpu": 1 << 22, "kv_host": 1 << 24, "max_rows": 3, "max_length": 256, "chunk": 64, **others}
    return Settings("tiny", config, "float32", **kind)


def test_all_systems_get_the_same_bytes():
    made = settings()
    assert made.token_bytes == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, channels, float32
    assert made.gpu_tokens == (1 << 22) // 512
    with pytest.raises(ValueError, match="hold 200 tokens of keys and values, a request may have 256"):
        _ = settings(kv_gpu=200 * 512).gpu_tokens
    config = ours.TokenConfig(dense_layers=1, window=16, max_draft=4, sinks=4)
    assert ours.memory(made, ours.RUNGS["sparse"], config) == (made.gpu_tokens, None)
    tokens, offload = ours.memory(made, ours.RUNGS["offload"], config)
    stays = 512 * (1 / 2 + ours.INDEX_SHARE)
    assert tokens == int((1 << 22) / 2 / stays)
    assert offload.device_pool == int((1 << 22) - 3 * 24 * 512 - tokens * stays)
    assert offload.max_host_bytes == 1 << 24
    tokens, _ = ours.memory(settings(kv_host=1 << 22, kv_gpu=1 << 24), ours.RUNGS["offload"], config)
    assert tokens == (1 << 22) // 512, "a dense layer's tokens need none"
    tokens, _ = ours.memory(settings(kv_host=1 << 22, kv_gpu=1 << 24, max_rows=150), ours.RUNGS["offload"], config)
    blocks = -(-tokens // 64) + 150 + 20
    assert 0.9 < blocks * 64 * 512 / 2 / (0.98 * (1 << 22)) <= 1
    with pytest.raises(ValueError, match="do not hold 3 rows"):
        ours.memory(settings(kv_host=100 * 512), ours.RUNGS["offload"], config)


def test_the_dense_system_is_dense_with_all_rows():
    """Together they hold more than one may."""
    system = ours.OurSystem(build("llama", "sdpa"), settings(), "dense", budget=16, block_size=16, window=16)
    try:
        ids = [[n % 90 + 1 for n in range(199)]] * 3
        handles = [system.submit(one, Sampling(max_tokens=20, temperature=0, ignore_eos=True)) for one in ids]
        assert all(len(handle.result(60).token_ids) == 20 for handle in handles)
        stats = inside(system.engine).cache.stats()
    finally:
        system.close()
    assert stats.dense_calls > 0 == stats.sparse_calls


class FakeVllm:
    """As much of vLLM's engine as is used: one request runs at a time, its tokens come a step late."""

    def __init__(self, **given) -> None:
        self.given, self.llm_engine = given, self
        self.config = json.loads((Path(given["model"]) / "config.json").read_text())
        self.scheduler = SimpleNamespace(running=[])
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.waiting, self.late, self.idle_steps = [], [], 0

    def add_request(self, name, prompt, params):
        if len(prompt["prompt_token_ids"]) + params.max_tokens > self.given["max_model_len"]:
            raise ValueError("too long")
        assert params.ignore_eos and params.temperature == 0 and params.output_kind == "delta"
        self.waiting.append(SimpleNamespace(request_id=f"{name}-inner", name=name, left=params.max_tokens))
        return f"{name}-inner"

    def abort_request(self, names):
        self.waiting = [one for one in self.waiting if one.name not in names]
        self.scheduler.running = [one for one in self.scheduler.running if one.name not in names]

    def has_unfinished_requests(self):
        return bool(self.waiting or self.scheduler.running)

    def step(self):
        found, self.late = self.late, []
        self.idle_steps += not self.has_unfinished_requests()
        if not self.scheduler.running and self.waiting:
            self.scheduler.running.append(self.waiting.pop(0))
        for one in self.scheduler.running[:1]:
            one.left -= 1
            outputs = [SimpleNamespace(token_ids=[one.left], finish_reason="length" if one.left == 0 else None)]
            self.late.append(SimpleNamespace(request_id=one.name, outputs=outputs, finished=one.left == 0))
            if one.left == 0:
                self.scheduler.running.clear()
        time.sleep(0.001)
        return found


@pytest.fixture
def vllm(monkeypatch) -> SimpleNamespace:
    """A module of this name; its engine is the one above, until another is put there."""
    fake = SimpleNamespace(LLM=FakeVllm, SamplingParams=lambda **given: SimpleNamespace(**given))
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    return fake


def test_vllms_steps_are_told_to_requests(vllm):
    system = VllmSystem(settings(max_rows=5))
    requests = [Request(0.0, 10, 4, 1), Request(0.0, 10, 3, 2), Request(0.0, 300, 3, 2), Request(0.05, 10, 1, 3)]
    played = play(system, requests, VOCABULARY, timeout=30)
    assert [one.error for one in played] == [None, None, "ValueError: too long", None]
    assert [len(one.token_times) for one in played] == [4, 3, 0, 1]
    assert played[1].queued_s >= played[0].queued_s + 0.004  # it waits for four steps of the first
    assert all(one.queued_s <= one.ttft_s for one in played if one.error is None)
    handles = [system.submit([1] * 10, client.greedy(n)) for n in (200, 200)]
    time.sleep(0.05)
    for handle in handles:
        handle.cancel()
    running, waiting = (handle.result(30) for handle in handles)
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    assert 0 < len(running.token_times) < 200 and waiting.token_times == ()
    engine = system._engine
    system.close()
    assert 0 < engine.idle_steps <= 10  # its loop does not spin when there is nothing to do
    assert engine.config["architectures"] == ["LlamaForCausalLM"]
    assert engine.given["kv_cache_memory_bytes"] == 1 << 22
    assert engine.given["compilation_config"] == {"cudagraph_capture_sizes": [1, 2, 4, 5]}
    assert not Path(engine.given["model"]).exists()


def test_rows_ask_at_places_of_their_own():
    sequence = torch.arange(5.0).view(5, 1, 1, 1, 1) + torch.arange(2.0).view(1, 1, 2, 1, 1) * 100
    queries = RowQueries(sequence.expand(5, 3, 2, 4, 8).contiguous(), 4)
    found = []
    for _ in range(20):
        assert queries.buffer.shape == (3, 4, 4, 8)
        found.append(queries.buffer[0, :, 0, 0].tolist())
        queries.next(range(4))
    for row, walk in enumerate(zip(*found)):
        steps = [value % 100 for value in walk]
        assert {value // 100 for value in walk} == {row % 2}  # its lane
        assert set(steps) == {0, 1, 2, 3, 4}
        assert all(abs(a - b) == 1 for a, b in itertools.pairwise(steps))  # and back again
    assert len({walk[:5] for walk in zip(*found)}) == 4
    before = queries.buffer[0, :, 0, 0].tolist()
    queries.next([0, 2])
    after = queries.buffer[0, :, 0, 0].tolist()
    assert [a == b for a, b in zip(before, after)] == [False, True, False, True]  # who is held stays
    queries.move(0, 3)
    queries.next([])
    assert queries.buffer[0, :, 0, 0].tolist() == [after[3], after[1], after[2], after[0]]


def test_what_is_cached_of_a_prompt_is_replayed_and_its_attention_is_not():
    net = build("llama", "sparsekv")
    config = ours.TokenConfig(block_size=16, window=16, dense_layers=0, dense_below=0, token_budget=16)
    keys = ReplayedKeys(net, 300, 120)
    ids = torch.tensor([Request(0.0, 200, 1, 1).ids(VOCABULARY)])
    plain = SparseCache(config).rows(3, 300)
    with replaying(keys, net):
        rows = SparseCache(config).rows(3, 300)
    assert SparseCache(config).rows(3, 300).cache.beside().bind.__name__ == "bind"  # others are left alone
    first, other = rows.prefill(net, ids), rows.prefill(net, ids)
    torch.testing.assert_close(first.logits, plain.prefill(net, ids).logits)
    for layer in range(keys.layers):
        held, next_held = (materialise(made.cache.sparse_layers[layer].store)[0] for made in (first, other))
        at = 37 * config.block_size
        assert torch.equal(held[:, :, 4:], keys.keys[layer][:, :, at + 4 : at + 200])
        assert torch.equal(next_held[:, :, 4:], keys.keys[layer][:, :, 2 * at + 4 : 2 * at + 200])
        assert held[:, :, :4, 0].abs().min() > 0 and held[:, :, :4, 1:].abs().max() == 0  # sinks
    # In two pieces: the same keys.
    pieces = rows.prefill(net, ids, chunk=128)
    held = materialise(pieces.cache.sparse_layers[0].store)[0]
    at = 3 * 37 * config.block_size
    assert torch.equal(held[:, :, 4:], keys.keys[0][:, :, at + 4 : at + 200])
    # Steps ask with the walk's queries: the second row with the second lane's, and others than in the step before.
    asked = []
    layer = rows.cache.sparse_layers[1]
    own = layer.policy.attend
    rows.join(first), rows.join(other)
    layer.policy.attend = lambda q, *others: asked.append(q.clone()) or own(q, *others)
    for _ in range(2):
        rows.step(net, torch.zeros(3, dtype=torch.long))
    for row, moves in ((0, (1, 2)), (1, (1, 2)), (2, (0, 0))):  # nobody is in the third
        walk = keys.queries[:, 1, row]
        places = [(walk == q[row]).flatten(1).all(1).nonzero().flatten().tolist() for q in asked]
        assert places == [[29 * row + moved] for moved in moves]


def run_serving(command: str, tiny, tmp_path) -> list[dict]:
    path = tmp_path / "serving.csv"
    shared = f"--model {tiny} --device cpu --kv-gb 0.05 --host-gb 0.05 --max-rows 2 --chunk 32 --csv {path}"
    assert run.main(f"{command} {shared}".split()) == 0
    return read_rows(path)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A saved model; two of its layers choose."""
    path = tmp_path_factory.mktemp("model") / "Tiny"
    build("llama", "sdpa", num_hidden_layers=4).save_pretrained(path)
    return path


@pytest.fixture
def short(tmp_path, monkeypatch):
    """A file with a short trace, and short lengths for others."""
    for name, value in {"PROMPT_SIGMA": 0.2, "OUTPUT_SIGMA": 0.2}.items():
        monkeypatch.setattr(trace, name, value)
    monkeypatch.setattr(run, "LEAST", 2)
    path, config = tmp_path / "trace.jsonl", TraceConfig(5.0, 1.0, 300, 1, 250, 0.2, 6, 0.3)
    write_trace(path, config, make_trace(config))
    return path


SYSTEMS = [
    "dense",
    "sparse --budget 16",
    "sparse --budget 16 --kv replayed",
    "offload --budget 16 --kv replayed",
]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_trace_against_a_system(system, tiny, tmp_path, short):
    file = tmp_path / "requests.jsonl"
    rows = run_serving(f"open {system} --trace {short} --requests {file}", tiny, tmp_path)
    found = {row["metric"]: row for row in rows}
    _, requests = read_trace(short)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["arrival"], len(one["token_times"])) for one in lines] == [
        (r.arrival, r.output_tokens) for r in requests
    ]
    assert all(0 <= one["queued_s"] <= one["ttft_s"] <= one["total_s"] for one in lines)
    assert {one["variant"] for one in lines} == {rows[0]["variant"]}
    assert float(found["requests"]["value"]) == len(requests)
    assert float(found["failed"]["value"]) == 0
    assert float(found["ttft_s:p99"]["value"]) >= float(found["ttft_s:p50"]["value"]) > 0
    assert float(found["queued_s:mean"]["value"]) >= 0
    assert float(found["tokens_per_s"]["value"]) > 0
    name, *options = system.split()
    assert found["requests"]["variant"].startswith(f"{name}:gpu=0.05gb")
    assert ("kv=replayed" in found["requests"]["variant"]) == ("replayed" in options)
    if name == "offload":
        assert 0 < float(found["hit_rate"]["value"]) < 1 and float(found["host_mb"]["value"]) > 0


def test_a_sweep_ends_where_the_limits_are_broken(tiny, tmp_path, short):
    command = "goodput dense --rates 0.01 4 8 --seconds 1 --clip 100 --prompt 40 --output 6 --iteration-ms 1e5"
    with pytest.raises(SystemExit, match=r"no request arrives at rate 0.01 within 1 s"):
        run_serving(command, tiny, tmp_path)
    rows = run_serving(command.replace("0.01 4 8", "4 8"), tiny, tmp_path)
    assert [float(row["value"]) for row in rows if row["metric"] == "goodput_rps"] == [8.0]
    strict = run_serving(command.replace("0.01 4 8", "4 8").replace("1e5", "1e-6"), tiny, tmp_path)[len(rows) :]
    assert [float(row["value"]) for row in strict if row["metric"] == "goodput_rps"] == [0.0]
    assert not any("rate=8" in row["variant"] for row in strict)
