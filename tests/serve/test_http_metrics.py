"""Metrics as Prometheus reads them, by its own parser."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import httpx
import prometheus_client
import pytest
from fake_engine import BOUNDS, FakeEngine
from http_server import serving
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from tokenizers_made import byte_level
from waiting import wait_until

from hf_sparsekv.serving.stats import EngineStats, Samples
from hf_sparsekv.telemetry.prompt_stats import PromptStats
from hf_sparsekv_serve.http import create_app, metrics, shapes

P = metrics.PREFIX


@pytest.fixture
def engine():
    with FakeEngine(byte_level()) as engine:
        yield engine


def samples(url: str) -> dict[tuple, float]:
    """``(name, *label values) -> value``."""
    families = parse(httpx.get(f"{url}/metrics").text)
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_counts_are_the_engines(engine):
    with serving(create_app(engine, "m")) as url:
        for _ in range(3):
            httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 5})
        httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "n": 0})
        httpx.get(f"{url}/v1/models/m")
        engine.refused["waiting"] += 2
        found, stats = samples(url), engine.stats()
        assert found[P + "requests_total",] == 3 == stats.requests
        assert found[P + "requests_finished_total",] == 3
        assert found[P + "prompt_tokens_total",] == 9 and found[P + "generated_tokens_total",] == 15
        assert found[P + "decode_steps_total",] == stats.steps
        assert found[P + "requests_refused_total", "waiting"] == 2
        assert found[P + "requests_running",] == 0 and found[P + "ready",] == 1
        assert found[P + "host_limit_bytes",] == 1 << 30
        assert found[P + "time_to_first_token_seconds_count",] == 3
        assert found[P + "time_between_tokens_seconds_count",] == 12
        assert found[P + "request_seconds_sum",] == pytest.approx(stats.total_s.sum)
        buckets = [found[P + "request_seconds_bucket", bound] for bound in (*map(str, BOUNDS), "+Inf")]
        assert buckets == sorted(buckets) and buckets[-1] == 3
        assert found[P + "http_requests_total", "/v1/completions", "200"] == 3
        assert found[P + "http_requests_total", "/v1/completions", "400"] == 1
        assert found[P + "http_requests_total", "other", "200"] == 1
        engine.drain()
        assert samples(url)[P + "ready",] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_counted_once(engine, monkeypatch, stream):
    """As what it has become: a stream that breaks off behind its status line is no success as well."""

    def fails(*args):
        raise AttributeError("a defect")

    monkeypatch.setattr(shapes.Completion, "last" if stream else "answer", fails)
    with serving(create_app(engine, "m")) as url:
        body = {"prompt": "abc", "max_tokens": 5, "stream": stream}
        if stream:
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.post(f"{url}/v1/completions", json=body)
        else:
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 500
        counted = lambda: {k[1:]: n for k, n in samples(url).items() if k[0] == P + "http_requests_total"}  # noqa: E731
        wait_until(lambda: ("/v1/completions", "500") in counted())
        assert {status: n for (path, status), n in counted().items() if path == "/v1/completions"} == {"500": 1}


def test_a_stream_is_counted_when_it_has_ended(engine):
    with serving(create_app(engine, "m")) as url:
        body = {"prompt": "abc", "max_tokens": 5, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            response.read()
        assert samples(url)[P + "http_requests_total", "/v1/completions", "200"] == 1


def test_what_sparse_prompts_have_covered(engine, monkeypatch):
    """By layer; heads are told apart where they are covered least, or became dense."""
    one = PromptStats(3, 0.25, (0.5, 0.0), 4, 0.9, (0.85, 0.95), (0.8, 0.9), 100, 2, (1, 1), (0, 1))
    other = PromptStats(4, 1.0, (1.0, 1.0), 0, None, (None, None), (1.0, 1.0), 50, 2, (0, 0), (0, 0))
    plain = engine.stats
    monkeypatch.setattr(engine, "stats", lambda: replace(plain(), prompts=(one, other)))
    with serving(create_app(engine, "m")) as url:
        found = {key: value for key, value in samples(url).items() if key[0].startswith(P + "prompt_")}
    told = {key: value for key, value in found.items() if not key[0].endswith("_created")}
    del told[P + "prompt_tokens_total",]
    by_layer = {
        "blocks_total": (100, 50),
        "blocks_attended_total": (25, 50),
        "audited_rows_total": (4, 0),
        "covered_rows_total": (pytest.approx(3.6), 0),
        "choices_total": (4, 4),
        "choices_again_total": (2, 0),
    }
    expected = {
        (f"{P}prompt_{name}", layer): value
        for name, values in by_layer.items()
        for layer, value in zip(("3", "4"), values)
    }
    # A head and its layer.
    expected[P + "prompt_choices_dense_total", "1", "3"] = 1
    expected[P + "prompt_least_covered_ratio", "0", "3"] = 0.85
    assert told == expected


def test_docs_name_what_is_told(engine):
    """Every metric of the page, and no other. In its table ``a_b, _c`` are ``a_b`` and ``a_c``."""
    text = (Path(__file__).parents[2] / "docs" / "serving-http.md").read_text()
    named, last = set(), ""
    for row in re.findall(r"^\| (`.+?) \|", text[text.index("## Metrics") :], re.M):
        for name in re.findall(r"`([a-z_]+)(?:\{.*?\})?`", row):
            if name.startswith("_"):
                tail = "_total" if last.endswith("_total") else ""
                name = last.removesuffix(tail).rpartition("_")[0] + name
            last = name
            named.add(name)
    engine.refused["waiting"] += 1
    with serving(create_app(engine, "m")) as url:
        httpx.get(f"{url}/health")
        families = parse(httpx.get(f"{url}/metrics").text)
        told = {family.name + "_total" * (family.type == "counter") for family in families}
    assert {P + name for name in named} == {name for name in told if not name.endswith("_created")}


def test_openmetrics_if_it_is_asked_for(engine):
    with serving(create_app(engine, "m")) as url:
        response = httpx.get(f"{url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        assert P + "requests" in {family.name for family in parse_openmetrics(response.text)}
        assert httpx.get(f"{url}/metrics").headers["content-type"].startswith("text/plain")


def test_two_servers_in_a_process_share_nothing(engine):
    before = list(prometheus_client.REGISTRY.collect())
    create_app(engine, "one")
    create_app(engine, "two")
    assert {one.name for one in prometheus_client.REGISTRY.collect()} == {one.name for one in before}


def test_every_field_of_the_stats_is_told(engine):
    told = {field for field, _ in (*metrics.NOW.values(), *metrics.COUNTS.values(), *metrics.TIMES.values())}
    assert told | {"refused", "host_limit", "prompts"} == {field.name for field in fields(EngineStats)}


def test_a_histogram_counts_what_is_below_each_bound():
    made = metrics.histogram("t", "t", Samples((0.5, 2.0), (3, 0, 4), 9.5))
    assert [(one.labels.get("le"), one.value) for one in made.samples if one.name == "t_bucket"] == [
        ("0.5", 3), ("2.0", 3), ("+Inf", 7),
    ]  # fmt: skip
    assert {one.name: one.value for one in made.samples if not one.labels} == {"t_count": 7, "t_sum": 9.5}
