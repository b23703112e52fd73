"""How many tokens to draft next: by what was accepted lately, and by what drafts and verifications cost here.

It sees times and counts only.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..cuda_graph.inputs import draft_width
from .text import Added

_FIRST = 3  # drafts of a trial: with the token before them they fill the smallest graph
_MEASURED, _LONGEST = 4, 512  # dense steps that are measured before drafts are thought of, and most of them at a time
_FEW = 8  # while little is known: dense steps at a time, rounds to the next ones, drafts of the text before wider ones
_AFTER = 128  # rounds after which dense steps are measured again
_KEEPS = 0.95  # weight of earlier rounds in the acceptance, each round
_USUAL, _WEIGHT = 0.93, 2.0  # acceptance before a draft was tried, and as many drafts as it counts for
_SEEN = 20.0  # drafts that were tried, before which drafting ends once it has lost a dense step
_CLEAR = 1.05  # gain with which drafts begin at once, and by which a verification that never ran has to be better
_HOPED, _RARELY = 0.96, 3.0  # acceptance at which drafts that do not pay even then wait so many times as long
_LOSES = 0.02  # share of the time of dense steps that trials may lose
_BACKS_OFF = 8.0  # most times that this share is divided by, after trials that lost


class Expected(NamedTuple):
    """Expectations before anything was tried, in seconds relative to a dense step.

    Args:
        faster: by which a sparse step is faster.
        slower: by which a verification is slower, by its tokens. Empty: not at all, as far as is known.
    """

    faster: float
    slower: Mapping[int, float]


class Next(NamedTuple):
    """The next round: so many ``drafts``; or, with none, so many dense steps."""

    drafts: int
    steps: int = 0


@dataclass
class Seconds:
    """Measured seconds: the median of the latest measurements, without the first one if it is a ``warm_up``.

    Take the smaller of two measurements; noise only adds time.

    Attributes:
        usual: that median; None: nothing was measured lately.
        least: of all measurements; None: there were none.
    """

    warm_up: bool = True
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=6))
    usual: float | None = None
    least: float | None = None

    def add(self, seconds: float | None) -> None:
        """It was done once; None: not as usual, because it was captured."""
        if self.warm_up or seconds is None:
            self.warm_up = False
            return
        self.latest.append(seconds)
        self.usual = statistics.median_low(self.latest)
        self.least = seconds if self.least is None else min(self.least, seconds)

    def measure_again(self) -> None:
        """The latest measurements say nothing any more."""
        self.latest.clear()
        self.usual = None


@dataclass
class Luck:
    """State independent of rows and lengths: recent acceptance of drafts, and the time that trials may still lose.

    Attributes:
        accepted, tried: drafts of steps. found, looked: drafts of the text itself.
        allowed: seconds that the next trial may lose; less than 0: trials have lost more.
        backs_off: divisor of what dense steps add to that: twice as large after each trial that lost.
    """

    accepted: float = 0.0
    tried: float = 0.0
    found: float = 0.0
    looked: float = 0.0
    allowed: float = 0.0
    backs_off: float = 1.0

    @property
    def acceptance(self) -> float:
        """Estimated probability that a draft is accepted, given those before it. At first that of most texts."""
        return (self.accepted + _USUAL * _WEIGHT) / (self.tried + _WEIGHT)

    def add(self, added: Added) -> None:
        """A round of drafts of steps is over."""
        self.accepted = _KEEPS * self.accepted + added.accepted
        self.tried = _KEEPS * self.tried + added.accepted + added.rejected

    def new_text(self) -> None:
        """A new text begins: halve the weight of earlier ones."""
        self.accepted, self.tried = self.accepted / 2, self.tried / 2
        self.found, self.looked = 0.0, 0.0

    def lost(self, seconds: float) -> None:
        """Drafting is over that has lost so much; less than 0: it has gained."""
        self.allowed = min(0.0, self.allowed) - max(0.0, seconds)
        if seconds > 0:
            self.backs_off = min(2 * self.backs_off, _BACKS_OFF)


class Pace:
    """Chooses between rounds of drafts and dense steps, to have most tokens a second.

    A round of ``k`` drafts takes ``k`` sparse steps and a verification of ``k + 1`` queries. If a draft is accepted
    with probability ``a``, it gives ``1 + a + ... + a ** k`` tokens.

    Drafts begin at once where measured or expected times say that they clearly pay. Elsewhere they are tried, once
    dense steps have taken so long that a trial that fails costs a small share of that.

    Args:
        most: drafts that a round may have.
        fixed: drafts of each round, whatever they cost; None: as many as pay.
        luck: shared with the paces of other rows and lengths; None: its own.

    Attributes:
        expected: what is known of the times before they are measured. None: nothing.
        drafting: rounds of drafts come one after the other, as long as they pay.
    """

    def __init__(self, most: int, fixed: int | None = None, luck: Luck | None = None) -> None:
        self.most, self.fixed, self.luck = most, fixed, luck or Luck()
        self.draft, self.dense = Seconds(), Seconds(warm_up=False)
        self.verify: dict[int, Seconds] = {}  # by the width of a captured pass
        self.expected: Expected | None = None
        self.drafting = False
        self._widths = [draft_width(n + 1, most + 1) for n in range(1, most + 1)]  # of verifications, by drafts
        self._doubts, self._rounds, self._lost = 0, 0, 0.0  # since drafting began

    @property
    def acceptance(self) -> float:
        """Estimated probability that a draft is accepted, given those before it."""
        return self.luck.acceptance

    # ------------------------------------------------------------------ what has happened

    def drafted(self, drafts: int, added: Added, draft_seconds: float | None, verify_seconds: float | None) -> None:
        """A round of so many drafts a row is over. Seconds are None if something was captured in them."""
        self.draft.add(None if draft_seconds is None else draft_seconds / drafts)
        self.verify.setdefault(self._width(drafts), Seconds()).add(verify_seconds)
        self.luck.add(added)
        if (dense := self.dense.usual) is not None:  # a single measurement that is far off is no loss
            took = min(self._round(drafts), (drafts + 2) * dense)
            self._lost += took - (added.accepted / added.rows + 1) * dense
        self._rounds += 1

    def looked_up(self, drafts: int, added: Added, verify_seconds: float | None) -> None:
        """A round is over whose drafts were those of the text itself; as :meth:`drafted`."""
        self.verify.setdefault(self._width(drafts), Seconds()).add(verify_seconds)
        self.luck.found = _KEEPS * self.luck.found + added.accepted
        self.luck.looked = _KEEPS * self.luck.looked + added.accepted + added.rejected

    def stepped(self, seconds: float, steps: int = 1, alone: bool = True) -> None:
        """Dense steps are over; ``seconds``: of each. Not ``alone``: what came before and after them is in it."""
        if alone or self.dense.usual is None:
            self.dense.add(seconds)
        self.luck.allowed += _LOSES / self.luck.backs_off * seconds * steps

    # ------------------------------------------------------------------ what comes next

    def next(self, sparse: bool, tries: bool = True, price: float = 0.0, room: int | None = None) -> Next:
        """The next round, or the next dense steps.

        Args:
            sparse: steps would select, so that drafts are not dense steps.
            tries: drafts that are not known to pay may be tried now.
            price: seconds that a first round takes beside its own, for captures.
            room: tokens that may still come; None: no limit.
        """
        if not sparse:
            return Next(0, 16)
        if self.fixed is not None:
            return Next(self.fixed)
        dense = self.dense.usual
        if dense is None:
            return Next(0, _MEASURED)
        best = min(self.beside(), 2 + int(self.luck.tried / 2))  # what few drafts have said may be luck
        gain = self.rate(best) * dense
        if self.drafting:
            if (drafts := self._on(best, gain)) is not None:
                return drafts
        elif gain > _CLEAR and (self.expected is not None or self._ran(best)):
            saves = price if room is None else (1 - 1 / gain) * dense * room
            if saves >= price:
                return self._begin(best)
        short = self._stake() + price - self.luck.allowed
        if short <= 0 and tries:
            self.luck.allowed -= price
            for known in (self.draft, *self.verify.values()):
                known.measure_again()  # something else may have made them long
            return self._begin(min(best, _FIRST))
        steps = int(max(0.0, short) * self.luck.backs_off / (_LOSES * dense)) + 1
        return Next(0, min(max(steps, _MEASURED), _LONGEST if len(self.dense.latest) > 1 else _FEW))

    def _begin(self, drafts: int) -> Next:
        self.drafting, self._doubts, self._rounds, self._lost = True, 0, 0, 0.0
        return Next(drafts)

    def _on(self, best: int, gain: float) -> Next | None:
        """Go on drafting, with these drafts and the gain that they promise; None: drafting is over."""
        assert self.dense.usual is not None
        lost = self._lost > self.dense.usual and self.luck.tried < _SEEN
        if gain > 1 and not lost:
            self._doubts = 0
            if self._ran(best):
                self.luck.backs_off = 1.0
            if self._rounds < (_AFTER if len(self.dense.latest) > 1 else _FEW):
                return Next(best)
            self._rounds = 0
            return Next(0, _MEASURED)
        self._doubts += 1
        if self._doubts < 2 and not lost:  # a single measurement may be far off
            return Next(min(best, _FIRST))
        self.drafting = False
        self.luck.lost(self._lost)
        return None

    def _stake(self) -> float:
        """Seconds that have to be allowed before drafts are tried: a round whose drafts are all wrong."""
        dense, drafts = self.dense.usual, min(_FIRST, self.most)
        assert dense is not None
        if self.expected is None and not self._ran(drafts):
            return 0.0  # nothing is known here: tried at once
        hoped = max(self._rates(_HOPED, least=True).values())
        return (self._round(drafts, least=True) - dense) * (1.0 if hoped * dense > 1 else _RARELY)

    def beside(self) -> int:
        """Drafts of a round if there has to be one, as others need its sparse steps anyway."""
        if self.dense.usual is None and not self._ran(min(_FIRST, self.most)):
            return min(_FIRST, self.most)
        rates = self._rates(self.acceptance)
        return max(rates, key=lambda n: rates[n] / (1.0 if self._ran(n) else _CLEAR))

    # ------------------------------------------------------------------ drafts of the text itself

    def looks_up(self, drafts: int) -> bool:
        """Whether it pays to look for drafts in the text, before a round with so many drafts of steps."""
        return self.fixed is None and self._ran(drafts) and self.best_of(self.most, drafts) > 0

    def best_of(self, found: int, drafts: int) -> int:
        """How many of the drafts ``found`` in the text to verify; 0: a round with ``drafts`` of steps gives more."""
        accepts = (self.luck.found + 0.8) / (self.luck.looked + 1.0)
        rates = self._rates(accepts, draft=0.0)
        tries = [n for n in range(1, min(found, self.most) + 1) if self.luck.looked > _FEW or self._ran(n)]
        best = max(tries, key=lambda n: rates[n], default=0)
        return best if best and rates[best] > self.rate(drafts) else 0

    # ------------------------------------------------------------------ times

    def rate(self, drafts: int) -> float:
        """Expected tokens a second of rounds with so many drafts; 0: of dense steps."""
        if not drafts:
            return 1.0 / (self.dense.usual or float("inf"))
        return self._rates(self.acceptance)[drafts]

    def _rates(self, accepts: float, least: bool = False, draft: float | None = None) -> dict[int, float]:
        """Expected tokens a second by drafts of a round. ``least``: as :meth:`_round`. ``draft``: seconds of one."""
        draft = self._draft(least) if draft is None else draft
        verify = {width: self._verification(width, least) for width in set(self._widths)}
        tokens, right, rates = 1.0, 1.0, {}
        for n, width in enumerate(self._widths, 1):
            right *= accepts
            tokens += right
            rates[n] = tokens / max(n * draft + verify[width], 1e-9)
        return rates

    def _draft(self, least: bool = False) -> float:
        """Seconds of a draft; ``least``: the least that was ever measured."""
        found = self.draft.least if least else self.draft.usual
        if found is not None:
            return found
        dense, faster = self.dense.usual or 0.0, 0.0 if self.expected is None else self.expected.faster
        return max(dense - faster, 0.2 * dense)

    def _round(self, drafts: int, least: bool = False) -> float:
        """Seconds of a round with so many drafts; ``least``: by the least times that were ever measured."""
        return drafts * self._draft(least) + self._verification(self._width(drafts), least)

    def _verification(self, width: int, least: bool = False) -> float:
        """Seconds of a pass of this width. One that never ran takes the expected time, and no less than narrower ones.

        One wider than every known pass grows as the widest known ones do.
        """
        found = {w: cost.least if least else cost.usual for w, cost in self.verify.items()}
        known = {w: seconds for w, seconds in found.items() if seconds is not None}
        if width in known:
            return known[width]
        dense, slower = self.dense.usual or 0.0, {} if self.expected is None else self.expected.slower
        times = {n: dense + seconds for n, seconds in slower.items()} | known
        below = sorted(n for n in times if n < width)
        guess = times[min(wider)] if (wider := [n for n in times if n >= width]) else dense
        if not wider and below:
            *_, before, last = 0, *below
            more = (times[last] - times.get(before, dense)) / (last - before)
            guess = times[last] + max(0.0, more) * (width - last)
        return max([guess, *(known[n] for n in known if n < width)])

    def _ran(self, drafts: int) -> bool:
        """Whether verifications of so many drafts were measured."""
        known = self.verify.get(self._width(drafts))
        return known is not None and known.usual is not None

    def _width(self, drafts: int) -> int:
        return self._widths[drafts - 1]
