"""Parts that run in Ray Serve's own processes, without Ray: hints, errors of lost replicas, numbers of replicas."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hf_sparsekv_serve.ray import proxy
from hf_sparsekv_serve.ray.proxy import LOST, PromptGate, hint
from hf_sparsekv_serve.ray.scaling import ByRows, Fitting

DOCUMENT = "All work and no play. " * 20


def body(prompt: str, **fields) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": prompt}], "model": "m", **fields}).encode()


def test_hints_are_equal_for_prompts_that_begin_alike():
    one, other = hint(body(DOCUMENT + "Why?"), 300), hint(body(DOCUMENT + "When?", temperature=0), 300)
    assert one is not None and one == other
    assert hint(body("An" + DOCUMENT), 300) not in (None, one)
    assert hint(body(DOCUMENT), 600) is None, "shorter than what counts"
    first = json.dumps({"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": DOCUMENT}]}).encode()
    assert hint(first, 300) == one, "fields before the prompt do not count"
    assert hint(b"", 300) is None and hint(b'{"model": "m"}' * 100, 300) is None


class Proxied:
    """Stands for Ray's proxy: reads the body and answers with what it is told to send."""

    def __init__(self, messages: list[dict]) -> None:
        self.messages = messages
        self.body, self.headers = b"", []

    async def __call__(self, scope, receive, send) -> None:
        self.headers = scope["headers"]
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.body += message["body"]
            if not message["more_body"]:
                break
        for message in self.messages:
            await send(message)


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
STREAM = {**START, "headers": [(b"Content-Type", b"text/event-stream; charset=utf-8")]}
WHOLE = [START, {"type": "http.response.body", "body": b"{}"}]


def ask(messages=WHOLE, parts=None, path="/v1/completions", headers=(), method="POST"):
    """Requests that the proxy gets, and answers that the client gets."""
    proxied, sent = Proxied(list(messages)), []
    parts = [body(DOCUMENT)] if parts is None else parts
    incoming = [{"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)]
    left = iter([*incoming, {"type": "http.disconnect"}])

    async def receive():
        return next(left)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
    asyncio.run(PromptGate(proxied, 300, "X-Session-Id")(scope, receive, send))
    return proxied, sent


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_the_body_passes_whole_and_the_hint_is_a_header(size):
    whole = body(DOCUMENT * 30)
    proxied, sent = ask(parts=[whole[i : i + size] for i in range(0, len(whole), size)])
    assert proxied.body == whole and sent == WHOLE
    assert proxied.headers == [(b"x-session-id", hint(whole, 300).encode())]


def test_a_long_beginning_without_a_prompt_is_not_kept_waiting_for():
    whole = json.dumps({"user": "u" * 20_000, "prompt": DOCUMENT}).encode()
    proxied, _ = ask(parts=[whole[:9_000], whole[9_000:]])
    assert proxied.body == whole and proxied.headers == []


@pytest.mark.parametrize("name", [b"x-session-id", b"x_session_id"])
def test_a_session_of_the_clients_own_stays(name):
    proxied, _ = ask(headers=[(name, b"mine")])
    assert proxied.headers == [(name, b"mine")] and proxied.body == body(DOCUMENT)


@pytest.mark.parametrize(("path", "method"), [("/metrics", "GET"), ("/v1/models", "GET"), ("/else", "POST")])
def test_other_addresses_pass(path, method):
    proxied, sent = ask(path=path, method=method)
    assert proxied.headers == [] and sent == WHOLE


def test_a_client_that_leaves_within_its_body_is_passed_on():
    incoming = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive():
        return next(incoming)

    async def send(message):
        pass

    proxied = Proxied([])
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(PromptGate(proxied, 300, "x-session-id")(scope, receive, send))
    assert proxied.body == b"{"


def test_a_client_that_sends_slowly_is_passed_on(monkeypatch):
    monkeypatch.setattr(proxy, "HEAD_S", 0.02)
    parts = iter([(0, b"{", True), (0.2, body(DOCUMENT)[1:], False)])

    async def receive():
        seconds, part, more = next(parts)
        await asyncio.sleep(seconds)
        return {"type": "http.request", "body": part, "more_body": more}

    taken = []

    async def app(scope, receive, send):
        assert scope["headers"] == []
        taken.append(await receive())

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(PromptGate(app, 300, "x-session-id")(scope, receive, send))
    assert taken == [{"type": "http.request", "body": b"{", "more_body": True}]


def test_a_replica_lost_before_its_answer_is_a_503():
    _, (start, content) = ask(messages=[])
    assert start["status"] == 503
    error = json.loads(content["body"])["error"]
    assert error == {"message": LOST, "type": "server_error", "param": None, "code": "replica_lost"}
    assert dict(start["headers"])[b"content-length"] == str(len(content["body"])).encode()


def test_a_replica_lost_within_a_stream_is_its_last_event():
    piece = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
    _, sent = ask(messages=[STREAM, piece])
    assert sent[:2] == [STREAM, piece] and not sent[2].get("more_body", False)
    assert json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    ended = [STREAM, piece, {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}]
    assert ask(messages=ended)[1] == ended


def test_settings_of_a_proxy_are_checked(monkeypatch):
    monkeypatch.setenv("HF_SPARSEKV_ROUTE_BYTES", "many")
    with pytest.raises(ValueError, match="HF_SPARSEKV_ROUTE_BYTES must be an integer >= 1, got 'many'"):
        proxy.middlewares()
    monkeypatch.setenv("HF_SPARSEKV_ROUTE_BYTES", "77")
    (made,) = proxy.middlewares()
    assert made.kwargs == {"route_bytes": 77, "header": "x-session-id"}


def test_a_proxy_does_not_import_torch():
    code = "import sys, hf_sparsekv_serve.ray.proxy, hf_sparsekv_serve.ray.scaling; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "False\n"


# ---------------------------------------------------------------------- how many replicas


def test_rows_that_fit_are_those_that_run_while_others_wait():
    fitting = Fitting(32)
    assert fitting.seen(running=20, waiting=0, held=0, prefilling=1) == 32  # nothing says otherwise
    assert fitting.seen(running=9, waiting=3, held=0, prefilling=0) == 9
    assert fitting.seen(running=4, waiting=0, held=0, prefilling=0) == 9  # fewer were asked for
    assert fitting.seen(running=12, waiting=0, held=0, prefilling=0) == 12
    assert fitting.seen(running=6, waiting=0, held=2, prefilling=1) == 7  # working sets
    assert fitting.seen(running=0, waiting=5, held=0, prefilling=0) == 1


def context(asked: list[float], fits: list[float], queued: float = 0.0, target: int = 2):
    named = [{f"replica-{i}": value for i, value in enumerate(values)} for values in (asked, fits)]
    metrics = dict(zip(("asked", "fits"), named)) if asked else {}
    return SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=queued, target_num_replicas=target)


@pytest.mark.parametrize(
    ("asked", "fits", "queued", "replicas"),
    [
        ([8, 8], [10, 10], 0, 2.0),
        ([8, 8], [10, 10], 16, 4.0),
        ([0, 0], [10, 10], 0, 0.0),
        ([4, 8], [5, 10], 0, 2.0),  # the mean of 7.5 rows, of which 6 are to be used
        ([], [], 50, 2),  # nobody has told yet: as it is
    ],
)
def test_replicas_are_as_many_as_decode_all_together(asked, fits, queued, replicas):
    assert ByRows(target=0.8)(context(asked, fits, queued))[0] == pytest.approx(replicas)


@pytest.mark.parametrize("target", [0, 1.1, float("nan")])
def test_a_target_is_a_share(target):
    with pytest.raises(ValueError, match="target must be in"):
        ByRows(target)
