"""Processes of Ray Serve's replicas on this machine, and a port for it to listen on."""

from __future__ import annotations

import socket
from contextlib import suppress

import psutil


def free_port() -> int:
    """This machine's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def replica_processes() -> list[psutil.Process]:
    """Replicas that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            found += [process] if "ServeReplica:llm" in " ".join(process.cmdline()) else []
    return found
