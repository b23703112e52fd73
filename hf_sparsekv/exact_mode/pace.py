"""How many tokens to draft next: by what was accepted lately, and by what drafts and verifications cost here.

Apart from the loop because it sees times and counts only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from ..cuda_graph.inputs import draft_width
from .text import Added

_FIRST = 3  # drafts of the first rounds, which with the token before them fill the smallest graph
_TRIALS = 3  # of these rounds: one warms up, two measure
_SEGMENTS = (4, 8)  # steps of the first dense segments: one warms up, one measures
_LONG, _LONGEST = 64, 512  # steps of later ones: each next one is twice as long
_KEEPS = 0.95  # weight of earlier rounds in the acceptance, each round
_GAIN = 1.02  # of drafting over dense steps, below which it is not worth its scatter


class Next(NamedTuple):
    """What comes next: a round with so many ``drafts``; or, with none, so many dense steps."""

    drafts: int
    steps: int = 0


@dataclass
class Seconds:
    """What something takes: the shortest of the latest measurements, without the first, which warms up."""

    seen: int = 0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=6))

    def add(self, seconds: float) -> None:
        self.seen += 1
        if self.seen > 1:
            self.latest.append(seconds)

    @property
    def least(self) -> float | None:
        return min(self.latest, default=None)


class Pace:
    """Chooses between rounds of drafts and dense steps, to have most tokens a second.

    A round of ``k`` drafts takes ``k`` sparse steps and a verification of ``k + 1`` queries. If a draft is accepted
    with probability ``a``, it gives ``1 + a + ... + a ** k`` tokens.

    Args:
        most: drafts that a round may have.
        fixed: drafts of each round, whatever they cost; None: as many as pay.
    """

    def __init__(self, most: int, fixed: int | None = None) -> None:
        self.most, self.fixed = most, fixed
        self.draft, self.dense = Seconds(), Seconds()
        self.verify: dict[int, Seconds] = {}  # by the width of a captured pass
        self._accepted, self._tried = 0.0, 0.0
        self._segments = 0
        self._long = _LONG

    @property
    def acceptance(self) -> float:
        """Estimated probability that a draft is accepted, given those before it."""
        return (self._accepted + 0.8) / (self._tried + 1.0)

    def drafted(self, drafts: int, added: Added, draft_seconds: float, verify_seconds: float) -> None:
        """A round of so many drafts a row is over."""
        self.draft.add(draft_seconds / drafts)
        self.verify.setdefault(self._width(drafts), Seconds()).add(verify_seconds)
        accepted, tried = (count / added.rows for count in (added.accepted, added.accepted + added.rejected))
        self._accepted = _KEEPS * self._accepted + accepted
        self._tried = _KEEPS * self._tried + tried

    def stepped(self, steps: int, seconds: float) -> None:
        """A segment of dense steps is over."""
        self._segments += 1
        self.dense.add(seconds / steps)

    def next(self, sparse: bool) -> Next:
        """What comes next; ``sparse``: steps would select, so that drafts are not dense steps."""
        if not sparse:
            return Next(0, 16)
        if self.fixed is not None:
            return Next(self.fixed)
        if self._segments < len(_SEGMENTS):
            return Next(0, _SEGMENTS[self._segments])
        first = min(_FIRST, self.most)
        known = self.verify.get(self._width(first))
        if known is None or known.seen < _TRIALS:
            return Next(first)
        rates = {drafts: self.rate(drafts) for drafts in range(1, self.most + 1)}
        best = max(rates, key=lambda drafts: rates[drafts])
        if rates[best] > _GAIN * self.rate(0):
            self._long = _LONG
            return Next(best)
        steps, self._long = self._long, min(2 * self._long, _LONGEST)
        self.verify[self._width(first)].seen = _TRIALS - 1  # one more round comes after these steps
        return Next(0, steps)

    def rate(self, drafts: int) -> float:
        """Expected tokens a second of rounds with so many drafts; 0: of dense steps."""
        if not drafts:
            return 1.0 / (self.dense.least or float("inf"))
        tokens = sum(self.acceptance**i for i in range(drafts + 1))
        return tokens / (drafts * (self.draft.least or 0.0) + self._verification(self._width(drafts)))

    def _verification(self, width: int) -> float:
        """Seconds of a pass of this width. One that never ran is taken for as quick as the widest below, to try it."""
        known = {w: cost.least for w, cost in self.verify.items() if cost.least is not None}
        below = [w for w in known if w <= width]
        found = known[max(below)] if below else min(known.values(), default=0.0)
        return found or 0.0

    def _width(self, drafts: int) -> int:
        return draft_width(drafts + 1, self.most + 1)
