"""Python's garbage collector in a serving process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
