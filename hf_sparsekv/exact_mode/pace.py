"""How many tokens to draft next: by what was accepted lately, and by what drafts and verifications cost here.

Apart from the loop because it sees times and counts only.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
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
_NEW_WIDTH = 1.05  # of a number of drafts whose verification has never run, which has to be captured, over others
_HOPED = 0.97  # acceptance at which drafts that do not pay even then are tried rarely
_SURE = 8.0  # drafts of the text itself that were tried, before it may be worth to capture wider verifications
_LOSES = 0.02  # share of the time of dense steps that the trials before them may have lost


class Expected(NamedTuple):
    """What is expected before anything was tried, in seconds beside a dense step.

    Args:
        faster: by which a sparse step is faster.
        slower: by which a verification is slower, by its tokens. Empty: not at all, as far as is known.
    """

    faster: float
    slower: Mapping[int, float]


class Next(NamedTuple):
    """What comes next: a round with so many ``drafts``; or, with none, so many dense steps."""

    drafts: int
    steps: int = 0


@dataclass
class Seconds:
    """What something takes: the median of the latest measurements, without the first, which warms up."""

    seen: int = 0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=6))

    def add(self, seconds: float) -> None:
        self.seen += 1
        if self.seen > 1:
            self.latest.append(seconds)

    @property
    def usual(self) -> float | None:
        return statistics.median(self.latest) if self.latest else None


class Pace:
    """Chooses between rounds of drafts and dense steps, to have most tokens a second.

    A round of ``k`` drafts takes ``k`` sparse steps and a verification of ``k + 1`` queries. If a draft is accepted
    with probability ``a``, it gives ``1 + a + ... + a ** k`` tokens.

    Args:
        most: drafts that a round may have.
        fixed: drafts of each round, whatever they cost; None: as many as pay.

    Attributes:
        expected: what is known of the times; it decides when drafts are tried first. None: nothing.
    """

    def __init__(self, most: int, fixed: int | None = None) -> None:
        self.most, self.fixed = most, fixed
        self.draft, self.dense = Seconds(), Seconds()
        self.verify: dict[int, Seconds] = {}  # by the width of a captured pass
        self._accepted, self._tried = 0.0, 0.0
        self._found, self._looked = 0.0, 0.0  # the same of drafts of the text itself
        self._segments = 0
        self._long = _LONG
        self.expected: Expected | None = None
        self._lost = 0.0  # seconds since the last long segment, beyond those of dense steps

    @property
    def acceptance(self) -> float:
        """Estimated probability that a draft is accepted, given those before it."""
        return (self._accepted + 0.8) / (self._tried + 1.0)

    def drafted(self, drafts: int, added: Added, draft_seconds: float, verify_seconds: float) -> None:
        """A round of so many drafts a row is over."""
        self.draft.add(draft_seconds / drafts)
        self.verify.setdefault(self._width(drafts), Seconds()).add(verify_seconds)
        if self._ran(drafts) and self.dense.usual is not None:
            self._lost += self._round(drafts) - (added.accepted / added.rows + 1) * self.dense.usual
        accepted, tried = (count / added.rows for count in (added.accepted, added.accepted + added.rejected))
        self._accepted = _KEEPS * self._accepted + accepted
        self._tried = _KEEPS * self._tried + tried

    def looked_up(self, drafts: int, added: Added, verify_seconds: float) -> None:
        """A round is over whose drafts were those of the text itself."""
        self.verify.setdefault(self._width(drafts), Seconds()).add(verify_seconds)
        self._found = _KEEPS * self._found + added.accepted
        self._looked = _KEEPS * self._looked + added.accepted + added.rejected

    def looks_up(self, drafts: int) -> bool:
        """Whether it pays to look for drafts in the text, before a round with so many drafts of steps."""
        return self.fixed is None and self._ran(drafts) and self.best_of(self.most, drafts) > 0

    def best_of(self, found: int, drafts: int) -> int:
        """How many of the drafts ``found`` in the text to verify; 0: a round with ``drafts`` of steps gives more."""
        accepts = (self._found + 0.8) / (self._looked + 1.0)
        rates = {
            n: sum(accepts**i for i in range(n + 1)) / self._verification(self._width(n))
            for n in range(1, min(found, self.most) + 1)
            if self._ran(n) or self._looked > _SURE
        }
        best = max(rates, key=lambda n: rates[n], default=0)
        return best if best and rates[best] > self.rate(drafts) else 0

    def stepped(self, seconds: float) -> None:
        """A segment of dense steps is over; ``seconds``: of each."""
        self._segments += 1
        self.dense.add(seconds)

    def next(self, sparse: bool) -> Next:
        """What comes next; ``sparse``: steps would select, so that drafts are not dense steps."""
        if not sparse:
            return Next(0, 16)
        if self.fixed is not None:
            return Next(self.fixed)
        if self._segments < len(_SEGMENTS):
            return Next(0, _SEGMENTS[self._segments])
        first, best, dense = min(_FIRST, self.most), self.beside(), self.rate(0)
        known = self.verify.get(self._width(first))
        if known is None and self.expected is not None and not self._hopeful(self.expected):
            self.expected = None
            return Next(0, _LONGEST)
        if known is None or known.seen < _TRIALS:
            return Next(first)
        if self.rate(best) > _GAIN * dense:
            self._long, self._lost = _LONG, 0.0
            return Next(best)
        ran = (drafts for drafts in range(1, self.most + 1) if self._ran(drafts))
        if max(self.rate(drafts, _HOPED) for drafts in ran) < _GAIN * dense:
            self._long = _LONGEST
        steps = max(self._long, int(self._lost * dense / _LOSES))
        self._long, self._lost = min(2 * self._long, _LONGEST), 0.0
        self.verify[self._width(first)].seen = _TRIALS - 1  # one more round comes after these steps
        return Next(0, steps)

    def beside(self) -> int:
        """Drafts of a round if there has to be one, as others need its sparse steps anyway."""
        if not self._ran(min(_FIRST, self.most)):
            return min(_FIRST, self.most)
        return max(range(1, self.most + 1), key=lambda n: self.rate(n) / (1.0 if self._ran(n) else _NEW_WIDTH))

    def rate(self, drafts: int, acceptance: float | None = None) -> float:
        """Expected tokens a second of rounds with so many drafts; 0: of dense steps."""
        if not drafts:
            return 1.0 / (self.dense.usual or float("inf"))
        accepts = self.acceptance if acceptance is None else acceptance
        tokens = sum(accepts**i for i in range(drafts + 1))
        return tokens / self._round(drafts)

    def _round(self, drafts: int) -> float:
        """Seconds of a round with so many drafts."""
        return drafts * (self.draft.usual or 0.0) + self._verification(self._width(drafts))

    def _verification(self, width: int) -> float:
        """Seconds of a pass of this width. One that never ran is taken for as fast as the widest below, to try it."""
        known = {w: cost.usual for w, cost in self.verify.items() if cost.usual is not None}
        below = [w for w in known if w <= width]
        found = known[max(below)] if below else min(known.values(), default=0.0)
        return found or 0.0

    def _hopeful(self, expected: Expected) -> bool:
        """Whether drafts are expected to pay if nearly all are right."""
        dense = self.dense.usual
        if dense is None:
            return True
        draft = max(0.0, dense - expected.faster)

        def rate(drafts: int) -> float:
            least = min((n for n in expected.slower if n > drafts), default=max(expected.slower, default=0))
            verify = dense + expected.slower.get(least, 0.0)
            return sum(_HOPED**i for i in range(drafts + 1)) / (drafts * draft + verify)

        return max(map(rate, range(1, self.most + 1))) > _GAIN / dense

    def _ran(self, drafts: int) -> bool:
        """Whether verifications of so many drafts were measured."""
        known = self.verify.get(self._width(drafts))
        return known is not None and known.usual is not None

    def _width(self, drafts: int) -> int:
        return draft_width(drafts + 1, self.most + 1)
