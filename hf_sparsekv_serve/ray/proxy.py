"""In each HTTP proxy of Ray Serve: a hint where a prompt's beginning may be kept, and clear errors of lost replicas.

Ray Serve calls :func:`middlewares` when a proxy starts, if this environment variable is set::

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=hf_sparsekv_serve.ray.proxy:middlewares
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ROUTE_BYTES = 4096  # of a prompt, which is what the hint is made of: some 1,000 tokens of English
HEAD_S = 10.0  # that a client may take to send them
FIELDS = (b'"messages"', b'"prompt"')
PATHS = ("/v1/chat/completions", "/v1/completions")
LOST = "the replica that worked on this request has ended: send the request again"


def middlewares() -> list[Middleware]:
    """For Ray Serve. ``HF_SPARSEKV_ROUTE_BYTES`` says how many bytes of a prompt make a hint."""
    given = os.environ.get("HF_SPARSEKV_ROUTE_BYTES", str(ROUTE_BYTES))
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"HF_SPARSEKV_ROUTE_BYTES must be an integer >= 1, got {given!r}")
    header = os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id")
    return [Middleware(PromptGate, route_bytes=int(given), header=header)]


def hint(head: bytes, route_bytes: int) -> str | None:
    """A name for the beginning of a prompt, equal for prompts whose first ``route_bytes`` bytes are equal.

    Args:
        head: of a request's body, JSON. It is not parsed: documents are long, and a proxy serves all.
        route_bytes: how many bytes count.

    Returns:
        None if the prompt is shorter, or is not in ``head``.
    """
    starts = [at for field in FIELDS if (at := head.find(field)) >= 0]
    if not starts or len(head) < min(starts) + route_bytes:
        return None
    start = min(starts)
    return hashlib.blake2b(head[start : start + route_bytes], digest_size=16).hexdigest()


class PromptGate:
    """Adds the hint as the header that Ray's consistent hashing reads, unless the client sends one of its own.

    When a replica is lost, Ray ends a response that has not begun with a bare 500 and breaks off one that has. Clients
    get OpenAI's form of an error instead: 503, or a stream's last event.

    Args:
        app: the proxy.
        route_bytes: see :func:`hint`.
        header: its name.
    """

    def __init__(self, app: ASGIApp, route_bytes: int, header: str) -> None:
        self._app = app
        self._route_bytes = route_bytes
        self._header = header.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            return await self._app(scope, receive, send)
        if all(name.replace(b"_", b"-") != self._header.replace(b"_", b"-") for name, _ in scope["headers"]):
            head: list[Message] = []
            try:
                key = await asyncio.wait_for(self._read(receive, head), HEAD_S)
            except asyncio.TimeoutError:
                key = None  # the application reports a limit of its own
            if key is not None:
                scope = {**scope, "headers": [*scope["headers"], (self._header, key.encode())]}
            receive = _behind(head, receive)
        answer = _Answer(send)
        await self._app(scope, receive, answer.send)
        await answer.close()

    async def _read(self, receive: Receive, head: list[Message]) -> str | None:
        """Read as much of the body as a hint needs into ``head``."""
        body, most = b"", 2 * self._route_bytes + 4096  # other fields may come first
        while True:
            message = await receive()
            head.append(message)
            body += message.get("body", b"")[: most - len(body)]
            key = hint(body, self._route_bytes)
            more = message["type"] == "http.request" and message.get("more_body", False)
            if key is not None or len(body) == most or not more:
                return key


def _behind(head: list[Message], receive: Receive) -> Receive:
    """``receive`` that first gives what was read already."""
    left = iter(head)

    async def again() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return again


class _Answer:
    """Sends a response, and knows how far it has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status: int | None = None
        self._stream = self._whole = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message["headers"]
            )
        elif message["type"] == "http.response.body":
            self._whole = not message.get("more_body", False)
        await self._send(message)

    async def close(self) -> None:
        """The proxy has nothing more to send: say so if that is too early."""
        error = {"message": LOST, "type": "server_error", "param": None, "code": "replica_lost"}
        body = json.dumps({"error": error}).encode()
        if self._status is None:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await self._send({"type": "http.response.start", "status": 503, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
        elif self._stream and not self._whole:
            await self._send({"type": "http.response.body", "body": b"data: " + body + b"\n\n"})
