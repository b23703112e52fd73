"""Which of the rows that are there decode, so that what they select fits the GPU (SparseServe, section 3.3).

Algorithm 1 takes requests in the order of their arrival while their working sets fit, and puts back the others. What
the paper leaves open: the oldest row always runs, or nothing would; a request is overtaken a few times only; and what
was held back comes back only when some room is left beside it, or rows would come and go at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OVERTAKEN = 8  # times that a request may be passed by later ones
READMIT = 0.9  # of the room, for what does not run yet
SPARE = 1.6  # room that a row should have, in working sets: at first, at least, at most
LEAST, MOST = 1.0, 4.0
# Of a step's time, the link may take so much before rows are held back, and has to take less before more may run. An
# H200, 24 GB, prompts of 12k: tokens a millisecond of a step with 2,048 tokens chosen are 1.87 with 16 rows, where the
# link takes 15 %, 1.70 with 24 (48 %), 1.63 with 25 of 32 (44 %); with 1,024 tokens 2.60 with 32 rows (29 %). Of
# another mixture, 1,024 tokens, 2.18 with 16 rows (5 %) and 1.66 with 20 (25 %). (serving.csv, 7a7196e; NOTES.md)
BUSY, IDLE = 0.3, 0.18
SLOWER, FASTER = 1.04, 0.98  # times the room, at each look


@dataclass(eq=False)
class Candidate:
    """A row that could decode.

    Attributes:
        need: tokens' copies that it should have room for, of each layer and KV head (:class:`Spare`).
        runs: it has decoded in the last step.
        overtaken: how often a later one was let in while it was held back.
    """

    need: int = 0
    runs: bool = False
    overtaken: int = 0


class Spare:
    """How much more room than its working set a row should have, by what the link costs.

    A working set is what a row has chosen in its last 12 steps. What it chose before that comes back, too: with room
    for no more than working sets so much of what a step chooses has no copy that steps wait for the link. How much room
    is enough depends on the text; what too little costs is measured.

    Attributes:
        factor: working sets that a row should have room for.
    """

    def __init__(self) -> None:
        self.factor, self._share = SPARE, 0.0

    def learn(self, share: float, running: int, held: int) -> None:
        """In the last steps the link took ``share`` of their time; so many rows run, and so many are held back."""
        self._share = 0.7 * self._share + 0.3 * min(share, 1.0)
        if self._share > BUSY and running > 1:
            self.factor = min(MOST, self.factor * SLOWER)
        elif self._share < IDLE and held:
            self.factor = max(LEAST, self.factor * FASTER)

    def room_for(self, working_set: int, tokens: int) -> int:
        """Copies that a row of so many tokens should have room for."""
        return max(working_set, min(tokens, round(self.factor * working_set)))


def admit(candidates: Sequence[Candidate], room: int) -> list[bool]:
    """Who decodes from here on; their ``runs`` and ``overtaken`` say so afterwards.

    Args:
        candidates: in the order of their arrival.
        room: for copies of tokens, of each layer and KV head, of all rows together.

    Returns:
        One for each candidate.
    """
    used, passed, found = 0, [], []
    for first, one in enumerate(candidates):
        fits = used + one.need <= (room if one.runs else READMIT * room)
        waits_for = any(other.overtaken >= OVERTAKEN for other in passed) and not one.runs
        goes = first == 0 or (fits and not waits_for)
        if goes:
            used += one.need
            if not one.runs:
                for other in passed:
                    other.overtaken += 1
        else:
            passed.append(one)
        found.append(goes)
    for one, goes in zip(candidates, found):
        if goes and not one.runs:
            one.overtaken = 0
        one.runs = goes
    return found
