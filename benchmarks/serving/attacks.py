"""Attacks of hostile clients on a server, in kinds: bodies, and ways to use a connection.

Each kind says which answers it may get. Used by :mod:`.hostile` for minutes, and by the tests once each. Nothing here
imports torch: a process of its own sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from . import hostile_fields, hostile_grammars

Address = tuple[str, int]
HARMFUL = 1 << 20  # bytes from which on all bodies that are about size are to be refused
LIMIT_S = 90.0  # until an attack must have an end
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = hostile_fields.HI
SERVED = (200, 400, 429)  # a real request of a strange kind, which may also be too long for the model
Made = tuple[str, float, float]  # an attack, its begin and its end


class Wrong(Exception):
    """The server has answered in a way that it should not."""


# ---------------------------------------------------------------------- bodies


@dataclass(frozen=True)
class Body:
    """A request that is hostile by its body.

    Args:
        make: the body, of some ``size`` bytes where it is about size.
        statuses: that it may get.
        path, kind, coding: of the request: endpoint, content type and encoding.
    """

    make: Callable[[int], bytes]
    statuses: tuple[int, ...] = (400,)
    path: str = COMPLETIONS
    kind: str = "application/json"
    coding: str | None = None


def _with(**fields: object) -> Callable[[int], bytes]:
    return lambda size: json.dumps({"prompt": "a", "max_tokens": 1, **fields}).encode()


def _chat(make: Callable[[int], dict], statuses: tuple[int, ...] = (400,), path: str = CHAT) -> Body:
    def body(size: int) -> bytes:
        return json.dumps({"messages": HI, "max_tokens": 1, **make(size)}, ensure_ascii=False).encode()

    return Body(body, statuses, path)


def _schema(made: Callable[[int], dict]) -> Body:
    def make(size: int) -> bytes:
        named = {"name": "x", "schema": made(random.randint(1000, 9999))}
        form = {"type": "json_schema", "json_schema": named}
        return json.dumps({"prompt": "a", "max_tokens": 20, "response_format": form}).encode()

    return Body(make, (200, 400))


def _long(
    before: bytes, unit: bytes, after: bytes, statuses: tuple[int, ...] = (400,), path: str = COMPLETIONS
) -> Body:
    def make(size: int) -> bytes:
        return before + unit * max(1, (size - len(before) - len(after)) // len(unit)) + after

    return Body(make, statuses, path)


def _number(name: str, text: bytes) -> Body:
    return Body(lambda size: b'{"prompt": "a", "max_tokens": 1, "%s": %s}' % (name.encode(), text))


def _fields(size: int) -> bytes:
    fields = ",".join(f'"{i}":0' for i in range(size // 12))
    return b'{"prompt": "a", "metadata": {' + fields.encode() + b"}}"


BODIES: dict[str, Body] = {
    "lists in lists": _long(b'{"prompt":"a","metadata":', b"[", b"1"),
    "objects in objects": _long(b'{"prompt":"a","metadata":', b'{"a":', b"1"),
    "empty lists": _long(b'{"prompt":"the","metadata":[', b"[],", b"1]}"),
    "empty objects": _long(b'{"prompt":"the","metadata":[', b"{},", b"1]}"),
    "many fields": Body(_fields),
    "many values": _long(b'{"prompt":"the","metadata":[', b"0,", b"1]}"),
    "many texts": _long(b'{"prompt":"the","metadata":[', b'"",', b"1]}"),
    "quotes alone": _long(b'{"prompt":"a"', b'"', b"}"),
    "brackets that close": _long(b"{", b"]", b""),
    "a long unknown name": _long(b'{"', b"ab", b'":1}'),
    "many unknown names": Body(lambda size: json.dumps({"prompt": "a"} | {f"x{i}": 1 for i in range(5000)}).encode()),
    "a field twice": Body(lambda size: b'{"prompt":"a","max_tokens":1,"max_tokens":1000000}'),
    "a long number": _long(b'{"prompt":"a","seed":', b"9", b"}"),
    "many long numbers": _long(b'{"prompt":"a","metadata":[', b"9" * 4000 + b",", b"1]}"),
    "many fractions": _long(b'{"prompt":"a","metadata":[', b"1.7976931348623157e-300,", b"1]}"),
    "NaN": _number("temperature", b"NaN"),
    "infinity": _number("top_p", b"-Infinity"),
    "no UTF-8": _long(b'{"prompt":"', b"\xff\xfe", b'"}'),
    "UTF-16": Body(lambda size: json.dumps({"prompt": "a", "metadata": [[]] * (size // 8)}).encode("utf-16")),
    "half surrogates": _long(b'{"prompt":"', b"\\ud800", b'"}'),
    "many escapes": _long(b'{"user":"', b"\\n", b'","prompt":""}'),
    "NUL bytes": Body(lambda size: json.dumps({"prompt": "a\0b\0", "max_tokens": 1}).encode(), SERVED),
    "whitespace": _long(b'{"prompt":"a","max_tokens":1', b" ", b"}", SERVED),
    "a bomb of gzip": Body(lambda size: gzip.compress(b" " * size), (415,), coding="gzip"),
    "another content type": Body(_with(), (415,), kind="text/plain"),
    "many stop strings": Body(lambda size: _with(stop=["ab"] * (size // 6))(size)),
    "a long stop string": Body(lambda size: _with(stop="ab" * (size // 2))(size)),
    "logit_bias": Body(lambda size: _with(logit_bias={str(i): 100 for i in range(min(40_000, size // 12))})(size)),
    "n": Body(_with(n=10**9)),
    "best_of": Body(_with(best_of=10**9)),
    "max_tokens": Body(_with(max_tokens=10**60)),
    "top_logprobs": _chat(lambda size: {"logprobs": True, "top_logprobs": 10**9}),
    "a grammar": _chat(
        lambda size: {
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "(a+)+" * (size // 8)}}}
        }
    ),
    **{f"a schema: {name}": _schema(schema) for name, schema in hostile_fields.SLOW.items()},
    "a model's name": Body(lambda size: _with(model="m" * size)(size), (404,)),
    "a role": _chat(lambda size: {"messages": [{"role": "{{" * (size // 2), "content": "a"}]}),
    "text of a template": _chat(lambda size: {"messages": [{"role": "user", "content": hostile_fields.JINJA}]}, SERVED),
    "another template": _chat(lambda size: {"chat_template_kwargs": {"chat_template": hostile_fields.JINJA}}),
    "many messages": _chat(lambda size: {"messages": HI * max(5000, size // 40)}),
    "many prompts": Body(lambda size: json.dumps({"prompt": ["a"] * min(90_000, size // 5)}).encode()),
    "a thousand prompts": Body(lambda size: json.dumps({"prompt": ["a"] * 1024, "max_tokens": 1}).encode(), SERVED),
    "an image elsewhere": _chat(lambda size: {"messages": [{"role": "user", "content": [hostile_fields.IMAGE]}]}),
    "a deep schema of a tool": _chat(lambda size: {"tools": [hostile_fields.deep_schema(200)]}),
    "many tools": _chat(lambda size: {"tools": [hostile_fields.deep_schema(1)] * 2000}),
    "JSON in arguments": _chat(hostile_fields.deep_arguments),
    "a long prompt": Body(lambda size: json.dumps({"prompt": "the cat of " * (size // 11)}).encode()),
    "one long word": Body(lambda size: json.dumps({"prompt": "a" * (size // 4)}).encode()),
    "ids that are none": Body(_with(prompt=[10**90, -1])),
    "many ids": Body(lambda size: json.dumps({"prompt": [7] * min(90_000, size // 3)}).encode()),
    **{
        f"{name} of 400 digits": _number(name, b"9" * 400)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "top_k", "max_tokens", "seed")
    },
    **{
        f"{name} of 90 digits": _number(name, b"9" * 90)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")
    },
    "a penalty that overflows": _number("repetition_penalty", b"1e-39"),
    "a temperature that overflows": _number("temperature", b"1e39"),
    **{f"text in {name}": _chat(make) for name, make in hostile_fields.TEXTS.items()},
    **{f"text in {name}": _chat(make, path=path) for name, (path, make) in hostile_fields.ELSEWHERE.items()},
    **{f"text in {name}": _chat(make, SERVED) for name, make in hostile_fields.LABELS.items()},
    **{
        f"a schema with {name}": _chat(hostile_fields.as_format(make), SERVED)
        for name, make in hostile_fields.SCHEMAS.items()
    },
    **{
        f"a tool with {name}": _chat(hostile_fields.as_tool(make), SERVED)
        for name, make in hostile_fields.SCHEMAS.items()
    },
    **{f"a grammar: {name}": _chat(make, SERVED) for name, make in hostile_grammars.FIELDS.items()},
    **{f"{path} of {name}": Body(make, SERVED, path) for (path, name), make in hostile_grammars.BODIES.items()},
}


def request(body: Body, content: bytes) -> bytes:
    """As it goes over the wire."""
    head = f"POST {body.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {body.kind}\r\nConnection: close\r\n"
    head += f"Content-Encoding: {body.coding}\r\n" if body.coding else ""
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def exchange(address: Address, sent: bytes, limit_s: float = LIMIT_S) -> bytes:
    """The server's answer, until it closes; nothing if it resets the connection first."""

    async def read_all() -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        got = b""
        try:
            with contextlib.suppress(ConnectionError):
                writing = asyncio.ensure_future(_write(writer, sent))
                while part := await reader.read(1 << 16):
                    got += part
                writing.cancel()
        finally:
            writer.close()
        return got

    return await asyncio.wait_for(read_all(), limit_s)


async def _write(writer: asyncio.StreamWriter, sent: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        for at in range(0, len(sent), 1 << 16):
            writer.write(sent[at : at + (1 << 16)])
            await writer.drain()


def status(answer: bytes) -> int | None:
    """Status of the first answer in ``answer``."""
    words = answer[:40].split(b" ")
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit() else None


def expect(name: str, answer: bytes, statuses: tuple[int | None, ...]) -> None:
    """Raise :class:`Wrong` for any other status."""
    if status(answer) not in statuses:
        raise Wrong(f"{name}: expected {statuses}, got {answer[:300]!r}")


async def send_body(name: str, address: Address, size: int) -> None:
    """One of :data:`BODIES`."""
    body = BODIES[name]
    answer = await exchange(address, request(body, body.make(size)))
    small = size < HARMFUL and len(body.make(HARMFUL)) != len(body.make(1000))
    expect(name, answer, (*body.statuses, 429, *[200] * small))


# ---------------------------------------------------------------------- connections

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
STREAM = json.dumps({"prompt": "the cat", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()


async def _raw(address: Address, sent: bytes, *statuses: int | None) -> None:
    expect(repr(sent[:40]), await exchange(address, sent), statuses)


async def _open(address: Address, sent: bytes = b"") -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    return writer


async def _hold(address: Address, count: int, seconds: float, sent: bytes = b"") -> None:
    """So many connections that say no more than that."""
    writers = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                writers.append(await _open(address, sent))
        await asyncio.sleep(seconds)
    finally:
        for writer in writers:
            writer.close()


async def _trickle(address: Address, unit: bytes, pause: float, count: int, head: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(head)
            for _ in range(count):
                writer.write(unit)
                await writer.drain()
                await asyncio.sleep(pause)
            return await reader.read(4096)
        return b""
    finally:
        writer.close()


async def _leave_streams(address: Address, size: int) -> None:
    """Many streams, each left after its first bytes."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.suppress(ConnectionError):
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
            await asyncio.wait_for(reader.read(100), LIMIT_S)
        writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(8)))


async def _leave_bodies(address: Address, size: int) -> None:
    """Large bodies that end in the middle."""
    for _ in range(4):
        writer = await _open(address, HEAD + b"Content-Length: 10000000\r\n\r\n" + b'{"prompt": "' + b"a" * (size // 4))
        await asyncio.sleep(0.05)
        writer.transport.abort()


async def _never_read(address: Address, size: int) -> None:
    """A stream that its client does not read."""
    writer = await _open(address, HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
    await asyncio.sleep(0.5)
    writer.transport.abort()


def _sends(sent: bytes, *statuses: int | None) -> Callable[[Address, int], Awaitable[None]]:
    return lambda address, size: _raw(address, sent, *statuses)


async def _tiny_chunks(address: Address, size: int) -> None:
    sent = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * max(10_000, size // 6)
    expect("tiny chunks", await exchange(address, sent), (400, None))


async def _slow_body(address: Address, size: int) -> None:
    head = HEAD + b"Connection: close\r\nContent-Length: 40\r\n\r\n"
    expect("a slow body", await _trickle(address, b" ", 0.02, 40, head), (400,))


async def _many_requests(address: Address, size: int) -> None:
    sent = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100 + GET
    answer = await exchange(address, sent)
    if answer.count(b"HTTP/1.1 200") != 101:
        raise Wrong(f"100 requests in a row: {Counter(answer.split())[b'HTTP/1.1']} answers")


# Names in a Host header, and what a server without a key says to them at a loopback address.
HOSTS = {
    **dict.fromkeys(
        (b"evil.example", b"evil.example:80", b"localhost.evil.example", b"localhost:evil.example", b""), 403
    ),
    **dict.fromkeys(
        (b"127.0.0.1.evil.example", b"[::1].evil.example", b"evil.example\r\nX-Forwarded-Host: localhost"), 403
    ),
    **dict.fromkeys((b"localhost", b"LOCALHOST.:80", b"127.0.0.1", b"[::1]:80", b"[::ffff:127.0.0.1]"), 200),
    b"localhost\r\nHost: evil.example": 400,
}
HERE = ("127.0.0.1", "127.0.0.2", "::1")  # where a server that listens on :: or 0.0.0.0 is reached, too


async def _names_of_hosts(address: Address, size: int) -> None:
    for here in HERE:
        for name, expected in HOSTS.items():
            sent = b"GET /v1/models HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % name
            try:
                answer = await exchange((here, address[1]), sent)
            except OSError:  # it does not listen there
                if here == address[0]:
                    raise
                break
            expect(f"{name!r} at {here}", answer, (expected,))


CONNECTIONS: dict[str, Callable[[Address, int], Awaitable[None]]] = {
    "a body that is longer than it says": _sends(
        HEAD + b"Content-Length: 3\r\nConnection: close\r\n\r\n" + b'{"prompt": "a"}' * 100, 400
    ),
    "a body that is shorter than it says": lambda address, size: _hold(
        address, 4, 0.2, HEAD + b"Content-Length: 100000\r\n\r\n{"
    ),
    "a length that is none": _sends(HEAD + b"Content-Length: 1e9\r\n\r\n", 400),
    "a length below zero": _sends(HEAD + b"Content-Length: -5\r\n\r\n", 400),
    "two lengths": _sends(HEAD + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n{}", 400),
    "a length and chunks": _sends(
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n", 400
    ),
    "a length over the limit": _sends(HEAD + b"Content-Length: 99999999999\r\nConnection: close\r\n\r\n", 413),
    "chunks of no size": _sends(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "tiny chunks": _tiny_chunks,
    "a slow body": _slow_body,
    "requests in a row": _many_requests,
    "many headers": _sends(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 100_000, 400, None),
    "a long header": _sends(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1_000_000, 400, None),
    "a long address": _sends(b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, None),
    "a long question": _sends(
        b"GET /health?" + b"a=b&" * 3000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 200, 400
    ),
    "HTTP/1.0": _sends(b"GET /health HTTP/1.0\r\n\r\n", 200),
    "HTTP/2": _sends(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, 404),
    "TLS": _sends(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\r\n\r\n", 400),
    "noise": _sends(random.Random(0).randbytes(5000) + b"\r\n\r\n", 400),
    "a method that is none": _sends(
        b"X" * 1000 + b" / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404, 405
    ),
    "TRACE": _sends(b"TRACE /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 405),
    "CONNECT": _sends(
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 400, 404, 405
    ),
    "a path upwards": _sends(
        b"GET /v1/models/../../%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 404
    ),
    "another host": _sends(b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 403),
    "names of hosts": _names_of_hosts,
    "a host that is none": _sends(b"GET /nothing HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n", 400, 403),
    "a websocket": _sends(
        b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: a\r\n\r\n" + GET,
        405,
    ),
    "a version of metrics": _sends(
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text; version=x\r\n"
        b"Connection: close\r\n\r\n",
        200,
    ),
    "a body that is waited for": lambda address, size: _hold(
        address, 4, 0.2, HEAD + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n"
    ),
    "silent connections": lambda address, size: _hold(address, 1000, 0.3),
    "half of a head": lambda address, size: _hold(address, 100, 0.3, b"GET /health HTTP/1.1\r\nHost: loc"),
    "streams that are left": _leave_streams,
    "bodies that are left": _leave_bodies,
    "a stream that is not read": _never_read,
}
NAMES = [*BODIES, *CONNECTIONS]


async def attack(name: str, address: Address, size: int) -> None:
    """One of :data:`NAMES`.

    Raises:
        Wrong: the server has answered in a way that it should not.
        TimeoutError: it has not answered.
    """
    if name in BODIES:
        await send_body(name, address, size)
    else:
        await CONNECTIONS[name](address, size)


def attack_for(address: Address, seconds: float, seed: int, size: int, clients: int, results: object) -> None:
    """In a process of its own: attacks of all kinds, ``clients`` at a time.

    Args:
        results: a multiprocessing queue, which gets counts, what was wrong, and each attack with its time.
    """
    counts: Counter[str] = Counter()
    made: list[Made] = []
    wrong: list[str] = []
    rng = random.Random(seed)
    until = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < until:
            name = rng.choice(NAMES)
            began = time.monotonic()
            try:
                await attack(name, address, rng.choice((1000, 100_000, size)))
            except (Wrong, OSError, asyncio.TimeoutError) as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}"[:400])
            counts[name] += 1
            made.append((name, began, time.monotonic()))

    async def all_of_them() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    asyncio.run(all_of_them())
    results.put((dict(counts), wrong, made))
