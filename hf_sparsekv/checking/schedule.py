"""Schedules: how many tokens are drafted before each exact pass, and where dense steps take their place.

:class:`.pace.Pace` chooses by measured times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .pace import Expected, Next
from .text import Added


class Schedule(Protocol):
    """The schedule of texts of one number of rows and length.

    Attributes:
        most: drafts that a round may have.
        drafting: rounds of drafts come one after the other.
    """

    most: int
    drafting: bool

    def next(self, sparse: bool, tries: bool = True, price: float = 0.0, room: int | None = None) -> Next:
        """The next round, or the next dense steps.

        Args:
            sparse: steps would select, so that drafts are not dense steps.
            tries: drafts that are not known to pay may be tried now.
            price: seconds that a first round takes beside its own, for captures.
            room: tokens that may still come; None: no limit.
        """
        ...

    def looks_up(self, drafts: int) -> bool:
        """Whether it pays to look for drafts in the text, before a round with so many drafts of steps."""
        ...

    def best_of(self, found: int, drafts: int) -> int:
        """How many of the drafts ``found`` in the text to verify; 0: a round with ``drafts`` of steps gives more."""
        ...

    def drafted(self, drafts: int, added: Added, draft_seconds: float | None, verify_seconds: float | None) -> None:
        """A round of so many drafts a row is over. Seconds are None if something was captured in them."""
        ...

    def looked_up(self, drafts: int, added: Added, verify_seconds: float | None) -> None:
        """A round is over whose drafts were those of the text itself; as :meth:`drafted`."""
        ...

    def stepped(self, seconds: float, steps: int = 1, alone: bool = True) -> None:
        """Dense steps are over; ``seconds``: of each. Not ``alone``: what came before and after them is in it."""
        ...


class Schedules(Protocol):
    """The schedules of a text, which grows."""

    def of(self, rows: int, tokens: int, expected: Callable[[], Expected | None]) -> Schedule:
        """The schedule of ``rows`` rows with so many ``tokens`` together; ``expected``: of times, where it asks."""
        ...


class Interval:
    """So many drafts each round, whatever they cost. It is the schedule of any text.

    Args:
        drafts: of each round.
    """

    drafting = True

    def __init__(self, drafts: int) -> None:
        self.most = drafts

    def of(self, rows: int, tokens: int, expected: Callable[[], Expected | None]) -> Schedule:
        return self

    def next(self, sparse: bool, tries: bool = True, price: float = 0.0, room: int | None = None) -> Next:
        return Next(self.most) if sparse else Next(0, 16)

    def looks_up(self, drafts: int) -> bool:
        return False

    def best_of(self, found: int, drafts: int) -> int:
        return 0

    def drafted(self, drafts: int, added: Added, draft_seconds: float | None, verify_seconds: float | None) -> None:
        pass

    def looked_up(self, drafts: int, added: Added, verify_seconds: float | None) -> None:
        pass

    def stepped(self, seconds: float, steps: int = 1, alone: bool = True) -> None:
        pass
