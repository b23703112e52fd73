"""Idle connections: kept as long as asked for, and none is closed under a request. Keys of several clients."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from test_http_connections import request
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import connections, create_app


@pytest.fixture(scope="module")
def url():
    bounds = {"head_s": 0.5, "keep_alive_s": 1.5}
    with FakeEngine(byte_level(), step_s=0) as engine, serving(create_app(engine, "m"), **bounds) as url:
        yield url


def connected(url: str) -> socket.socket:
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=10)


def read(connection: socket.socket) -> bytes:
    """One whole answer."""
    got = b""
    while not got.endswith(b"}}}"):
        part = connection.recv(1 << 16)
        if not part:
            break
        got += part
    return got


BODY = {"prompt": "ab", "max_tokens": 2}


def test_the_default_is_longer_than_that_of_clients():
    assert connections.KEEP_ALIVE_S == 75 and connections.HEAD_S == 10
    made = connections.protocol()
    assert (made.head_s, made.keep_alive_s) == (10, 75)


@pytest.mark.parametrize("idle", [0.2, 0.8, 1.2])
def test_an_idle_connection_is_kept(url, idle):
    """Longer than a head may take."""
    with connected(url) as connection:
        for _ in range(3):
            connection.sendall(request(BODY))
            assert b"200 OK" in read(connection)
            time.sleep(idle)


def test_and_closed_at_its_end_and_without_a_word(url):
    with connected(url) as connection:
        connection.sendall(request(BODY))
        begun = time.monotonic()
        assert b"200 OK" in read(connection)
        assert connection.recv(100) == b"" and 1 < time.monotonic() - begun < 4


@pytest.mark.parametrize("answered", [False, True])
def test_a_head_has_its_own_time(url, answered):
    with connected(url) as connection:
        if answered:
            connection.sendall(request(BODY))
            read(connection)
            time.sleep(0.7)
        begun = time.monotonic()
        connection.sendall(b"POST /v1/comp")
        assert b"408" in connection.recv(1000) and time.monotonic() - begun < 1.2


def test_a_head_that_begins_before_the_answer_ends_has_its_own_time(url):
    with connected(url) as connection:
        connection.sendall(request(BODY) + b"POST /v1/comp")
        begun = time.monotonic()
        assert b"200 OK" in read(connection)
        assert b"408" in connection.recv(1000) and time.monotonic() - begun < 1.2


def test_a_request_that_has_come_is_never_closed_upon(url, monkeypatch):
    """The timer fires before the loop reads what has come."""
    late = connections._Bounded._late

    def with_bytes(self) -> None:
        client.sendall(request(BODY))
        time.sleep(0.05)  # on the loop: the bytes are there, and nobody has read them
        late(self)

    monkeypatch.setattr(connections._Bounded, "_late", with_bytes)
    with connected(url) as client:
        client.sendall(request(BODY))
        assert b"200 OK" in read(client)
        assert b"200 OK" in read(client)


def test_more_files_than_select_knows():
    ends = [socket.socketpair() for _ in range(600)]
    try:
        ours, theirs = ends[-1]

        class Transport:
            def get_extra_info(self, name: str):
                return ours

        assert ours.fileno() > 1024 and not connections._readable(Transport())
        theirs.send(b"a")
        assert connections._readable(Transport())
    finally:
        for pair in ends:
            for one in pair:
                one.close()


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_several_keys_by_either_header(name):
    with FakeEngine(byte_level()) as engine:
        app = create_app(engine, "m", api_key=["one\n", "zwö"])
        with serving(app) as url, httpx.Client(base_url=url) as client:
            for key, right in (("one", True), ("zwö", True), ("w", False), ("on", False), ("one zwö", False)):
                sent = f"Bearer {key}" if name == "authorization" else key
                status = client.get("/v1/models", headers={name: sent.encode()}).status_code
                assert status == (200 if right else 401), key
            both = {"authorization": "Bearer wrong", "x-api-key": "one"}
            assert client.get("/v1/models", headers=both).status_code == 200
            assert client.get("/v1/models", headers={"x-api-key": "Bearer one"}).status_code == 401
        for wrong in ([], ["a", " "], ""):
            with pytest.raises(ValueError, match="api_key is empty"):
                create_app(engine, "m", api_key=wrong)
