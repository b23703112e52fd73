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
# Copies that a row gets room for, for each token that its last steps have chosen. With no more than one, of what a step
# chooses so much has no copy that steps wait for the link. An H200, 24 GB, prompts of 12k, 2,048 tokens a step: 16 rows
# with room for 2.0 make 1,270 tokens a second, 24 with 1.2 make 1,100, 25 with 1.0 make 990 (serving.csv, 7a7196e).
SPARE = 1.6


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


def room_for(counted: int, expected: int) -> int:
    """Copies that a row should have room for: of what it was counted to need, or as many as a row is expected to need.

    Args:
        counted: tokens that its last steps have chosen; 0: not known.
        expected: before a step of it is known.
    """
    return max(counted, min(round(SPARE * counted), expected)) if counted else expected


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
