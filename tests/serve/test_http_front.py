"""Pages beside answers: pages, ids of requests, headers for browsers, and fields that nobody knows."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from http_server import openai_client, serving
from tokenizers_made import byte_level

from hf_sparsekv import __version__
from hf_sparsekv_serve.http import create_app
from hf_sparsekv_serve.http.gate import OPEN

HI = [{"role": "user", "content": "hi"}]
PAGE = "https://chat.example.org"


@pytest.fixture(scope="module")
def url(engine):
    app = create_app(engine, "m", api_key="secret", cors_origins=[PAGE], ignore_unknown_fields=True)
    with serving(app) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}) as client:
        yield client


def test_the_front_and_the_page_need_no_key_and_nothing_from_elsewhere(url):
    front = httpx.get(f"{url}/")
    assert front.json()["name"] == "hf-sparsekv" and front.json()["version"] == __version__
    assert "POST /v1/chat/completions" in front.json()["endpoints"] and '"m"' not in front.text
    page = httpx.get(f"{url}/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in page.text and not re.search(r"(src|href)=", page.text)
    for told in ("/v1/completions", "<code>response_format</code>", "<code>logit_bias</code>", "curl http"):
        assert told in page.text
    for name in front.json()["endpoints"]:
        method, path = name.split()
        assert httpx.request(method, f"{url}{path}").status_code not in (404, 405), name
    assert httpx.get(f"{url}/v1/models").status_code == 401


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((path, 200) for path in ("/", "/docs", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/m")),
        *((path, 404) for path in ("/v1/models/other", "/nothing")),
        *((path, 405) for path in ("/v1/completions", "/v1/chat/completions")),
    ],
)
def test_head_is_get_without_a_body(client, path, status):
    """As load balancers ask."""
    head, whole = client.head(path), client.get(path)
    assert (head.status_code, whole.status_code, head.content) == (status, status, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert "x-request-id" in head.headers and whole.content
    if path != "/metrics":  # which counts the requests
        assert head.headers["content-length"] == whole.headers["content-length"]


KEYED = ("/v1/models", "/v1/models/m", "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1", "/nothing")
KEYED += ("/openapi.json", "/redoc", "/docs/", "/docs/x", "/DOCS", "/health/", "/metrics/")


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "TRACE", "FOO"])
def test_what_is_there_without_the_key(url, method):
    """Any method, and whether the address exists or not."""
    with httpx.Client(base_url=url) as client:
        for path in OPEN:
            assert client.request(method, path).status_code == (200 if method in ("GET", "HEAD") else 405), path
        for path in KEYED:
            for key in (None, "", "Bearer", "Bearer secre", "Bearer secrets", "Basic secret", "secret"):
                headers = {} if key is None else {"authorization": key}
                answer = client.request(method, path, headers=headers)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", (path, key)


def test_the_documentation_names_what_needs_no_key():
    text = (Path(__file__).parents[2] / "docs/serving-http.md").read_text()
    told = re.search(r"everything but (.*?) needs\s+`Authorization: Bearer KEY`", text, re.DOTALL)
    assert set(re.findall(r"`(/[a-z]*)`", told[1])) == set(OPEN)


def test_each_answer_has_an_id_which_the_log_knows(client, caplog):
    with caplog.at_level(logging.INFO, logger="hf_sparsekv_serve.http"):
        mine = client.post("/v1/completions", json={"prompt": "ab"}, headers={"X-Request-ID": "mine.7:a-b"})
        body = {"messages": HI, "stream": True, "max_tokens": 3}
        others = [client.get("/v1/nothing"), client.get("/health"), client.post("/v1/chat/completions", json=body)]
        others += [client.get("/health", headers={"X-Request-ID": bad}) for bad in ("a b", "x" * 129, "é".encode())]
        others.append(client.get("/v1/models", headers={"Authorization": "no"}))
    assert mine.headers["x-request-id"] == "mine.7:a-b"
    ids = [answer.headers["x-request-id"] for answer in others]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"req-[0-9a-f]{16}", id) for id in ids)
    for id in ("mine.7:a-b", *ids):
        assert any(line.startswith(f"{id}: ") and " after " in line for line in caplog.messages), id
    assert re.search(r"mine.7:a-b: asked of the engine as request-\d+", caplog.text)
    assert "hi" not in re.sub(r"'/[^']*'", "", caplog.text).split()  # no prompts


def test_openais_client_knows_the_id(url):
    with openai_client(url) as client:
        client.api_key = "secret"
        answer = client.chat.completions.create(model="m", messages=HI, max_tokens=2)
        assert answer._request_id.startswith("req-")
        with pytest.raises(openai.NotFoundError, match="makes no embeddings") as error:
            client.embeddings.create(model="m", input="a")
        assert error.value.request_id.startswith("req-") and error.value.code == "not_found"


def test_fields_that_nobody_knows_are_left_out_and_named(client, engine):
    """As llama.cpp's clients send them; also those that are refused, and those of messages and their parts."""
    unknown = {"chat_id": "7", "cache_prompt": True, "odd näme\n": 1}
    for more in ({}, {"stream": True}):
        body = {"messages": HI, "max_tokens": 2, **unknown, **more}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-ignored-fields"] == "chat_id, cache_prompt, odd?n?me?"
    assert "x-ignored-fields" not in client.post("/v1/completions", json={"prompt": "a"}).headers
    left_out = client.post("/v1/completions", json={"prompt": "a", "best_of": 3})
    assert left_out.status_code == 200 and left_out.headers["x-ignored-fields"] == "best_of"
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    parts = [{"type": "text", "text": "hi", "mood": "good"}]
    messages = [{"role": "user", "content": parts, "mood": 1}]
    left_out = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **options})
    named = "messages.0.content.0.mood, stream_options.include_obfuscation, messages.0.mood"
    assert left_out.headers["x-ignored-fields"] == named, left_out.text
    wrong = client.post("/v1/completions", json={"prompt": "a", "n": 0})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "n"


def test_pages_of_a_named_origin_may_ask(client, url):
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization, content-type"
    before = httpx.options(f"{url}/v1/chat/completions", headers=asks)  # without a key, as browsers do
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in before.headers["access-control-allow-headers"].lower()
    answer = client.post("/v1/completions", json={"prompt": "a"}, headers={"Origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    wrong = client.post("/v1/completions", json={"prompt": "a", "n": 0}, headers={"Origin": PAGE})
    assert wrong.status_code == 400 and wrong.headers["access-control-allow-origin"] == PAGE
    other = {**asks, "Origin": "https://elsewhere.example"}
    assert "access-control-allow-origin" not in httpx.options(f"{url}/v1/completions", headers=other).headers
    with FakeEngine(byte_level()) as engine, serving(create_app(engine, "m")) as plain:
        assert httpx.options(f"{plain}/v1/completions", headers=asks).status_code == 405
        assert "access-control-allow-origin" not in httpx.get(f"{plain}/health", headers={"Origin": PAGE}).headers


@pytest.mark.parametrize("wrong", ["chat.example.org", "https://a/b", "", "https://"])
def test_what_is_no_origin(engine, wrong):
    with pytest.raises(ValueError, match="is no origin of web pages"):
        create_app(engine, "m", cors_origins=[wrong])
