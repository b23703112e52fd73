"""Limits of connections: their number, the time for a request's head, and the number of tiny chunks of a body.

uvicorn bounds none of these. It waits forever for a connection's first head. Each chunk of a body costs it 20 us of the
event loop, however small the chunk is.
"""

from __future__ import annotations

import asyncio
import select
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # how long a client may take to send a request's head
KEEP_ALIVE_S = 75.0  # idle after an answer: longer than clients and proxies keep connections themselves, mostly
MAX_CONNECTIONS = 2048
CHUNKS = 1000  # chunks of any size that a body may have, plus one for each CHUNK bytes
CHUNK = 64
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


def protocol(
    most: int = MAX_CONNECTIONS, head_s: float = HEAD_S, keep_alive_s: float = KEEP_ALIVE_S
) -> type[asyncio.Protocol]:
    """For uvicorn's ``http`` option, one for each server.

    Args:
        most: connections at a time. One more takes the place of the one that has waited longest for a request's head;
            it is refused with 503 if all have requests.
        head_s: seconds that a head may take. A connection without one is closed, with 408 if some of it had come.
        keep_alive_s: seconds until the first byte of the next head, after an answer.
    """
    bounds = {"most": most, "head_s": head_s, "keep_alive_s": keep_alive_s}
    return type("Bounded", (_Bounded,), {**bounds, "silent": {}})


class _Bounded(H11Protocol):
    most: int
    head_s: float
    keep_alive_s: float
    silent: dict[_Bounded, asyncio.TimerHandle]  # connections of a server without a request, by timer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Counting(h11.SERVER, self.conn._max_incomplete_event_size)
        self._some = False  # part of a head has arrived
        self._answered = False  # a request of this connection
        self.timeout_keep_alive = 1 << 30  # uvicorn's own timer, which knows no heads

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
        began, self._some = not self._some, True
        if began and self._answered:
            self._stop()  # the head has begun: it has its own time
        super().data_received(data)
        self._time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._some, self._answered = bool(self.conn.trailing_data[0]), True  # the next head may have begun
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
            idle = self._answered and not self._some
            self.silent[self] = self.loop.call_later(self.keep_alive_s if idle else self.head_s, self._late)

    def _late(self) -> None:
        """Leave, unless something has come that is not read yet: a request must not be lost."""
        del self.silent[self]
        if not self._some and _readable(self.transport):
            self._time()
        else:
            self.leave()

    def _stop(self) -> None:
        if timer := self.silent.pop(self, None):
            timer.cancel()


def _readable(transport: asyncio.Transport) -> bool:
    """Whether bytes wait in a connection's socket."""
    found = transport.get_extra_info("socket")
    if found is None or not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()  # select() takes no file numbers over 1,024
    poll.register(found.fileno(), select.POLLIN)
    return bool(poll.poll(0))


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
