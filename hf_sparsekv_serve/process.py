"""A process that does nothing but serve: its garbage collector, its threads, its first request and its end."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from hf_sparsekv.serving.sampling import Sampling

if TYPE_CHECKING:
    from hf_sparsekv.serving.engine import Engine

TURN_S = 0.001
ASIDE = 10  # nice: a tenth of the time of a thread at 0 that wants the same core
WARM_UP = 64  # tokens
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ASIDE = threading.local()


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Inside, exclude all existing objects from full collections, during which all rows wait.

    In a process with torch, transformers and an engine each one took 0.2 to 0.3 s (benchmarks/NOTES.md). Use it only in
    processes that do nothing but serve. An existing object in a reference cycle, such as a cache or a model, is freed
    only by the first full collection after this context.
    """
    gc.collect()
    try:
        gc.freeze()
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Inside, Python's threads switch every 1 ms instead of 5: the engine waits for a turn each time it enters Python.

    With two other threads computing in Python, the longest gap between two tokens of a tiny model was 152 ms. With
    short turns it was 46 ms.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def step_aside() -> None:
    """Permanently give the calling thread a lower priority than the engine's thread.

    Texts are scanned and tokenised during decode steps. On a CPU both want all cores, and decoding should go first.
    The main thread keeps its priority, and so do all threads where priorities belong to processes (not Linux).
    """
    if sys.platform != "linux" or getattr(_ASIDE, "done", False):
        return
    if threading.current_thread() is not threading.main_thread():
        _ASIDE.done = True
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ASIDE)


def warm_up(engine: Engine) -> None:
    """Answer a first request, so that no client waits for what an engine does once."""
    length = max(1, min(WARM_UP, engine.max_length - 2))
    engine.submit([0] * length, Sampling(max_tokens=2, temperature=0.0, ignore_eos=True)).result()


def ignore_signals() -> None:
    """Ignore the signals that end a server: rank 0 alone ends by them."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)


def end_after(work: Callable[[], None]) -> NoReturn:
    """Do all the work of this process, and end it. An error is printed, and the exit code is 1."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def leave(code: int) -> NoReturn:
    """End at once: groups of torch.distributed have threads that may outlive the interpreter, and abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
