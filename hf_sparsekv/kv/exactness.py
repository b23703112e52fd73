"""How the texts of one cache are checked, and how much of what it holds full attention has computed.

The contents of rows are in :mod:`.row_table`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .audited import Audited


@dataclass
class Exactness:
    """How the texts of one cache are checked. Copies and files of the cache keep :attr:`inexact_from` alone.

    Attributes:
        everything: each pass attends to all tokens, decode steps and drafts too.
        check: how the texts of the ``generate()`` under way are checked (:class:`..checking.call.Check`); None: they
            are not.
        aside: it is a copy for a few passes beside the cache that decodes: none is worth a capture.
        counts: of rows that come and go: tokens of each in the verification under way; None: there is none.
        audited: what full attention has found of the texts' tokens; None: it was never asked.
        drafted, accepted: drafts of sparse steps so far, and those that full attention chose too.
        inexact_from: the column of the first token in whose pass a layer attended to a selection, so that its keys and
            values and all later ones differ from those of full attention; None: there is none. In continuous batching
            columns are those of no row, and this says whether any row may hold such tokens.
    """

    everything: bool = False
    check: Any = None
    aside: bool = False
    counts: tuple[int, ...] | None = None
    audited: Audited | None = None
    drafted: int = 0
    accepted: int = 0
    inexact_from: int | None = None

    def copy(self) -> Exactness:
        """The exactness of a copy of the cache."""
        return Exactness(inexact_from=self.inexact_from)

    def selected(self, column: int) -> None:
        """A layer attends to a selection in a pass whose first token is in ``column``."""
        if self.inexact_from is None or column < self.inexact_from:
            self.inexact_from = column

    def cropped(self, columns: int) -> None:
        """Only the first ``columns`` columns are kept."""
        if self.inexact_from is not None and columns <= self.inexact_from:
            self.inexact_from = None

    def begin(self, check: Any, everything: bool = True) -> None:
        """Texts are checked from here on, by ``check``; ``everything``: passes attend to all tokens."""
        self.everything, self.check = everything, check

    def end(self) -> None:
        """Texts are checked no more; what was counted stays."""
        self.everything, self.check = False, None

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
        """Nothing is cached, and nothing was drafted."""
        self.drafted, self.accepted, self.inexact_from, self.audited = 0, 0, None, None
