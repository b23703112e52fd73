"""Starts the other ranks of a tensor parallel model as child processes of rank 0.

    ranks = RankProcesses(2, Served("Qwen/Qwen3-32B"), gpus=True)
    engine = ranks.engine()  # this process is rank 0
    ...
    engine.close()
    ranks.close()

It is for processes that torchrun has not started, such as a replica under Ray (:mod:`.ray.deployment`). The children
run :func:`.ranks.follow`. All ranks are on one machine and meet over its loopback interface, on a free port, so other
machines cannot reach them.

A child never outlives rank 0: the kernel kills it (``PR_SET_PDEATHSIG``). If a child ends early, rank 0 learns of it
with the child's last error (:attr:`RankProcesses.lost`), and the replica ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from hf_sparsekv_config.serving import ServingConfig
from hf_sparsekv_config.sparse import OffloadConfig, SparseConfig

from .loading import load
from .process import end_after, ignore_signals
from .ranks import RanksApart, TensorParallelEngine, follow

HERE = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
WORDS_S = 2.0  # how long the end of a child may come after the error that it causes
CLOSE_S = 10.0  # how long children may take to end after the engine is closed

# The program of a child. First, before torch is imported, it asks to be killed when its parent ends: prctl(1) is
# PR_SET_PDEATHSIG, of the thread that has started it. A parent that has ended before that is not its parent any more.
CHILD = """
import ctypes, os, signal, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL):
    sys.exit("this system does not tell processes that their parent has ended (prctl)")
if os.getppid() != int(sys.argv[1]):
    sys.exit("rank 0 has ended")
from hf_sparsekv_serve.rank_processes import child
child()
"""

T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """Settings that every rank of a replica starts with.

    Attributes:
        model, dtype: as :func:`.loading.load` takes them.
        config, offload, serving: as :class:`.Engine` takes them.
    """

    model: str
    dtype: str = "auto"
    config: SparseConfig | None = None
    offload: OffloadConfig | bool = False
    serving: ServingConfig = field(default_factory=ServingConfig)


def gpus_of_ranks(size: int) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of each of ``size`` ranks: one of the GPUs that this process sees.

    Raises:
        ValueError: it sees too few GPUs.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = list(map(str, range(torch.cuda.device_count()))) if given is None else given.replace(" ", "").split(",")
    seen = [one for one in seen if one]
    if len(seen) < size:
        raise ValueError(f"{size} ranks need a GPU each, and this process sees {len(seen)}: {','.join(seen) or 'none'}")
    return seen[:size]


class RankProcesses:
    """Ranks 1, 2, ... as children of this process, which becomes rank 0. A process can do this once.

    The children start at once, and wait for :meth:`engine`. The environment of this process gets the variables that
    torchrun would set (``RANK``, ``WORLD_SIZE``, ...). Its ``CUDA_VISIBLE_DEVICES`` becomes the first of its GPUs.

    Args:
        size: number of ranks, including this one.
        served: the model and how it is served.
        gpus: rank k uses the k-th GPU that this process sees. False: all ranks use the CPU.

    Raises:
        ValueError: there are too few GPUs, or GPUs are visible although the CPU is to be used.
    """

    def __init__(self, size: int, served: Served, gpus: bool) -> None:
        if size < 2:
            raise ValueError(f"size must be at least 2, got {size}: one process needs no ranks")
        devices = gpus_of_ranks(size) if gpus else [""] * size
        if not gpus and torch.cuda.is_available():  # where transformers would put its shares of the model
            raise ValueError("ranks compute on the GPUs that are there: hide them with CUDA_VISIBLE_DEVICES=")
        self.size, self.served, self.gpus = size, served, gpus
        self._closing = False
        self._lost: Future[RanksApart] = Future()
        listener = socket.create_server((HERE, 0))  # a store that opens its own socket listens on all interfaces
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            HERE, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": HERE, "MASTER_PORT": str(port)}
        world |= {"LOCAL_RANK": "0"}  # a rank's device is the first that it sees
        for name in INTERFACES:
            world[name] = os.environ.get(name, LOOPBACK)
        places = [{**world, "RANK": str(rank), "CUDA_VISIBLE_DEVICES": devices[rank]} for rank in range(size)]
        os.environ.update(places[0])
        self.children: list[subprocess.Popen] = []
        try:
            for rank in range(1, size):
                started: Future[subprocess.Popen] = Future()
                args, name = (rank, places[rank], started), f"hf-sparsekv-rank-process-{rank}"
                threading.Thread(target=self._look_after, args=args, name=name, daemon=True).start()
                self.children.append(started.result())
        except BaseException:
            self.close(0)
            raise

    @property
    def lost(self) -> RanksApart | None:
        """Why the replica has ended: a child ended early. None: no child has."""
        return self._lost.result() if self._lost.done() else None

    def when_lost(self, call: Callable[[RanksApart], object]) -> None:
        """Call ``call`` when a child is lost, on another thread; or now, on this one, if a child is lost already."""
        self._lost.add_done_callback(lambda found: call(found.result()))

    def engine(self) -> TensorParallelEngine:
        """Wait for all ranks, load the model on each, and return the engine. To be called once.

        Raises:
            RanksApart: a child has ended. A thread of this process may wait for it forever, so end the process.
            OSError: there is no such model.
            TypeError, ValueError: as :class:`.Engine`.
        """

        def make() -> TensorParallelEngine:
            _meet(self._store, 0, self.size, self.gpus)
            served = self.served
            tokenizer, model = load(served.model, served.dtype, "cuda" if self.gpus else "cpu", tensor_parallel=True)
            return TensorParallelEngine(model, tokenizer, served.config, served.offload, served.serving)

        try:
            return self._unless_lost(make)
        except BaseException:
            self.close(0)
            raise

    def close(self, seconds: float = CLOSE_S) -> None:
        """Wait ``seconds`` for the children, which end after the engine is closed, and kill those that are left."""
        self._closing = True
        until = time.monotonic() + seconds
        for process in self.children:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self.children:
            process.wait()

    def _unless_lost(self, make: Callable[[], T]) -> T:
        """The result of ``make``, or an error as soon as a child ends, for which ``make`` may wait forever."""
        made: Future[T] = Future()

        def run() -> None:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=run, name="hf-sparsekv-begin", daemon=True).start()
        wait((made, self._lost), return_when=FIRST_COMPLETED)
        if not (made.done() and made.exception() is None):
            wait((made, self._lost), WORDS_S)  # if both have failed, one may have caused the other
        error = made.exception() if made.done() else None
        if error is not None and not isinstance(error, RuntimeError):  # a broken connection raises RuntimeError
            raise error
        if (lost := self.lost) is not None:
            raise lost from error
        return made.result()

    def _look_after(self, rank: int, place: dict[str, str], started: Future) -> None:
        """Start a child, and wait for its end: if this thread ended before, the kernel would kill it."""
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(os.getpid()), f"rank={rank}"],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **place},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        words = [""]
        listener = threading.Thread(target=_listen, args=(rank, process, words), daemon=True)
        listener.start()
        with contextlib.suppress(OSError):  # it has ended already
            process.stdin.write(pickle.dumps(self.served))
            process.stdin.close()
        code = process.wait()
        if self._closing or code == 0:  # rank 0 has told it to end
            return
        listener.join(WORDS_S)  # its own children may still hold its output
        how = f"been killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = f" ({words[0]})" if words[0] and code != -signal.SIGKILL else ""  # SIGKILL leaves no message
        error = RanksApart(f"rank {rank} of the model has {how}{last}, and with it the replica: start it again")
        with contextlib.suppress(Exception):  # the first lost child counts
            self._lost.set_result(error)


def _listen(rank: int, process: subprocess.Popen, words: list[str]) -> None:
    """Pass on what a child says, and keep its last line."""
    for line in process.stdout:
        text = line.decode(errors="replace").rstrip().rpartition("\r")[2]  # the latest state of a progress bar
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
        words[0] = text.strip() or words[0]


def _meet(store: dist.Store, rank: int, size: int, gpus: bool) -> None:
    """Let the ranks find each other; of its GPUs a rank takes the first."""
    if not gpus:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        return
    here = torch.device("cuda", 0)
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=here)


def child() -> NoReturn:
    """All of a child's life: what it serves comes in by stdin, where it is by its environment."""
    ignore_signals()
    served: Served = pickle.load(sys.stdin.buffer)
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    gpus = bool(os.environ["CUDA_VISIBLE_DEVICES"])

    def work() -> None:
        _meet(dist.TCPStore(HERE, port, size, is_master=False), rank, size, gpus)
        model = load(served.model, served.dtype, "cuda" if gpus else "cpu", tensor_parallel=True)[1]
        follow(model, served.config, served.offload, served.serving)

    end_after(work)
