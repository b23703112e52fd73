"""Refusals of the server: each with its status, OpenAI's error object, and a sentence that says what and why."""

from __future__ import annotations

import http.client
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from http_server import openai_client, serving
from tokenizers_made import byte_level, word_pieces

from hf_sparsekv_serve.http import bodies, create_app

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url(engine):
    with serving(create_app(engine, "fake", max_body=50_000)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url) as client:
        yield client


def refused(response: httpx.Response, status: int = 400, param: str | None = None) -> str:
    """The message of an error that is as OpenAI's are."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"] and isinstance(error["type"], str)
    assert error["param"] == param, error
    return error["message"]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
BOTH = [
    *(
        ({"max_tokens": n}, "max_tokens", f"max_tokens must be a positive integer, got {n!r}")
        for n in (0, 1.5, "5", True)
    ),
    ({"temperature": -1}, "temperature", "a number in [0, 100], got -1"),
    ({"temperature": float("nan")}, "temperature", "temperature must be a number in [0, 100], got nan"),
    ({"temperature": 1e400}, "temperature", "a number in [0, 100], got inf"),
    *(({"top_p": p}, "top_p", "(0, 1]") for p in (0, 1.1)),
    ({"top_k": -2}, "top_k", ">= 0"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "a number in [0.01, 100], got 0"),
    *(({"seed": seed}, "seed", "64-bit") for seed in (2**70, "a")),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": ["a"] * 33}, "stop", "32 strings at most, got 33"),
    *(({"stop": stop}, "stop", "strings") for stop in ([1], 1, {"a": 1})),
    ({"ignore_eos": "yes"}, "ignore_eos", "True or False"),
    ({"exact": 1}, "exact", "True, False or None, got 1"),
    ({"stream": "yes"}, "stream", "true or false, got a string"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true only"),
    *(({"stream": True, "stream_options": one}, "stream_options", "include_usage") for one in ({"more": 1}, 1)),
    *(({"n": n}, "n", "n must be an integer from 1 to 128") for n in (0, 129, True, "2")),
    *(({"logit_bias": one}, "logit_bias", "token ids") for one in ({"a": 1}, {"-1": 1}, {"": 1}, {"٣": 1})),
    *(({"logit_bias": one}, "logit_bias", "from -100 to 100") for one in ({"3": 101}, {"3": "1"}, {"3": None})),
    ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias", "has token 7 twice"),
    ({"logit_bias": [1]}, "logit_bias", "must be an object, got a list"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "1,024 tokens at most, got 1,025"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    *(
        ({"response_format": form}, "response_format", "response_format must be {type: text}, ")
        for form in (
            1,
            {},
            {"type": "xml"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"schema": 1}},
        )
    ),
    *(({f"{kind}_penalty": 2.5}, f"{kind}_penalty", "a number in [-2, 2]") for kind in ("presence", "frequency")),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    *(({"stop_token_ids": ids}, "stop_token_ids", "token ids") for ids in (1, "ab", [-1], [True], [1.5], {"1": 1})),
    ({"stop_token_ids": [10**9]}, "stop_token_ids", "outside the vocabulary"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids", "128 tokens at most, got 129"),
    *(({"min_tokens": n}, "min_tokens", ">= 0") for n in (-1, 1.5, "3")),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens must be at most max_tokens=8, got 9"),
    ({"min_tokens": 10**30}, "min_tokens", "min_tokens must be at most max_tokens="),
    ({"min_tokens": 2, "max_tokens": 8, "response_format": SCHEMA}, "min_tokens", "goes without grammar"),
    ({"regex": "a"}, "regex", "give structured_outputs, as"),
    ({"xyz": 1}, "xyz", "no field of this endpoint: it has "),
    ({"model": 3}, "model", "must be a string"),
]


@pytest.mark.parametrize(("fields", "param", "says"), BOTH, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("what", ["chat/completions", "completions"])
def test_fields_of_both(client, what, fields, param, says):
    body = json.dumps({**({"prompt": "a"} if what == "completions" else {"messages": HI}), **fields})
    response = client.post(f"/v1/{what}", content=body, headers={"content-type": "application/json"})
    assert says in refused(response, 400, param)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "prompt", "missing"),
        *(({"prompt": one}, "prompt", "empty") for one in ("", [], [[]], ["a", ""])),
        *(({"prompt": one}, "prompt", "must be text") for one in (3, {"a": 1}, [1, "a"], [[1], "a"], [1, True])),
        *(({"prompt": one}, "prompt", "must be text") for one in ([1.0, 2], [[[1]]], [None])),
        ({"prompt": ["a"] * 1025}, "prompt", "1,025 prompts: one request may have 1,024"),
        ({"prompt": [5, 100_000]}, "prompt", "token id 100000 is outside the vocabulary"),
        ({"prompt": [-1]}, "prompt", "token id -1 is outside the vocabulary"),
        ({"prompt": "a\ud800"}, "prompt", "surrogate"),
        ({"prompt": "a", "stop": "\udc00"}, "stop", "surrogate"),
        ({"prompt": "a" * 900, "max_tokens": 101}, "prompt", "900 tokens and an answer of up to 101 are more than"),
        ({"prompt": "a" * 1000}, "prompt", "maximum context length is 1000 tokens"),
        ({"prompt": "a", "best_of": 2}, "best_of", "not there"),
        ({"prompt": "a", "echo": True, "stream": True}, "echo", "echo goes without stream"),
        ({"prompt": "a", "echo": 1}, "echo", "true or false"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "a positive integer, got 0"),
        ({"prompt": "a", "echo": True, "max_tokens": False}, "max_tokens", "a positive integer, got False"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not there"),
        *(({"prompt": "a", "logprobs": n}, "logprobs", "an integer in [0, 20] or None") for n in (21, -1, True, "1")),
        ({"prompt": ["a"] * 3, "n": 100}, "n", "n asks for 300 answers: 256 may wait here at a time"),
        ({"prompt": "a", "messages": HI}, "messages", "no field of this endpoint"),
        ({"prompt": "a", "max_completion_tokens": 3}, "max_completion_tokens", "did you mean"),
    ],
)
def test_completions(client, fields, param, says):
    body = json.dumps(fields).encode()
    response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert says in refused(response, 400, param)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty"),
        ("hi", "must be a list of {role, content}, got a string"),
        (["hi"], "messages[0] must be an object"),
        ([{}], "messages[0].role must be one of system"),
        ([{"role": "boss", "content": "a"}], "got 'boss'"),
        ([{"role": ["user"], "content": "a"}], "role must be one of"),
        ([*HI, {"role": "user"}], "messages[1].content is missing"),
        ([{"role": "user", "content": None}], "messages[0].content is missing"),
        ([{"role": "user", "content": 3}], "must be text or a list of parts"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url': this server"),
        ([{"role": "user", "content": ["a"]}], "a part without a type"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "txt": "b"}]}],
            "a field 'txt', which no template",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "text must be a string, got null"),
        ([{"role": "user", "content": "\ud83d"}], "surrogate"),
        ([{"role": "assistant", "tool_calls": [{}]}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": 3}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [CALL]}], "arguments of 'f' are not JSON"),
    ],
)
def test_messages(client, messages, says):
    body = json.dumps({"messages": messages}).encode()
    response = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert says in refused(response, 400, "messages")


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "different things"),
        (
            {"max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens must be a positive integer, got 0",
        ),
        ({"max_tokens": 1000}, "messages", "maximum context length is 1000 tokens"),
        ({"echo": True}, "echo", "is of completions"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt", "true or false"),
        ({"continue_final_message": 1}, "continue_final_message", "true or false"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "goes without add_generation_prompt",
        ),
        ({"tools": [TOOL]}, "tools", "this model's chat template knows no tools"),
        ({"tools": 3}, "tools", "must be a list of {type: function"),
        ({"tools": [{"type": "function"}]}, "tools", "must be a list of {type: function"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is required, and there are no tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "must be auto, none, required or {type: function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "must be auto, none, required or"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "names 'g', which is not among the tools",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"functions": [{}]}, "functions", "give tools"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "must be an object"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "no variable of a template"),
        ({"chat_template_kwargs": {"messages": "a"}}, "chat_template_kwargs", "no variable of a template"),
        ({"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs", "no variable of a template"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "is not known to this model's chat template"),
        ({"reasoning_effort": 3}, "reasoning_effort", "must be text, as low, medium or high, got 3"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort",
            "different things: give one",
        ),
        ({"reasoning": {"effort": "low"}}, "reasoning", "is no field of this endpoint: give reasoning_effort"),
        ({"enable_thinking": False}, "enable_thinking", ': give chat_template_kwargs, as {"enable_thinking": false}'),
        ({"thinking": False}, "thinking", ': give chat_template_kwargs, as {"thinking": false}'),
        ({"verbosity": "low"}, "verbosity", ": say in the prompt how long"),
    ],
)
def test_chat(client, fields, param, says):
    assert says in refused(client.post("/v1/chat/completions", json={"messages": HI, **fields}), 400, param)


def test_missing_messages(client):
    assert "missing" in refused(client.post("/v1/chat/completions", json={}), 400, "messages")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"prompt": "a"', "not JSON"),
        (b"[1]", "must be a JSON object, got a list"),
        (b'"a"', "must be a JSON object, got a string"),
        (b"null", "must be a JSON object, got null"),
        (b"[" * 40_000, "nested too deeply"),
        (b'{"prompt": "a", "seed": ' + b"9" * 6000 + b"}", "a number of more than 100 digits"),
        (b'{"prompt": "a", "prompt": "b"}', "the field 'prompt' is there twice"),
        ('{"prompt": "a"}'.encode("utf-16"), "not JSON"),
        (b'{"prompt": "a"}]]', "a bracket is closed that was not opened"),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_bodies_that_are_no_json_objects(client, body, says):
    for what in ("completions", "chat/completions"):
        response = client.post(f"/v1/{what}", content=body, headers={"content-type": "application/json"})
        assert says in refused(response)


def test_what_a_client_sends_is_quoted_shortly(client):
    message = refused(client.post("/v1/completions", json={"prompt": "a", "stop": [["x" * 40_000]]}), 400, "stop")
    assert len(message) < 1000 and message.startswith("stop must be strings")
    body = b'{"prompt": "a", "\\ud800x": 1}'  # half a pair in a name, which is quoted
    response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and "no field" in response.json()["error"]["message"]


def test_only_json_comes_in(client):
    """A browser sends other types to this machine for any page, without asking."""
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}, {}):
        response = client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
        assert "Content-Type: application/json" in refused(response, 415)
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_other_models_addresses_and_methods(client):
    assert "no model 'gpt-4' here: this server has 'fake'" in refused(
        client.post("/v1/completions", json={"prompt": "a", "model": "gpt-4"}), 404, "model"
    )
    for path, why in (
        ("embeddings", "makes no embeddings"),
        ("responses/resp_1/cancel", "stores no responses"),
        ("embedding", "nothing at"),
    ):
        assert why in refused(client.post(f"/v1/{path}", json={}), 404)
    refused(client.get("/v1/completions"), 405)
    for path in ("/redoc", "/openapi.json", "/load_model"):
        refused(client.get(path), 404)


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_over_the_limit(client, engine, declared):
    body, before = json.dumps({"prompt": "a" * 60_000}).encode(), len(engine.prompts)
    content = body if declared else (body[i : i + 1000] for i in range(0, len(body), 1000))
    try:
        response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    except httpx.WriteError:  # it had not sent all when the server closed
        assert not declared
    else:
        assert "more than 50,000 bytes" in refused(response, 413)
    assert len(engine.prompts) == before


def test_a_body_that_says_it_is_shorter_than_it_is_or_nonsense(url):
    where = urlsplit(url)
    for length in ("-5", "abc", "9" * 30):
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=5)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", length)
        connection.endheaders()
        assert connection.getresponse().status in (400, 413)
        connection.close()


def test_a_body_that_does_not_come(url, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_S", 0.2)
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=5) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += "Content-Length: 100\r\n\r\n{"
        connection.sendall(head.encode())
        assert b"408" in connection.recv(1000)


@pytest.mark.parametrize("given", ["sécret", "sécret\n"], ids=["key", "line"])
def test_the_key(engine, given):
    body = {"prompt": "a"}
    with serving(create_app(engine, "fake", api_key=given)) as url, httpx.Client(base_url=url) as client:
        before = len(engine.prompts)
        for key in (None, "Bearer", "Bearer wrong", "Basic sécret", "sécret", "Bearer sécretx", "Bearer s"):
            headers = {} if key is None else {"authorization": key.encode()}
            response = client.post("/v1/completions", json=body, headers=headers)
            assert "API key is missing or wrong" in refused(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        assert client.post("/v1/completions", content=b"{" * 2_000_000).status_code == 401, "whatever the body is"
        for path in ("/v1/models", "/v1/models/fake", "/nothing", "/v1/completions/", "//v1/models"):
            refused(client.get(path), 401)
        assert len(engine.prompts) == before
        assert {client.get(path).status_code for path in ("/health", "/ready", "/metrics")} == {200}
        for kind in ("Bearer", "bearer"):
            headers = {"authorization": f"{kind} sécret".encode()}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    with pytest.raises(ValueError, match="api_key is empty"):
        create_app(engine, "fake", api_key=" ")


def test_too_many_requests_are_told_when_to_come_again():
    with (
        FakeEngine(byte_level(), step_s=0.02, max_rows=1, max_waiting=1) as engine,
        serving(create_app(engine, "fake")) as url,
        openai_client(url) as client,
    ):
        running = client.completions.create(model="fake", prompt="a", max_tokens=900, stream=True)
        next(iter(running))
        waits = client.completions.create(model="fake", prompt="b", max_tokens=900, stream=True)
        with pytest.raises(openai.RateLimitError, match="1 requests wait already") as error:
            client.completions.create(model="fake", prompt="c")
        assert error.value.response.headers["retry-after"] == "3"
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="fake", prompt=["d"])
        assert engine.busy == 2 and engine.refused["waiting"] == 2
        running.close()
        waits.close()


def test_of_a_list_that_is_refused_none_is_left_behind():
    with FakeEngine(byte_level(), step_s=0.02) as engine, serving(create_app(engine, "fake")) as url:
        response = httpx.post(f"{url}/v1/completions", json={"prompt": [[65], [66], [99_999]], "max_tokens": 900})
        assert "token id 99999" in refused(response, 400, "prompt")
        until = time.monotonic() + 5
        while engine.busy and time.monotonic() < until:
            time.sleep(0.01)
        assert not engine.busy and engine.counts["cancelled"] == 2


def test_an_engine_that_drains_or_has_failed():
    with (
        FakeEngine(byte_level()) as engine,
        serving(create_app(engine, "fake")) as url,
        httpx.Client(base_url=url) as client,
    ):
        assert client.get("/ready").json() == {"status": "ready"}
        engine.drain()
        assert "drains" in refused(client.get("/ready"), 503)
        assert client.get("/health").json() == {"status": "ok"}
        assert "drains" in refused(client.post("/v1/completions", json={"prompt": "a"}), 503)
        engine.failed = MemoryError("no room")
        for path in ("/ready", "/health"):
            assert "MemoryError: no room" in refused(client.get(path), 503)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails(stream):
    with FakeEngine(byte_level(), fail_at=3) as engine, serving(create_app(engine, "fake")) as url:
        body = {"messages": HI, "stream": stream}
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
        if not stream:
            assert "RuntimeError: the fake engine was told to fail" in refused(response, 500)
            return
        events = [json.loads(part[6:]) for part in response.text.split("\n\n") if part.startswith("data: ")]
        assert response.status_code == 200 and "told to fail" in events[-1]["error"]["message"]
        with openai_client(url) as client, pytest.raises(openai.APIError, match="told to fail"):
            list(client.chat.completions.create(model="fake", messages=HI, stream=True))


def test_a_template_that_is_missing_or_refuses():
    body = {"messages": HI, "max_tokens": 1}
    with FakeEngine(word_pieces()) as engine, serving(create_app(engine, "fake")) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert "no chat template: use /v1/completions" in refused(response, 400, "messages")
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with FakeEngine(tokenizer) as engine, serving(create_app(engine, "fake")) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert "refuses these messages: roles must alternate" in refused(response, 400, "messages")


def test_a_model_without_a_tokenizer(engine, monkeypatch):
    monkeypatch.setattr(engine, "tokenizer", None)
    app = create_app(engine, "fake")
    with serving(app) as url:
        assert "no tokenizer" in refused(httpx.post(f"{url}/v1/completions", json={"prompt": "a"}), 400, "prompt")
        assert "no chat template" in refused(
            httpx.post(f"{url}/v1/chat/completions", json={"messages": HI}), 400, "messages"
        )


def test_tools_of_a_model_that_writes_calls_in_a_way_of_its_own():
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}"
    with FakeEngine(tokenizer) as engine, serving(create_app(engine, "fake")) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI, "tools": [TOOL]})
        assert "does not say how calls of tools are written" in refused(response, 400, "tools")
