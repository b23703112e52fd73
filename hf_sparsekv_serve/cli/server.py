"""uvicorn's server as a command runs it: signals, and connections that this process has files for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from hf_sparsekv.cli.output import note
from hf_sparsekv.serving.grammar import MOST_BYTES, PROCESS

from ..http.connections import KEEP_ALIVE_S, MAX_CONNECTIONS, protocol
from ..process import SIGNALS, leave

if TYPE_CHECKING:
    from hf_sparsekv.serving.engine import Engine

GRACE_S = 10  # how long clients have to read the ends of their answers
HURRY_S = 2  # the same, at the second signal
OTHER_FILES = 256 + MOST_BYTES // PROCESS  # beside connections and rows: libraries, weights; compiled grammars


class Server(uvicorn.Server):
    """uvicorn's server, but the first signal lets running requests finish, and the second one cancels them.

    Its own signal handlers are left out. They are set only while it runs, and a signal may come earlier or later.

    Args:
        app: the application.
        engine: the engine that it asks.
        max_connections: connections at a time, if there are files for them.
        max_rows: most answers at a time.
        keep_alive_s: seconds that a connection may be idle after an answer.

    Attributes:
        signals: signals received so far.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        max_connections: int = MAX_CONNECTIONS,
        max_rows: int = 32,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        # Hides errors of clients that were cut off: their tasks are cancelled, and uvicorn would show where.
        logging.getLogger("uvicorn.error").addFilter(_no_cancellation)
        config = uvicorn.Config(
            app,
            http=protocol(affordable_connections(max_connections, max_rows), keep_alive_s=keep_alive_s),
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=[("Keep-Alive", f"timeout={int(keep_alive_s)}")],  # some clients leave before that
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self.engine = engine
        self.signals = 0

    def handle_exit(self, sig, frame) -> None:
        self.signals += 1
        if self.signals > 2:  # the second one did not end the server
            leave(128 + sig)
        call = self.drain if self.signals == 1 else self.stop
        threading.Thread(target=call, name=call.__name__, daemon=True).start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def drain(self) -> None:
        """Take no more requests, and end with the last one."""
        stats = self.engine.stats()
        left = stats.running + stats.waiting + stats.held + stats.prefilling
        note(f"draining: {left} requests are left, no more are taken; once more to stop at once")
        self.engine.drain()
        self.should_exit = True

    def stop(self) -> None:
        """Cancel all requests, and drop clients that do not read the end within ``HURRY_S``."""
        self.config.timeout_graceful_shutdown = HURRY_S
        self.engine.close()
        self.should_exit = True
        time.sleep(HURRY_S)
        self.force_exit = True  # it may have begun to wait before


def affordable_connections(asked: int, rows: int) -> int:
    """As many as this process may have files for, which are raised as far as it may.

    Args:
        rows: most answers at a time; each may have a file, for its grammar's process.
    """
    try:
        import resource
    except ImportError:  # Windows
        return asked
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    other = OTHER_FILES + rows
    needed = asked + other
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            note(f"{asked} connections need {needed} open files, and this process may have {soft} (ulimit -n)")
            return max(1, soft - other)
    return asked


def _no_cancellation(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not isinstance(error, asyncio.CancelledError)


@contextlib.contextmanager
def signals_heard(server: Server) -> Iterator[None]:
    """Signals go to the server. If one has come, no more are heard afterwards: the process is about to end."""
    before = {one: signal.signal(one, server.handle_exit) for one in SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_IGN if server.signals else handler)
