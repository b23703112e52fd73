"""Bodies of requests: read as they arrive, scanned, and bounded in size, time and memory.

Bounds hold for all clients together, so one object keeps them. Parsing begins only after a whole body has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect

from hf_sparsekv.serving.sampling import shown

from ..process import step_aside
from .errors import ApiError
from .scan import PIECE, Scan

BODY_S = 60.0  # how long a client may take to send its body
OPEN_BODIES = 16  # bodies of the largest size that may be in memory at a time
INLINE = 1 << 13  # bytes that are scanned on the event loop: a thread costs more
SMALL_BODY = 1 << 16  # bytes of each body that do not count, so that large bodies do not keep small ones out


class Bodies:
    """Reads bodies. Belongs to the event loop's thread.

    Args:
        max_body: bytes of a request's body.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._held = 0  # bytes of bodies, beside what each may have
        self._one_at_a_time = anyio.CapacityLimiter(1)

    @contextlib.asynccontextmanager
    async def read(self, request: Request, scan: Scan) -> AsyncIterator[bytes]:
        """The body, scanned as it arrives. Its bytes count as held until this context ends."""
        _check_type(request)
        too_large = ApiError(413, f"the body has more than {self._max_body:,} bytes", code="body_too_large")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_body:
            raise too_large
        total = 0

        def hold(more: int) -> None:
            nonlocal total
            before, total = max(0, total - SMALL_BODY), total + more
            self._held += max(0, total - SMALL_BODY) - before
            if total > self._max_body:
                raise too_large
            if total > SMALL_BODY and self._held > OPEN_BODIES * self._max_body:
                message = "too many large bodies are being sent: send it again later"
                raise ApiError(429, message, code="busy", headers={"Retry-After": "1"})

        async def whole() -> bytes:
            parts: list[bytes] = []
            refused, unread = None, self._max_body
            async for part in request.stream():
                if refused is not None:  # read on: a client that is still sending would not read the error
                    unread -= len(part)
                    if unread < 0:
                        break
                    continue
                try:
                    hold(len(part))
                    if len(part) <= INLINE:
                        scan.feed(part)
                    else:
                        await anyio.to_thread.run_sync(_look, scan, part, limiter=self._one_at_a_time)
                    parts.append(part)
                except ApiError as error:
                    refused, parts = error, []
            if refused is not None:
                raise refused
            return b"".join(parts)

        try:
            try:
                body = await asyncio.wait_for(whole(), BODY_S)
            except asyncio.TimeoutError:
                raise ApiError(408, f"the body has not come within {BODY_S:g} s") from None
            except ClientDisconnect:
                raise ApiError(400, "the body has not come whole") from None  # the client has gone
            yield body
        finally:
            self._held -= max(0, total - SMALL_BODY)


def _look(scan: Scan, part: bytes) -> None:
    """Scan on a thread of low priority, because streams need the event loop, and steps the cores."""
    step_aside()
    for at in range(0, len(part), PIECE):
        scan.feed(part[at : at + PIECE])


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers send other types to this machine for any page that asks them to
        what = shown(kind or "none")
        raise ApiError(415, f"the body must be JSON: send `Content-Type: application/json`, not {what}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(415, f"the body must be sent as it is, without `Content-Encoding: {coding[:40]}`")
