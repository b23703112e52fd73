"""A server on a free port, in a thread of the tests' process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import uvicorn

from hf_sparsekv_serve.http.connections import protocol


@contextmanager
def serving(app, host: str = "127.0.0.1", **bounds) -> Iterator[str]:
    """Its address over IPv4; ended afterwards, whatever is open. ``bounds``: of its connections."""
    # With its protocol named, or asyncio leaves Nagle's algorithm on: 40 ms an answer.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind((host, 0))
    listener.listen(512)
    options = {"log_level": "error", "access_log": False, "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, http=protocol(**bounds), **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="server", daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < until, "the server has not started"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def openai_client(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own, which does not try again by itself."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
