"""Access: the API key, and the host names that a server without a key accepts. Counts and names answers.

It is ASGI middleware: a request without the key is refused before its body is read.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_sparsekv.serving.sampling import shown

from .errors import ApiError

OPEN = ("/", "/docs", "/health", "/ready", "/metrics")  # without a key
ID = "x-request-id"
HOST = re.compile(
    r"(\[(?P<address>[^\[\]]*)\]|(?P<name>[^:]*))(:[0-9]*)?"
)  # of a header: a name or an address, and a port
GIVEN_ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)  # a client's own, as it may be in the log

log = logging.getLogger(__name__)


class Gate:
    """Refuses requests without a key before their body is read, and counts answers by status.

    Each answer has an id, the client's own (``X-Request-ID``) or a new one, under which the log has it.

    Without a key, on a loopback address, it refuses requests to other host names: a browser's pages (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], allowed_hosts: Sequence[str], count: Callable[[str, int], None]
    ) -> None:
        self._app = app
        self._hosts = {host.lower().rstrip(".") for host in allowed_hosts}
        self._keys = [key.strip().encode() for key in api_keys]  # a key from a file may end with a newline
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        id = scope[ID] = _id(scope)
        began = time.perf_counter()

        def ended(status: int) -> None:
            self._count(scope["path"], status)
            took = time.perf_counter() - began
            log.info("%s: %s %s: %d after %.3f s", id, scope["method"], shown(scope["path"]), status, took)

        counting = Counting(send, ended, id)
        if not self._keys and (host := self._foreign(scope)) is not None:
            message = f"this server is not {shown(host)}: ask it by its address, or allow the name (--allow-host)"
            error = ApiError(403, message, code="host_not_allowed")
            return await error.response(scope["path"])(scope, receive, counting)
        if not self._keys or scope["path"] in OPEN or self._admits(scope):
            try:
                return await self._app(scope, receive, counting)
            except Exception:
                counting.ended(500)  # told by the server, outside of this; or a stream that breaks off
                raise
            finally:
                counting.ended()
        message = "the API key is missing or wrong: send `Authorization: Bearer KEY`, or `x-api-key: KEY`"
        error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return await error.response(scope["path"])(scope, receive, counting)

    def _foreign(self, scope: Scope) -> str | None:
        """The host name of a request to a loopback address, if that name is not allowed."""
        address = (scope.get("server") or ("",))[0] or ""
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if "*" in self._hosts or not is_loopback(address):
            return None
        for host in given:  # HTTP/1.0 has none, and no browser speaks it
            name = _host_name(host)
            if name != "localhost" and name not in self._hosts and _address(name) is None:
                return host
        return None

    def _admits(self, scope: Scope) -> bool:
        given = dict(reversed(scope["headers"]))  # the first of each name
        kind, _, key = given.get(b"authorization", b"").partition(b" ")
        sent = [key.strip()] * (kind.lower() == b"bearer")
        if b"x-api-key" in given:  # Anthropic's clients
            sent.append(given[b"x-api-key"].strip())
        # All are compared, whichever is right: the time tells nothing.
        return sum(hmac.compare_digest(one, key) for one in sent for key in self._keys) > 0


def _id(scope: Scope) -> str:
    """The id of a request: the one that the client gives, if a log can have it."""
    given = next((value for name, value in scope["headers"] if name == ID.encode()), b"")
    return given.decode() if GIVEN_ID.fullmatch(given) else f"req-{uuid.uuid4().hex[:16]}"


def _host_name(header: str) -> str:
    """The name in a Host header, without its port and without the brackets of IPv6; empty if it is none."""
    found = HOST.fullmatch(header)
    return (found["address"] or found["name"] or "").lower().rstrip(".") if found else ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address, None for a name. A socket of both families has IPv4 addresses in IPv6 (``::ffff:127.0.0.1``)."""
    try:
        found = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def is_loopback(address: str) -> bool:
    """Whether this is an address of this machine alone, however it is written."""
    found = _address(address)
    return found is not None and found.is_loopback


class Counting:
    """Wraps ``send`` for one answer, and counts it once at its end, by its first status or that of a failure."""

    def __init__(self, send: Send, count: Callable[[int], None], id: str) -> None:
        self._send = send
        self._count = count
        self._id = (ID.encode(), id.encode())
        self._status: int | None = None  # first status
        self._over = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message = {**message, "headers": [*message["headers"], self._id]}
        elif not message.get("more_body", False):
            self.ended()  # first: a client that has the whole answer finds it in the metrics
        await self._send(message)

    def ended(self, status: int | None = None) -> None:
        """Count the answer with ``status``, or with its first status. Does nothing if it has neither."""
        status = status or self._status
        if status is not None and not self._over:
            self._over = True
            self._count(status)
