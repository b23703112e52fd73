"""Ids of blocks with reference counts, as vLLM's block manager has them.

A block has the same id in every layer. It belongs to all rows whose table names it, those of copies of the cache among
them, and is free when none does.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_MIN_BLOCKS = 16


def bucket(n: int, least: int = _MIN_BLOCKS) -> int:
    """Smallest capacity of the form {4, 5, 6, 7} x 2^k (at least ``least``) that holds ``n`` items.

    Four sizes an octave: at most a quarter is unused, and growing item by item copies each item about four times
    in all.
    """
    n = max(n, least)
    step = 1 << max((n - 1).bit_length() - 3, 0)
    return -(-n // step) * step


class Pool(Protocol):
    """A layer's block pool, as ids need it."""

    def forget(self, ids: Tensor) -> None:
        """These blocks, int64 ``[n]`` in the CPU's memory, mean nothing any more: drop what is kept about them."""
        ...

    def copy_blocks(self, old: Tensor, new: Tensor) -> None:
        """Copy blocks ``old`` to ``new``, int64 ``[n]`` each, in the CPU's memory."""
        ...


class BlockIds:
    """Ids of blocks, counted. Copies of a cache share them, as they share the block pools.

    Attributes:
        used: ids below it have been given out.
        lock: held from taking ids until they are in a table.
        moves: counts pools that have grown.
    """

    def __init__(self) -> None:
        self.used = self.moves = 0
        self.lock = threading.RLock()
        self._references = np.zeros(_MIN_BLOCKS, dtype=np.int32)
        self._free: list[int] = []
        self._dropped: deque[np.ndarray] = deque()  # of tables that were deleted, by whatever thread
        self._pools: weakref.WeakSet[Pool] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict) -> BlockIds:
        return self

    def register(self, pool: Pool) -> None:
        """``pool`` is where a layer's blocks of these ids are."""
        self._pools.add(pool)

    @property
    def pools(self) -> list[Pool]:
        """The layers' pools."""
        return list(self._pools)

    def take(self, n: int) -> np.ndarray:
        """``n`` ids, int32, with one reference each: such as were free, then new ones, one after the other."""
        with self.lock:
            self._drain()
            again, self._free = self._free[:n], self._free[n:]
            new = np.arange(self.used, self.used + n - len(again), dtype=np.int32)
            self.used += len(new)
            if self.used > len(self._references):
                self._references = np.pad(self._references, (0, bucket(self.used) - len(self._references)))
            ids = np.concatenate((np.array(again, dtype=np.int32), new))
            self._references[ids] = 1
            return ids

    def share(self, ids: np.ndarray) -> None:
        """One more reference to each; -1 is none."""
        with self.lock:
            self._references += self._counted(ids)

    def drop(self, ids: np.ndarray) -> None:
        """One reference less to each; -1 is none."""
        with self.lock:
            counted = self._counted(ids)
            self._references -= counted
            gone = np.flatnonzero((counted > 0) & (self._references == 0))
            if not len(gone):
                return
            these = torch.from_numpy(gone)
            for pool in self.pools:
                pool.forget(these)
            self._free += gone.tolist()
            live = self._references[: self.used].nonzero()[0]
            used = int(live[-1]) + 1 if len(live) else 0
            if used < self.used:  # pools need no room for unused blocks
                self.used, self._free = used, [i for i in self._free if i < used]

    def _counted(self, ids: np.ndarray) -> np.ndarray:
        """How often each id is named; ``ufunc.at`` takes three times as long for a row of 600 blocks."""
        return np.bincount(ids[ids >= 0], minlength=len(self._references)).astype(np.int32)

    def drop_later(self, held: list[np.ndarray]) -> None:
        """:meth:`drop` of a table that is being deleted, in the middle of anything."""
        self._dropped.append(held[0])

    def shared(self, ids: np.ndarray) -> np.ndarray:
        """Which of them have more than one reference, bool."""
        with self.lock:
            self._drain()
            return (ids >= 0) & (self._references[np.maximum(ids, 0)] > 1)

    def _drain(self) -> None:
        while self._dropped:
            self.drop(self._dropped.popleft())
