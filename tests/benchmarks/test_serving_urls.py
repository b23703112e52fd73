"""The serving benchmark against servers: traces with shared documents, routing, and streams over HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import uvicorn
from models import build
from read_rows import read_rows

from benchmarks.serving import run, urls
from benchmarks.serving.trace import QUESTION, TraceConfig, make_trace, read_trace, write_trace
from hf_sparsekv import Engine, ServingConfig
from hf_sparsekv.cli import loading
from hf_sparsekv_serve.http import create_app

VOCABULARY = 97


@pytest.fixture
def tiny_shape(monkeypatch):
    """``tiny`` as a known shape; its configuration."""
    config = build("llama", "sdpa", vocab_size=VOCABULARY).config
    config.attn_implementation = None
    monkeypatch.setitem(loading.SHAPES, "tiny", lambda: config)
    return config


@contextmanager
def serving(model_id: str = "tiny"):
    """A server of random weights, in a thread; its address and its engine."""
    tokenizer, model = loading.load("random:tiny", torch.float32, torch.device("cpu"))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    with Engine(model, tokenizer, serving=ServingConfig(max_rows=4, max_length=512)) as engine:
        config = uvicorn.Config(create_app(engine, model_id), log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        until = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < until, "the server has not started"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", engine
        finally:
            server.should_exit = True
            thread.join(20)


# ---------------------------------------------------------------------- traces with documents


def test_requests_share_documents_and_the_others_are_unchanged(tmp_path):
    plain = TraceConfig(rate=2.0, seconds=500, seed=4, prompt_median=300, clip=2048)
    shared = TraceConfig(rate=2.0, seconds=500, seed=4, prompt_median=300, clip=2048, documents=8, shared=0.8)
    before, after = make_trace(plain), make_trace(shared)
    assert [one.arrival for one in before] == [one.arrival for one in after]
    about = [one for one in after if one.shared_tokens]
    assert len(about) / len(after) == pytest.approx(0.8, abs=0.05)
    assert [a for a in after if not a.shared_tokens] == [b for a, b in zip(after, before) if not a.shared_tokens]
    by_document = {}
    for one in about:
        by_document.setdefault(one.document, []).append(one)
    assert len(by_document) == 8
    for requests in by_document.values():
        first, second = (one.ids(50000) for one in requests[:2])
        tokens = requests[0].shared_tokens
        assert first[:tokens] == second[:tokens] and first[tokens:] != second[tokens:]
        assert len(first) == requests[0].prompt_tokens == tokens + QUESTION <= 2048
    write_trace(tmp_path / "shared.jsonl", shared, after)
    assert read_trace(tmp_path / "shared.jsonl") == (shared, after)
    write_trace(tmp_path / "plain.jsonl", plain, before)
    assert "document" not in (tmp_path / "plain.jsonl").read_text()


# ---------------------------------------------------------------------- without a server


def test_prompts_with_the_same_beginning_go_to_the_same_server():
    config = TraceConfig(rate=2.0, seconds=200, seed=1, prompt_median=3000, documents=6, shared=0.7)
    requests = make_trace(config)
    prompts = [one.ids(1000) for one in requests]
    turns = urls.route(requests, prompts, 2, "round")
    assert turns == [which % 2 for which in range(len(requests))]
    routed = urls.route(requests, prompts, 2, "prefix")
    places = {}
    for one, server in zip(requests, routed):
        if one.shared_tokens >= urls.ROUTE_TOKENS:
            places.setdefault(one.document, set()).add(server)
    assert len(places) >= 4 and all(len(found) == 1 for found in places.values())
    assert min(Counter(routed).values()) > 0.2 * len(requests)


# ---------------------------------------------------------------------- with servers


def test_a_trace_over_two_servers(tiny_shape, tmp_path, monkeypatch):
    """Every request is answered by one of them, with as many tokens as the trace says and a time for each."""
    monkeypatch.setattr(urls, "known_config", lambda name: tiny_shape)
    config = TraceConfig(rate=20.0, seconds=0.5, seed=2, prompt_median=80, clip=128, output_median=8, output_most=12)
    requests = make_trace(config)
    trace, rows, lines = tmp_path / "trace.jsonl", tmp_path / "rows.csv", tmp_path / "lines.jsonl"
    write_trace(trace, config, requests)
    with serving() as (first, one), serving() as (second, other):
        command = ["open", first, f"{second}/v1", "--trace", str(trace), "--name", "pair", "--csv", str(rows)]
        assert run.main([*command, "--requests", str(lines), "--timeout", "120"]) == 0
        counts = [engine.stats().requests for engine in (one, other)]
    assert abs(counts[0] - counts[1]) <= 1 and sum(counts) >= len(requests)
    found = {row["metric"]: row for row in read_rows(rows)}
    assert float(found["requests"]["value"]) == len(requests) > 4 and float(found["failed"]["value"]) == 0
    assert (
        float(found["ttft_s:p50"]["value"]) > 0
        and float(found["client_cpu"]["value"]) > 0
        and "queued_s:mean" not in found
    )
    assert found["requests"]["variant"] == "pair:urls=2:route=round:rate=20:out=8:most=12:seed=2"
    played = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [len(line["token_times"]) for line in played] == [one.output_tokens for one in requests]
    assert all(np.diff(line["token_times"]).min() >= 0 for line in played)
