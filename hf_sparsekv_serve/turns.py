"""Thread scheduling in a serving process."""

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
    """Inside, Python's threads switch every 1 ms instead of 5: the engine waits for a turn each time it enters Python.

    With two other threads computing in Python, the longest gap between two tokens of a tiny model was 152 ms, and 46 ms
    with short turns.
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
