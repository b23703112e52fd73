"""A server in a process of its own, as people start it, or in one for each rank of its model.

Apart from :mod:`.soak`, because :mod:`.hostile` starts one, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable

import psutil


class Words:
    """What a process says from now on. It is read all the time: whoever writes to a full pipe waits."""

    def __init__(self, stream: Iterable[str]) -> None:
        self._lines: list[str] = []
        self._reading = threading.Thread(target=self._lines.extend, args=(stream,), daemon=True)
        self._reading.start()

    def all(self) -> str:
        """To its end, of a process that has ended."""
        self._reading.join(10)
        return "".join(self._lines)


def served(options: list[str], ranks: int = 1) -> tuple[subprocess.Popen, str, Words]:
    """A server, its address, and its words."""
    command = [sys.executable, "-m", "hf_sparsekv", "serve", *options, "--port", "0"]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *torchrun, *command[1:], "--tensor-parallel"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=os.environ)
    while line := server.stderr.readline():
        print(line, end="", flush=True)
        if found := re.search(r"listening on http://(\S+):(\d+)/", line):
            host = "127.0.0.1" if found[1] in ("0.0.0.0", "[::]") else found[1]
            return server, f"http://{host}:{found[2]}", Words(server.stderr)
    raise RuntimeError(f"the server has not started: it ended with {server.wait()}")


def rank_of(server: subprocess.Popen, rank: int, ranks: int) -> psutil.Process:
    """The process of a rank; without ranks the server's own."""
    if ranks < 2:
        return psutil.Process(server.pid)
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(rank) and "serve" in process.cmdline():
                return process
    raise RuntimeError(f"there is no process of rank {rank}")
