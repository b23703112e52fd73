"""Batches of an evaluation that fit: a batch that runs out of memory is done again in halves.

Answers and held-out text are batched in different ways, and both run out of memory alike.
"""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


def each_batch(batches: Iterable[list[T]], work: Callable[[list[T]], None]) -> None:
    """Do ``work`` for every batch, in parts where a batch does not fit; later batches are no larger.

    Args:
        work: done again for parts of a batch, so it has to skip results that it has kept already.

    Raises:
        MemoryError, torch.OutOfMemoryError: a single row does not fit.
    """
    most: int | None = None
    for batch in batches:
        parts = deque([batch])
        while parts:
            part = parts.popleft()
            if most is not None and len(part) > most:
                parts.extendleft(part[at : at + most] for at in reversed(range(0, len(part), most)))
                continue
            try:
                work(part)
                continue
            except (MemoryError, torch.OutOfMemoryError):
                if len(part) == 1:
                    raise
            # Here the error and what its frames held are gone.
            most = (len(part) + 1) // 2
            parts.appendleft(part)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            warnings.warn(f"{len(part)} rows do not fit into memory: they are read {most} at a time", stacklevel=2)


class Once:
    """Tells progress of pairs, each of them once, whatever is done again."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self._told: set[Hashable] = set()

    def __call__(self, pairs: Iterable[Hashable]) -> None:
        new = set(pairs) - self._told
        self._told |= new
        self._advance(len(new))
