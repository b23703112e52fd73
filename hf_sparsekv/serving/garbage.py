"""Python's garbage in a process that serves."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Full collections leave out what is there now. All rows wait for each of them until it has seen everything.

    Of a process that holds torch, transformers and an engine that took .2 to .3 s each time (benchmarks/NOTES.md). It
    is for processes that do nothing but serve: what they hold now and drop before the end stays if it refers to itself,
    as caches and models do, until the first full collection behind it.
    """
    gc.collect()
    try:
        gc.freeze()
        yield
    finally:
        gc.unfreeze()
