"""Clients that leave, that do not read, that come by the hundred; and a server that ends under them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from tokenizers_made import byte_level
from waiting import wait_until

from hf_sparsekv_serve.http import answers, create_app

LONG = "Q" * 4096  # one token


def long_tokens():
    """A tokenizer with a token whose text is long: a few thousand of them fill all buffers on the way."""
    made = byte_level()
    made.add_tokens([LONG])
    return made


def request(body: dict) -> bytes:
    """For a completion."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def connect(url: str, body: dict, receive: int | None = None) -> socket.socket:
    """A request for a completion, sent; nothing is read. ``receive``: bytes that the client's machine takes."""
    where, connection = urlsplit(url), socket.socket()
    if receive is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.settimeout(20)
    connection.connect((where.hostname, where.port))
    connection.sendall(request(body))
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Until the end of the answer, or until the server closes."""
    parts = []
    while not parts or b"0\r\n\r\n" not in parts[-1][-5:]:
        part = connection.recv(1 << 20)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_client_that_leaves_cancels_its_request(when, stream):
    rows = 0 if when == "waiting" else 8
    with FakeEngine(byte_level(), max_rows=rows) as engine, serving(create_app(engine, "m")) as url:
        connection = connect(url, {"prompt": "ab", "max_tokens": 900, "stream": stream})
        wait_until(lambda: engine.busy and (rows == 0 or engine.counts["generated_tokens"] > 5))
        connection.close()
        wait_until(lambda: engine.counts["cancelled"] == 1 and not engine.busy)
        assert not engine.counts["finished"]


def test_a_client_that_leaves_cancels_all_of_a_list():
    with FakeEngine(byte_level()) as engine, serving(create_app(engine, "m")) as url:
        connection = connect(url, {"prompt": ["a", "b", "c"], "max_tokens": 900, "stream": True})
        wait_until(lambda: engine.counts["generated_tokens"] > 5)
        connection.close()
        wait_until(lambda: engine.counts["cancelled"] == 3)


def test_a_client_that_leaves_in_the_middle_of_its_body(caplog):
    with FakeEngine(byte_level()) as engine, serving(create_app(engine, "m")) as url:
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            )
            connection.sendall(b"Content-Length: 100\r\n\r\n{")
            time.sleep(0.1)
        assert httpx.get(f"{url}/health").status_code == 200
        assert not engine.prompts and "Traceback" not in caplog.text


def test_a_slow_reader_holds_nobody_up_and_gets_all_its_text_in_fewer_pieces():
    made = long_tokens()
    with FakeEngine(made, step_s=0.0, max_length=4000) as engine, serving(create_app(engine, "m")) as url:
        tokens = 3000  # 12 MB
        slow = connect(url, {"prompt": LONG, "max_tokens": tokens, "stream": True}, receive=4096)
        wait_until(lambda: engine.counts["finished"] == 1, 30)
        begun = time.perf_counter()
        quick = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 4}).json()
        assert quick["choices"][0]["text"] == "abab" and time.perf_counter() - begun < 5
        answer = read_all(slow)
        slow.close()
        assert answer.count(b"Q") == tokens * len(LONG), "every character once"
        assert answer.count(b"data: {") < tokens / 2 and b"[DONE]" in answer
        assert engine.counts["cancelled"] == 0


def test_a_client_that_takes_nothing_is_left(monkeypatch, caplog):
    monkeypatch.setattr(answers, "STALL_S", 0.3)
    monkeypatch.setattr(answers, "TICK_S", 0.05)
    with FakeEngine(long_tokens(), step_s=0.001, max_length=10**6) as engine, serving(create_app(engine, "m")) as url:
        stuck = connect(url, {"prompt": LONG, "max_tokens": 900_000, "stream": True}, receive=4096)
        wait_until(lambda: engine.counts["cancelled"] == 1, 30)
        assert "has taken nothing for 0.3 s" in caplog.text
        stuck.close()


def test_a_silent_stream_is_kept_alive(monkeypatch):
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(answers, "TICK_S", 0.02)
    body = {"prompt": "ab", "stream": True}
    with (
        FakeEngine(byte_level(), max_rows=0) as engine,
        serving(create_app(engine, "m")) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        comments = [line for line in (next(lines) for _ in range(8)) if line]
        assert comments[0] == ": begun" and set(comments[1:]) == {": waiting"}
        engine.max_rows = 8
        assert any(line == "data: [DONE]" for line in lines)


def test_two_hundred_connections_each_with_its_own_answer():
    count, tokens = 200, 25
    with FakeEngine(byte_level(), step_s=0.002) as engine, serving(create_app(engine, "m")) as url:

        async def one(which: int) -> str:
            where = urlsplit(url)
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(request({"prompt": f"{which:03}", "max_tokens": tokens, "stream": True}))
            text, line = "", b""
            while line != b"data: [DONE]\n":
                line = await reader.readline()
                assert line, "the server has closed"
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
            writer.close()
            return text

        async def all_of_them() -> list[str]:
            return await asyncio.gather(*map(one, range(count)))

        found = asyncio.run(all_of_them())
        assert found == [(f"{which:03}" * tokens)[:tokens] for which in range(count)]
        wait_until(lambda: engine.counts["finished"] == count)
        assert not engine.counts["cancelled"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_closed_tells_those_who_wait(stream):
    with FakeEngine(byte_level(), max_rows=0) as engine, serving(create_app(engine, "m")) as url:
        threading.Thread(target=lambda: (wait_until(lambda: engine.busy), engine.close())).start()
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "stream": stream})
        assert "the server has ended this request: it is stopping" in response.text
        assert response.status_code == (200 if stream else 503)


def test_a_server_that_ends_cancels_what_runs():
    with FakeEngine(byte_level(), step_s=0.01, max_length=10**6) as engine:
        with serving(create_app(engine, "m")) as url:
            connections = [connect(url, {"prompt": "ab", "max_tokens": 900_000, "stream": s}) for s in (True, False)]
            wait_until(lambda: engine.busy == 2)
        wait_until(lambda: engine.counts["cancelled"] == 2)
        for connection in connections:
            connection.close()


def test_what_comes_between_two_looks_is_one_text():
    """And what waits for a reader is joined, however many pieces it came in."""
    from hf_sparsekv.serving.request import Handle, Output, Piece

    async def read() -> None:
        handle = Handle("r", 1)
        found = answers.Answers([handle])
        for i in range(3000):
            handle.push(Piece(chr(97 + i % 26), (i,)))
        assert len(found._texts[0]) < answers.JOIN
        news = await found.news()
        assert len(news) == 1 and len(news[0].text) == 3000 and news[0].end is None
        handle.push(Piece("", (1,)))  # no text: nobody is woken
        handle.push(Piece("z", (1,)))
        handle.finish(Output("az", (1,), "stop", 1))
        (last,) = await found.news()
        assert (last.text, last.end.text) == ("z", "az")

    asyncio.run(read())
