"""Exact mode of one cache: whether passes attend to everything now, and what became of its drafts.

Apart from the row table because nothing here says what rows hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Exactness:
    """Exact mode of one cache. Nothing in it is copied or saved with the cache.

    Attributes:
        everything: each pass attends to all tokens, decode steps and drafts too.
        most: drafts a round, fixed; None: as many as pay.
        counts: of rows that come and go: tokens of each in the verification under way; None: there is none.
        drafted, accepted: drafts of sparse steps so far, and those that full attention chose too.
    """

    everything: bool = False
    most: int | None = None
    counts: tuple[int, ...] | None = None
    drafted: int = 0
    accepted: int = 0

    def begin(self, most: int | None) -> None:
        """Exact mode begins, with ``most`` drafts a round."""
        self.everything, self.most = True, most

    def end(self) -> None:
        """Exact mode ends; what was counted stays."""
        self.everything, self.most = False, None

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Inside, steps attend to selections."""
        self.everything = False
        try:
            yield
        finally:
            self.everything = True

    @contextmanager
    def exactly(self, counts: tuple[int, ...] | None = None) -> Iterator[None]:
        """Inside, passes attend to everything; ``counts``: of a verification."""
        before = self.everything
        self.everything, self.counts = True, counts
        try:
            yield
        finally:
            self.everything, self.counts = before, None

    def clear(self) -> None:
        """Nothing was drafted."""
        self.drafted = self.accepted = 0
