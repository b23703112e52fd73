"""How threads of a process that serves take turns."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

TURN_S = 0.001
ASIDE = 10  # nice: a tenth of the time of a thread at 0 that wants the same core
_ASIDE = threading.local()


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Python's threads take turns of 1 ms, not 5: the engine waits for one each time that it comes back to Python.

    Two threads that compute in Python beside a tiny model made the longest gap between two of its tokens 152 ms, and
    46 ms with short turns.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def step_aside() -> None:
    """Give the calling thread, for good, a lower priority than the engine's thread has.

    Texts are scanned and tokenised beside decode steps. On a CPU both want all cores, and tokens should keep coming.
    The main thread keeps its priority, and so do all threads where priorities belong to processes (not Linux).
    """
    if sys.platform != "linux" or getattr(_ASIDE, "done", False):
        return
    if threading.current_thread() is not threading.main_thread():
        _ASIDE.done = True
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ASIDE)
