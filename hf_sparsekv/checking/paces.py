"""The paces of one model's texts, by rows and tokens: what one ``generate()`` call has measured the next one knows.

A pace belongs to a number of rows and their length; these are all paces of one model.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable

from torch import nn

from .pace import Expected, Luck, Pace


class Paces:
    """Paces of one setting of one model.

    Args:
        most, fixed: as :class:`.pace.Pace`.
    """

    def __init__(self, most: int, fixed: int | None = None) -> None:
        self.most, self.fixed, self.luck = most, fixed, Luck()
        self._known: dict[tuple[int, int], Pace] = {}
        self._told: set[tuple[int, int]] = set()  # of these paces, in this text, what is expected

    def of(self, rows: int, tokens: int, expected: Callable[[], Expected | None]) -> Pace:
        """The pace of ``rows`` rows with so many ``tokens`` together; a new one begins with the times of the nearest.

        ``expected()`` gives expectations for paces that this text has not used yet.
        """
        length = round(2 * math.log2(max(tokens, 1)))  # a step of half again as many tokens takes a few % longer
        pace = self._known.get((rows, length))
        if pace is None:
            near = [self._known[rows, n] for n in (length - 1, length + 1) if (rows, n) in self._known]
            pace = copy.deepcopy(near[0]) if near else Pace(self.most, self.fixed)
            pace.luck = self.luck
            self._known[rows, length] = pace
        if (rows, length) not in self._told:
            pace.expected = expected()
            self._told.add((rows, length))
        return pace

    def new_text(self) -> None:
        """Another text begins: whether it drafts is decided again."""
        self.luck.new_text()
        self._told.clear()
        for pace in list(self._known.values()):  # another thread's text may add some
            pace.drafting = False


_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, dict[object, Paces]] = weakref.WeakKeyDictionary()


def paces_of(model: nn.Module, setting: object, most: int, fixed: int | None) -> Paces:
    """The paces of ``model`` with this ``setting``, for a new text."""
    known = _OF_MODELS.setdefault(model, {})
    paces = known.get((setting, most, fixed))
    if paces is None:
        paces = known[setting, most, fixed] = Paces(most, fixed)
    paces.new_text()
    return paces


def forget(model: nn.Module) -> None:
    """``model``'s next text begins as the first one."""
    _OF_MODELS.pop(model, None)
