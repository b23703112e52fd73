"""Limits of what one client takes of a server: bodies, connections, names of hosts, time of the event loop, the log."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from fake_engine import FakeEngine
from fastapi import Request
from http_server import serving
from tokenizers_made import byte_level
from waiting import wait_until

from hf_sparsekv_serve.forms.message import Message
from hf_sparsekv_serve.http import answers, bodies, create_app, prompts, shapes
from hf_sparsekv_serve.http import fields as fields_module
from hf_sparsekv_serve.http.errors import ApiError
from hf_sparsekv_serve.http.gate import Gate
from hf_sparsekv_serve.http.scan import Scan
from hf_sparsekv_serve.http.tools import AnswerReader, Reading, Style

HI = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def url(engine):
    with serving(create_app(engine, "fake", max_body=1 << 20)) as url:
        yield url


def message(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


# ---------------------------------------------------------------------- fields


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens"])
@pytest.mark.parametrize("digits", [90, 400])
@pytest.mark.parametrize("sign", ["", "-"])
def test_an_integer_of_many_digits_is_refused(url, name, digits, sign):
    body = f'{{"prompt": "a", "{name}": {sign}{"9" * digits}}}'
    response = httpx.post(f"{url}/v1/completions", content=body, headers=JSON)
    said = message(response, 400)
    assert "digits" in said or "are more than" in said or "outside the vocabulary" in said


@pytest.mark.parametrize("value", [1e39, 101, 10**60])
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_settings_that_overflow_are_refused(url, name, value):
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "a", name: value})
    assert name in message(response, 400) and response.json()["error"]["param"] == name


LONG = "x" * 300_000


@pytest.mark.parametrize(
    "fields",
    [
        {LONG: 1},
        {"model": LONG},
        {"temperature": LONG},
        {"stop": [LONG]},
        {"stop": [[LONG]]},
        {"stream_options": {LONG: 1}, "stream": True},
        {"seed": [LONG]},
        {"messages": [{"role": LONG, "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
        {"messages": [{"role": "user", "content": "a", LONG: 1}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": LONG, "arguments": "{"}}]}]},
        {"chat_template_kwargs": {LONG: []}},
    ],
    ids=lambda fields: next(iter(fields))[:20],
)
def test_what_is_long_is_quoted_shortly_and_compared_with_nothing(url, fields, monkeypatch):
    compared = []
    monkeypatch.setattr(fields_module.difflib, "get_close_matches", lambda name, *_, **__: compared.append(name) or [])
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI, **fields})
    assert len(message(response, 404 if "model" in fields else 400)) < 900
    assert all(len(name) < 100 for name in compared)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": HI * 4097}, "messages has 4,097: a request may have 4,096"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools has 129: a request may have 128"),
    ],
    ids=["messages", "tools"],
)
def test_numbers_of_things(url, fields, says):
    assert says in message(httpx.post(f"{url}/v1/chat/completions", json={"messages": HI, **fields}), 400)


@pytest.mark.parametrize("waiting", [256, 3, 0])
def test_a_list_that_could_never_wait_is_refused_as_such(waiting):
    """429 would say that it is to be sent again."""
    tokenizer = byte_level()
    with FakeEngine(tokenizer, max_waiting=waiting) as engine, serving(create_app(engine, "m")) as url:
        most = max(1, waiting)
        response = httpx.post(f"{url}/v1/completions", json={"prompt": ["a"] * (most + 1), "max_tokens": 1})
        assert f"{most} may wait here at a time. Send them in several requests" in message(response, 400)
        assert not engine.prompts
        if waiting:
            body = {"prompt": ["a"] * most, "max_tokens": 1}
            assert len(httpx.post(f"{url}/v1/completions", json=body).json()["choices"]) == most


# ---------------------------------------------------------------------- texts that are too long


def test_a_text_that_is_far_too_long_is_tokenised_in_pieces(monkeypatch):
    tokenizer = byte_level()
    seen: list[int] = []
    with FakeEngine(tokenizer) as engine, serving(create_app(engine, "m")) as url:

        class Watched:
            def __getattr__(self, name):
                return getattr(tokenizer, name)

            def __call__(self, text, **options):
                seen.append(len(text))
                return tokenizer(text, **options)

            def apply_chat_template(self, messages, **options):
                assert not options["tokenize"], "it would be tokenised whole"
                return tokenizer.apply_chat_template(messages, **options)

        engine.tokenizer = Watched()
        text = "ab " * 1_000_000
        assert "3,000,000 characters has more tokens than max_length=1000" in message(
            httpx.post(f"{url}/v1/completions", json={"prompt": text}), 400
        )
        body = {"messages": [{"role": "user", "content": text}]}
        assert "more tokens than max_length=1000" in message(httpx.post(f"{url}/v1/chat/completions", json=body), 400)
        assert seen and max(seen) <= prompts.COUNTED


def test_a_long_text_of_few_tokens_is_served(monkeypatch):
    """Texts are counted, not guessed at."""
    monkeypatch.setattr(prompts, "LIKELY", 1)
    with FakeEngine(byte_level()) as engine, serving(create_app(engine, "m")) as url:
        text = "the" * 600  # a token each
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": text, "max_tokens": 1}).json()
        assert answer["usage"]["prompt_tokens"] == 600
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"] == 602


# ---------------------------------------------------------------------- bodies


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
def test_bodies_that_are_compressed_are_refused(url, coding):
    headers = {**JSON, "content-encoding": coding}
    response = httpx.post(f"{url}/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert "without `Content-Encoding: " in message(response, 415)


def test_who_still_sends_hears_why_it_is_refused(url):
    """The connection is not closed while the client writes, or the error would be lost."""
    where = urlsplit(url)
    for _ in range(20):
        body = b"[" * 900_000
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += "Connection: close\r\n"
        with socket.create_connection((where.hostname, where.port), timeout=20) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert b"nested too deeply" in connection.recv(10_000) + connection.recv(10_000)


def test_open_bodies_are_bounded_and_small_ones_go_on(engine, monkeypatch):
    monkeypatch.setattr(bodies, "OPEN_BODIES", 2)
    with serving(create_app(engine, "m", max_body=1 << 20)) as url:
        where = urlsplit(url)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += "Content-Length: 1000000\r\n\r\n"
        open_ones = []
        for _ in range(2):
            connection = socket.create_connection((where.hostname, where.port), timeout=20)
            connection.sendall(head.encode() + b'{"prompt": "' + b"a" * 980_000)
            open_ones.append(connection)
        large = {"prompt": "a", "user": "b" * 500_000, "max_tokens": 1}

        def asked() -> int:
            return httpx.post(f"{url}/v1/completions", json=large).status_code

        wait_until(lambda: asked() == 429)
        response = httpx.post(f"{url}/v1/completions", json=large)
        assert "too many large bodies" in message(response, 429) and response.headers["retry-after"] == "1"
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 900, "max_tokens": 1}).status_code == 200
        for connection in open_ones:
            connection.close()
        wait_until(lambda: asked() == 200)


def test_bodies_that_were_read_leave_room_for_as_many_as_before(monkeypatch):
    monkeypatch.setattr(bodies, "OPEN_BODIES", 1)
    held = bodies.Bodies(250_000)

    async def receive() -> dict:
        return {"type": "http.request", "body": b" " * 200_000}

    def read():
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        return held.read(Request(scope, receive), Scan(0))

    async def ask() -> None:
        for _ in range(5):
            async with read() as body:
                assert len(body) == 200_000
        async with read():
            with pytest.raises(ApiError, match="too many large bodies"):
                async with read():
                    pass

    asyncio.run(ask())


# ---------------------------------------------------------------------- connections


def closed_after(connection: socket.socket) -> tuple[float, bytes]:
    """Seconds until the server closes, and what it has said."""
    begun, got = time.monotonic(), b""
    while part := connection.recv(1 << 16):
        got += part
    return time.monotonic() - begun, got


@pytest.mark.few
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"], ids=["silent", "half"])
@pytest.mark.parametrize("first", [True, False])
def test_a_head_has_a_time(engine, sent, first):
    with serving(create_app(engine, "m"), head_s=0.3, keep_alive_s=0.3) as url:
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
            if not first:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                connection.recv(1000)
            connection.sendall(sent)
            seconds, got = closed_after(connection)
            assert seconds < 4 and (b"HTTP/1.1 408" in got) == bool(sent)


def test_a_head_that_trickles_is_not_waited_for(engine):
    with serving(create_app(engine, "m"), head_s=0.5) as url:
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
            begun = time.monotonic()
            with pytest.raises(OSError):
                for _ in range(200):
                    connection.sendall(b"X")
                    time.sleep(0.02)
            assert time.monotonic() - begun < 3.5


def test_a_request_that_takes_longer_than_a_head_may_is_served():
    with FakeEngine(byte_level(), step_s=0.02) as slow, serving(create_app(slow, "m"), head_s=0.2) as url:
        body = {"prompt": "ab", "max_tokens": 40}
        assert httpx.post(f"{url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 40


def test_silent_connections_make_room_and_busy_ones_do_not():
    with FakeEngine(byte_level(), max_rows=0) as engine, serving(create_app(engine, "m"), most=4) as url:
        where = urlsplit(url)
        address = (where.hostname, where.port)
        silent = [socket.create_connection(address, timeout=10) for _ in range(4)]
        assert httpx.get(f"{url}/health").status_code == 200, "in the place of one that is silent"
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        busy = [socket.create_connection(address, timeout=10) for _ in range(4)]
        for i, connection in enumerate(busy):
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda i=i: engine.busy == i + 1)
        assert httpx.get(f"{url}/health").status_code == 503
        for connection in (*busy, *silent):
            connection.close()
        wait_until(lambda: not engine.busy and httpx.get(f"{url}/health").status_code == 200)


def test_many_tiny_chunks_are_refused_and_others_are_not(url, engine):
    where = urlsplit(url)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
        connection.sendall(head + b"1\r\na\r\n" * 2000)
        assert b"HTTP/1.1 400" in connection.recv(1000)
    text = json.dumps({"prompt": "a", "user": "b" * 500_000, "max_tokens": 1}).encode()
    pieces = (text[i : i + 100] for i in range(0, len(text), 100))
    assert httpx.post(f"{url}/v1/completions", content=pieces, headers=JSON).status_code == 200
    few = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    pieces = (few[i : i + 1] for i in range(len(few)))
    assert httpx.post(f"{url}/v1/completions", content=pieces, headers=JSON).status_code == 200


# ---------------------------------------------------------------------- who asks


@pytest.mark.few
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("localhost.", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("192.168.1.5", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("xlocalhost", 403),
        ("[evil.example]", 403),
        ("mine.example", 403),
        ("", 403),
        ("[", 403),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/nothing"])
def test_a_keyless_server_on_loopback_knows_its_names(url, host, status, path):
    response = httpx.get(f"{url}{path}", headers={"host": host})
    assert response.status_code == (404 if status == 200 and path == "/nothing" else status), response.text
    if status == 403:
        assert "ask it by its address, or allow the name" in message(response, 403)


LOOPBACK = ("127.0.0.1", "127.0.0.2", "127.255.255.254", "::1", "::1%lo", "::ffff:127.0.0.1", "::ffff:7f00:1")
ELSEWHERE = ("192.168.1.5", "::ffff:192.168.1.5", "fe80::1%eth0", "2001:db8::1", "::", "/run/server.sock", "", None)


def status_at(server: str | None, *headers: tuple[bytes, bytes], **options) -> int:
    """A request that has reached this address, to a keyless server."""
    sent: list[dict] = []

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask() -> None:
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": list(headers)}
        scope["server"] = None if server is None else (server, 8000)

        async def send(message: dict) -> None:
            sent.append(message)

        await Gate(app, (), options.get("allowed_hosts", ()), lambda path, status: None)(scope, None, send)

    asyncio.run(ask())
    return sent[0]["status"]


def test_loopback_is_known_however_it_is_written():
    """A socket of both families has ``::ffff:127.0.0.1`` for 127.0.0.1."""
    foreign = (b"host", b"evil.example:8000")
    assert {one: status_at(one, foreign) for one in LOOPBACK} == dict.fromkeys(LOOPBACK, 403)
    assert {one: status_at(one, foreign) for one in ELSEWHERE} == dict.fromkeys(ELSEWHERE, 200)
    for one in LOOPBACK:
        assert status_at(one, foreign, allowed_hosts=["Evil.Example."]) == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in ("localhost", "LocalHost.", "localhost:", "localhost.:8000", "127.1.2.3:80")),
        *((name, 200) for name in ("[::1]", "[::1%25lo]:8000", "[::ffff:127.0.0.1]:8000", "[FE80::1]", "0.0.0.0:8000")),
        *((name, 403) for name in ("evil.example", "evil.example.", "EVIL.example:80", "127.0.0.1.evil.example")),
        *((name, 403) for name in ("[::1].evil.example", "[::1]evil.example:80", "[[::1]]", "[]", "[", "]", ":", "")),
        *(
            (name, 403)
            for name in ("localhost:evil.example", "127.0.0.1:80:80", "localhost@evil.example", "2130706433")
        ),
        *((name, 403) for name in ("a.localhost", "localhost evil.example", "localhost,evil.example", "127.0.0.1/8")),
    ],
)
def test_names_that_a_keyless_server_has(host, status):
    assert status_at("::ffff:127.0.0.1", (b"host", host.encode())) == status


def test_what_says_where_a_request_comes_from_is_not_believed():
    """A page cannot set Host. Forwarded headers and origins say nothing about the name it was asked by."""
    foreign, own = (b"host", b"evil.example"), (b"host", b"localhost")
    for name in (b"x-forwarded-host", b"x-forwarded-for", b"forwarded", b"x-real-ip", b"origin", b"referer"):
        assert status_at("127.0.0.1", foreign, (name, b"localhost")) == 403
        assert status_at("127.0.0.1", own, (name, b"http://evil.example")) == 200  # without CORS the page reads nothing
    assert status_at("127.0.0.1", own, foreign) == status_at("127.0.0.1", foreign, own) == 403
    assert status_at("127.0.0.1") == 200  # HTTP/1.0, which no browser speaks


def test_a_server_of_both_families_knows_its_names(engine):
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with serving(create_app(engine, "m"), host="::") as url:
        found = {
            host: httpx.get(f"{url}/v1/models", headers={"host": host}).status_code
            for host in ("evil.example", "localhost")
        }
        assert found == {"evil.example": 403, "localhost": 200}
        where = urlsplit(url)
        for version, status in ((b"1.0", b"200"), (b"1.1", b"400")):  # without a Host header
            with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
                connection.sendall(b"GET /v1/models HTTP/%s\r\nConnection: close\r\n\r\n" % version)
                assert connection.recv(1000).split()[1] == status


@pytest.mark.parametrize(
    "options", [{"allowed_hosts": ["Mine.example"]}, {"allowed_hosts": ["*"]}, {"api_key": "k"}], ids=str
)
def test_other_names_are_let_in_by_whoever_allows_them(engine, options):
    with serving(create_app(engine, "m", **options)) as url:
        headers = {"host": "mine.example:80", "authorization": "Bearer k"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        other = httpx.get(f"{url}/v1/models", headers={**headers, "host": "other.example"}).status_code
        assert other == (403 if "Mine.example" in str(options) else 200)


def test_no_address_is_made_of_the_clients_host(url):
    response = httpx.post(f"{url}/v1/completions/", json={"prompt": "a"}, headers={"host": "localhost:1"})
    assert "nothing at /v1/completions/" in message(response, 404)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("application/openmetrics-text; version=x", True),
        ("application/openmetrics-text; version=", True),
        ("application/openmetrics-text;version=99999999999999999999.0.0", True),
        ("application/openmetrics-text; version=1.0.0; escaping=zz", True),
        ("text/plain; version=x", False),
        ("text/plain; version=1.0.0.0.0.0", False),
        ("text/html;;;=,,;version=;", False),
        ("", False),
    ],
)
def test_whatever_a_client_accepts_metrics_are_told(url, accept, openmetrics):
    response = httpx.get(f"{url}/metrics", headers={"accept": accept})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/openmetrics-text") == openmetrics


# ---------------------------------------------------------------------- conversations that a template does not know

KNOWS_NONE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
KNOWS_CALLS = (
    KNOWS_NONE + "{% if tools %}T{% endif %}{% for m in messages %}{{ m.tool_calls }}{{ m.thoughts }}{% endfor %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
ASKS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
HEARS = {"role": "tool", "tool_call_id": "1", "content": "18 degrees"}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([*HI, ASKS, HEARS], "messages[1] has tool_calls, but this model's chat template knows no tools"),
        ([*HI, HEARS], "messages[1] has role 'tool', but this model's chat template knows no tools"),
        ([*HI, {**ASKS, "content": "I ask"}], "has tool_calls"),
        ([{**HI[0], "thoughts": "deep"}], "a field 'thoughts' that this model's chat template does not know"),
        ([{**HI[0], "function_call": {"name": "f"}}], "a field 'function_call'"),
        ([{**HI[0], "audio": {"id": "x"}}], "a field 'audio'"),
        ([{**HI[0], "name": "Ann"}], None),
        ([{**HI[0], "audio": None, "annotations": [], "refusal": None, "tool_calls": []}], None),
        ([{"role": "assistant", "content": "a", "reasoning_content": "b"}, *HI], None),
    ],
)
def test_nothing_of_a_conversation_is_left_out_in_silence(messages, says):
    tokenizer = byte_level()
    for template in (KNOWS_NONE, KNOWS_CALLS):
        tokenizer.chat_template = template
        with FakeEngine(tokenizer) as engine, serving(create_app(engine, "m")) as url:
            response = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            refused = says is not None and (template is KNOWS_NONE or "function_call" in says or "audio" in says)
            if refused:
                assert says in message(response, 400)
                assert response.json()["error"]["param"] == "messages"
            else:
                assert response.status_code == 200, response.text


# ---------------------------------------------------------------------- answers with tool calls, and the log


def reader(form: dict | None = None) -> Reading:
    tokenizer = byte_level()
    tokenizer.chat_template += '{# <|im_start|> <tool_call> </tool_call> "arguments" tools #}{% if tools %}T{% endif %}'
    tokenizer.chat_template += "{# <think> </think> #}"
    if form is not None:
        tokenizer.response_template = form
    prompt = tokenizer("hi<|im_start|>assistant\n" if form is None else "hi<|assistant|>")["input_ids"]
    style = Style.of(tokenizer, tokenizer.chat_template, (), None if form is None else "template")
    return Reading(tokenizer, style, [{"type": "function", "function": {"name": "f"}}], prompt)


def call(name: str = "f") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


PATTERNS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


@pytest.mark.parametrize("text", [call() * 6000, "<tool_call>" * 12_000, call() * 129], ids=["calls", "tags", "few"])
def test_answers_of_many_parts_are_not_parsed_by_transformers(text, monkeypatch):
    """Its parser takes time with the parts times the text: 5 s for 128,000 characters."""
    made = reader(PATTERNS)
    monkeypatch.setattr(made._tokenizer, "parse_response", lambda *_, **__: pytest.fail("it was parsed"))
    assert made.message(text) == Message(text)


@pytest.mark.parametrize(
    ("text", "calls"),
    [(call() * 6000, 128), ("<tool_call>" * 12_000, 0), (call() * 129, 128), ("a<think>b</think>" * 8000, 0)],
    ids=["calls", "tags", "few", "thoughts"],
)
def test_answers_of_many_parts_are_read_in_time(text, calls):
    began = time.thread_time()
    read = reader().message(text)
    assert len(read.calls) == calls and read.text == call() * (text.count(call()) - calls) + text.replace(call(), "")
    assert time.thread_time() - began < 2


def test_whitespace_before_patterns_is_bounded_and_tags_do_not_mind():
    text = "see" + " " * 100_000 + call()
    assert reader(PATTERNS).message(text) == Message(text)
    read = reader().message(text)
    assert read.text == "see" and [one.name for one in read.calls] == ["f"]


@pytest.mark.parametrize("calls", [1, 2, 128])
def test_calls_up_to_the_bound_are_read_with_the_text_around_them(calls):
    text = "before\n" + "\n".join([call()] * calls) + "\nbehind" + " x" * 30_000
    read = reader().message(text)
    assert len(read.calls) == calls
    assert read.text == "before\nbehind" + " x" * 30_000


@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_are_not_read_for_calls_on_the_event_loop(stream, monkeypatch):
    """Nor are ends of answers. A few characters of a stream are."""
    threads = []
    feed, finish = AnswerReader.feed, AnswerReader.finish

    def fed(self, text):
        threads.extend([threading.current_thread().name] * (len(text) > answers.LONG))
        return feed(self, text)

    def finished(self):
        threads.append(threading.current_thread().name)
        return finish(self)

    monkeypatch.setattr(AnswerReader, "feed", fed)
    monkeypatch.setattr(AnswerReader, "finish", finished)
    tokenizer = byte_level()
    tokenizer.chat_template += '{# <|im_start|> <tool_call> </tool_call> "arguments" tools #}{% if tools %}T{% endif %}'
    answer = "the cat " * (answers.LONG // 4)
    with (
        FakeEngine(tokenizer, answer=answer, burst=1 << 14, max_length=1 << 15) as engine,
        serving(create_app(engine, "m", max_answer=None)) as url,
    ):
        tools = [{"type": "function", "function": {"name": "f"}}]
        body = {"messages": HI, "tools": tools, "stream": stream}
        assert "the cat the cat" in httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).text
    assert len(threads) == 2 and "server" not in threads


SECRETS = [
    "<tool_call>{the patient's card is 4111-1111\nERROR fake line}</tool_call>",
    '<tool_call>{"card": "4111-1111"}</tool_call>',
    "<tool_call>[" + '"4111-1111",' * 20 + "</tool_call>",
    '<tool_call>{"name": "4111-1111", "arguments": {"card": fake line}}</tool_call>',
    call() * 200 + "4111-1111",
]


@pytest.mark.parametrize("form", [None, PATTERNS], ids=["tags", "patterns"])
@pytest.mark.parametrize("text", SECRETS, ids=range(len(SECRETS)))
def test_an_answer_that_cannot_be_read_is_not_logged(text, form, caplog):
    with caplog.at_level(logging.DEBUG):
        assert reader(form).message(text).text == text.removeprefix("" if form else call() * 128)
    assert ("cannot be read" in caplog.text) == bool(form or '"arguments": {"card"' in text)
    assert "4111" not in caplog.text and "fake line" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_has_a_name_in_the_log_and_in_its_error(stream, caplog):
    with FakeEngine(byte_level(), fail_at=3) as engine, serving(create_app(engine, "m")) as url:
        for number in range(2):
            text = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "stream": stream}).text
            assert f"request-{number} has failed: RuntimeError" in text
            assert f"request-{number} has failed" in caplog.text


def test_a_defect_has_a_name_in_the_log_and_in_its_error(engine, monkeypatch, caplog):
    monkeypatch.setattr(shapes.Completion, "answer", lambda *_: 1 / 0)
    with serving(create_app(engine, "m")) as url:
        said = message(httpx.post(f"{url}/v1/completions", json={"prompt": "ab"}), 500)
        name = said.partition("(")[2].partition(" ")[0]
        assert "ZeroDivisionError" in said and name.startswith("error-")
        wait_until(lambda: f"{name}: POST '/v1/completions' has failed" in caplog.text)
