"""The rows of a batch: which exist, which decode, and how many a step runs.

It does not depend on the rows' tokens.
"""

from __future__ import annotations


class Places:
    """The places of a batch, each with a row or without.

    Args:
        most: rows that there is room for.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.active = [False] * most
        self.there = [False] * most

    @property
    def width(self) -> int:
        """Rows that a step runs: the first ones, up to the last active one, rounded up."""
        return width(max(self.actives, default=0) + 1, self.most)

    @property
    def rows(self) -> tuple[int, ...]:
        """Those with a row."""
        return tuple(row for row, there in enumerate(self.there) if there)

    @property
    def actives(self) -> tuple[int, ...]:
        """Those with a row that is not held."""
        return tuple(row for row, active in enumerate(self.active) if active)

    def check(self, row: int) -> int:
        """``row``, if it is there. Raises ValueError if not."""
        if not (0 <= row < self.most and self.there[row]):
            raise ValueError(f"there is no row {row}: rows that are there: {list(self.rows)}")
        return row

    def free(self) -> int:
        """The first one without a row. Raises ValueError if there is none."""
        free = [row for row, there in enumerate(self.there) if not there]
        if not free:
            raise ValueError(f"all {self.most} rows are taken: leave() one first, or make more of them")
        return free[0]

    def target(self, row: int, to: int | None) -> int:
        """Where ``row`` may move: to ``to``, or to the first free place before it. Raises ValueError if it cannot."""
        new = to
        if to is None:
            new = self.there.index(False) if False in self.there[: self.check(row)] else None
            if new is None:
                raise ValueError(f"no row before row {row} is free")
        elif self.check(row) == to or not 0 <= to < self.most or self.there[to]:
            raise ValueError(f"row {row} cannot take place {to}: rows that are there: {list(self.rows)}")
        return new

    def set(self, row: int, there: bool) -> None:
        """A row takes the place, and is active; or has left it."""
        self.there[row] = self.active[row] = there

    def move(self, row: int, source: int) -> None:
        """The row of place ``source`` is at ``row``, held or not."""
        for which in (self.there, self.active):
            which[row], which[source] = which[source], False

    def hold(self, row: int, held: bool) -> None:
        """A row waits, or goes on. Raises ValueError if it is not there, or does so already."""
        if self.active[self.check(row)] != held:
            raise ValueError(f"row {row} is held already" if held else f"row {row} is not held")
        self.active[row] = not held


def width(rows: int, most: int) -> int:
    """Rows that a step runs to serve the first ``rows`` of ``most``: 1, 2, 4, 8, 16, 24, 32, ...

    Each is a captured graph of its own, over the same memory.
    """
    few = next((n for n in (1, 2, 4) if n >= rows), -(-rows // 8) * 8)
    return min(few, most)
