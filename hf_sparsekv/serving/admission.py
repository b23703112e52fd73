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
# Room that a row should have, in working sets: what it chose before its last 12 steps comes back, too. 32 rows of
# 2,048 tokens, 24 GB, prompts of 12k: 1,231 tokens/s with 1.2 and 1,157 with 1.6, one after the other on an H200;
# 996, 1,003 and 928 with 1.2, 1.6 and 1, an H100. Rows of 8k in 8 GB: 1.6 lets 6 run where 8 fit (benchmarks/NOTES.md).
SPARE = 1.2


@dataclass(eq=False)
class Candidate:
    """A row that could decode.

    Attributes:
        need: tokens' copies that it should have room for, of each layer and KV head (:func:`room_for`).
        runs: it has decoded in the last step.
        overtaken: how often a later one was let in while it was held back.
    """

    need: int = 0
    runs: bool = False
    overtaken: int = 0


def room_for(working_set: int, tokens: int) -> int:
    """Copies, of each layer and KV head, that a row of so many tokens should have room for."""
    return max(working_set, min(tokens, round(SPARE * working_set)))


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
