"""Limits of connections: their number, the time for a request's head, and the number of tiny chunks of a body.

uvicorn bounds none of these. It waits forever for a connection's first head. Each chunk of a body costs it 20 us of the
event loop, however small the chunk is.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # how long a client may take to send a request's head
MAX_CONNECTIONS = 2048
CHUNKS = 1000  # chunks of any size that a body may have, plus one for each CHUNK bytes
CHUNK = 64
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


def protocol(most: int = MAX_CONNECTIONS, head_s: float = HEAD_S) -> type[asyncio.Protocol]:
    """For uvicorn's ``http`` option, one for each server.

    Args:
        most: connections at a time. One more takes the place of the one that has waited longest for a request's head;
            it is refused with 503 if all have requests.
        head_s: seconds that a head may take. A connection without one is closed, with 408 if some of it had come.
    """
    return type("Bounded", (_Bounded,), {"most": most, "head_s": head_s, "silent": {}})


class _Bounded(H11Protocol):
    most: int
    head_s: float
    silent: dict[_Bounded, asyncio.TimerHandle]  # connections of a server without a request, by timer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Counting(h11.SERVER, self.conn._max_incomplete_event_size)
        self._some = False  # part of a head has arrived

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            if not self.silent:
                transport.write(FULL)
                transport.close()
                return
            next(iter(self.silent)).leave()
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._some = True
        super().data_received(data)
        self._time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._some = False
        self._time()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer has begun: nothing else can be said
            self.transport.close()

    def leave(self) -> None:
        """Close it: it has no request."""
        if self._some:
            self.transport.write(LATE)
        self._stop()
        self.transport.close()

    def _time(self) -> None:
        """Start the clock where a head is missing, and stop it where one has come."""
        if self.transport.is_closing() or not (self.cycle is None or self.cycle.response_complete):
            self._stop()
        elif self not in self.silent:
            self.silent[self] = self.loop.call_later(self.head_s, self.leave)

    def _stop(self) -> None:
        if timer := self.silent.pop(self, None):
            timer.cancel()


class _Counting(h11.Connection):
    """Refuses bodies in many tiny chunks."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > CHUNKS + self._bytes // CHUNK:
                raise h11.RemoteProtocolError(f"chunks of less than {CHUNK} bytes: send larger ones")
        return event
