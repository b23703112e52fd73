"""Figures as tables of markdown, one a length.

``results.md`` and the terminal show them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .measures import RESAMPLES, Figure, Measure


@dataclass
class _Grid:
    columns: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, row: str, column: str, text: str) -> None:
        if column not in self.columns:
            self.columns.append(column)
        cells = self.rows.setdefault(row, {})
        cells[column] = f"{cells[column]} / {text}" if column in cells else text

    def text(self) -> str:
        lines = ["| | " + " | ".join(self.columns) + " |", "|---|" + "---|" * len(self.columns)]
        for name, cells in self.rows.items():
            lines.append(f"| {name} | " + " | ".join(cells.get(c, "") for c in self.columns) + " |")
        return "\n".join(lines)


def markdown(figures: list[Figure], measures: list[Measure], title: str) -> str:
    """Tables, one a length: a row a cache; a column a task (several tasks) or a measure (one task)."""
    by_name = {measure.name: measure for measure in measures}
    parts = [f"# {title}"]
    for length in sorted({f.length for f in figures}):
        here = [f for f in figures if f.length == length]
        tasks = list(dict.fromkeys(f.task for f in here))
        several = len(tasks) > 1
        parts.append(f"## {length} tokens" if length else "## all lengths")
        grids: dict[str, _Grid] = {}
        for f in here:
            measure = by_name[f.measure]
            if not math.isfinite(f.value):
                continue
            text = measure.show(f.value)
            if f.high > f.low:
                text += f" ({measure.show(f.low)}-{measure.show(f.high)})"
            name = f.measure
            if several:  # a `beside` measure shares the other one's table, if that has results
                pair = [m.name for m in measures if m.name == measure.beside or measure.name in (m.name, m.beside)]
                name = " / ".join(one for one in pair if any(g.measure == one for g in here))
            unit = f"{name}, %" if measure.percent else name
            grids.setdefault(unit if several else "", _Grid()).put(f.cache, f.task if several else unit, text)
        for name, grid in grids.items():
            parts += [f"**{name}**"] if name else []
            parts.append(grid.text())
    parts.append(f"In brackets: 95 % intervals, bootstrap over samples ({RESAMPLES} draws).")
    return "\n\n".join(parts) + "\n"
