"""Processes of their own that need not import torch and transformers again, which takes six seconds of a processor.

They are forked from one that has imported them and done nothing else (``multiprocessing``'s fork server), and are
processes like others in all that tests look at: arguments, environment, output, signals, exit code. What is about
imports, the interpreter's end or a GPU needs ``subprocess``.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading

import pytest

IMPORTED = ["pytest", "hf_sparsekv", "hf_sparsekv_cli.app", "hf_sparsekv.serving.engine", "transformers.models.llama"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(IMPORTED)


def _become(argv: list[str], env: dict[str, str], cwd: str, out, err) -> None:
    """``python *argv``."""
    import torch

    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    for where in {out, err}:
        where.close()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    first, *rest = argv
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first in ("-m", "-c"):
        what, *rest = rest
        sys.path[:0], sys.argv = ["", *paths], [first, *rest]
        if first == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[:0], sys.argv = [os.path.dirname(first), *paths], argv
        runpy.run_path(first, run_name="__main__")


class Popen:
    """``subprocess.Popen([sys.executable, *argv], text=True)`` as far as tests need it.

    Args:
        merged: what is written to stderr comes with ``stdout``.
    """

    def __init__(
        self, argv: list[str], env: dict[str, str] | None = None, cwd: str | None = None, merged: bool = False
    ) -> None:
        self.args, here = argv, dict(os.environ if env is None else env)
        out = _context.Pipe(duplex=False)
        err = out if merged else _context.Pipe(duplex=False)
        given = list(map(str, argv)), here, str(cwd or os.getcwd()), out[1], err[1]
        self._process = _context.Process(target=_become, args=given, daemon=True)
        with pytest.MonkeyPatch.context() as patch:  # for the one that is forked
            patch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU that it had used would be lost to the rest
            patch.setenv("TRITON_INTERPRET", "0")  # some compile kernels
            self._process.start()
        files = []
        for read, write in (out,) if merged else (out, err):
            write.close()
            files.append(open(os.dup(read.fileno()), encoding="utf-8", errors="replace"))  # noqa: SIM115
            read.close()
        self.stdout, self.stderr = files[0], None if merged else files[1]
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def send_signal(self, which: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of both outputs, when it has ended."""
        said = {}
        files = {name: file for name, file in (("out", self.stdout), ("err", self.stderr)) if file and not file.closed}
        threads = [threading.Thread(target=lambda n=n, f=f: said.update({n: f.read()})) for n, f in files.items()]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join()
        for file in files.values():
            file.close()
        return said.get("out", ""), said.get("err", "")


def run(argv: list[str], timeout: float = 300, **how) -> subprocess.CompletedProcess:
    """``subprocess.run([sys.executable, *argv], capture_output=True, text=True)``."""
    process = Popen(argv, **how)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def merged(argv: list[str], env: dict[str, str]) -> Popen:
    """With what is written to stderr in ``stdout``."""
    return Popen(argv, env, merged=True)
