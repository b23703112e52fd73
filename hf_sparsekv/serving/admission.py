"""Selects the rows that decode, so that their working sets fit the GPU (SparseServe, section 3.3).

The paper's algorithm 1 admits requests in the order of their arrival while their working sets fit, and holds back the
others. We add three rules. The oldest row always runs, or no row might. A request is overtaken a few times at most. A
request that was held back returns only when some room is left over, or requests would alternate at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OVERTAKEN = 8  # times that later requests may overtake a request
READMIT = 0.9  # share of the room that a request which does not run yet may fill
# Room of a row, in working sets. Above 1, because rows select tokens again from before their last 12 steps. 32 rows of
# 2,048 tokens, 24 GB, prompts of 12k, one run after the other. On an H200: 1,231 tokens/s with 1.2, and 1,157 with 1.6.
# On an H100: 996, 1,003 and 928 with 1.2, 1.6 and 1. Rows of 8k in 8 GB: 1.6 lets 6 run where 8 fit
# (benchmarks/NOTES.md).
SPARE = 1.2


@dataclass(eq=False)
class Candidate:
    """A row that could decode.

    Attributes:
        need: copies of tokens that it needs room for, in each layer and KV head (:func:`room_for`).
        runs: whether it decoded in the last step.
        overtaken: how often a later one was admitted while it was held back.
    """

    need: int = 0
    runs: bool = False
    overtaken: int = 0


def room_for(working_set: int, tokens: int) -> int:
    """Copies in each layer and KV head that a row of ``tokens`` tokens needs room for."""
    return max(working_set, min(tokens, round(SPARE * working_set)))


def admit(candidates: Sequence[Candidate], room: int) -> list[bool]:
    """Decide which candidates decode from here on, and update their ``runs`` and ``overtaken``.

    Args:
        candidates: in the order of their arrival.
        room: copies of tokens, in each layer and KV head, that all rows together have room for.

    Returns:
        For each candidate, whether it decodes.
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
