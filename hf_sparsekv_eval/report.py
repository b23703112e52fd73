"""One report of many parts: a self-contained HTML file, and the same tables as markdown."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from .cache_specs import FULL
from .measures import RESAMPLES, Figure, Measure

# Columns of the summary: part, measure, heading. Measures without results have no column; `beside` ones share a cell.
_SUMMARY = (
    ("ruler", "score", "RULER, %"),
    ("needle", "score", "needles, %"),
    ("needle", "kept", "needles kept, %"),
    ("tasks", "score", "tasks, %"),
    ("tasks", "kept", "tasks kept, %"),
    ("tasks", "top-1 agreement", "tasks, same tokens, %"),
    ("text", "top-1 agreement", "text, same tokens, %"),
    ("text", "KL", "text, KL"),
    ("text", "perplexity", "text, perplexity"),
    ("output", "top-1 agreement", "output, same tokens, %"),
    ("output", "KL", "output, KL"),
    ("output", "first difference", "output, first difference"),
    ("text", "attended", "attended, %"),
)
_BOTH = "a / b: question prefilled / question in decode steps"
_COLOURS = ("#2a78c4", "#d1495b", "#2e8b57", "#8e5bb5", "#c47f17", "#178f9e", "#5a5a5a", "#b0427f")


@dataclass(frozen=True)
class Section:
    """A part with what was measured; ``notes`` say what its figures mean."""

    name: str
    title: str
    measures: list[Measure]
    notes: tuple[str, ...]
    figures: list[Figure]


@dataclass(frozen=True)
class Cell:
    """A text, and how far it is from full attention: 0 as good, 1 as bad as colours go, ``None`` without a colour."""

    text: str
    loss: float | None = None


@dataclass
class Table:
    """Rows of cells under columns; a row is a cache."""

    title: str
    columns: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)

    def put(self, row: str, column: str, cell: Cell) -> None:
        """Set a cell; columns stand in the order in which they come first."""
        if column not in self.columns:
            self.columns.append(column)
        self.rows.setdefault(row, {})[column] = cell


@dataclass(frozen=True)
class Chart:
    """Lines over the same places: name to ``[(place, value)]``."""

    title: str
    lines: dict[str, list[tuple[str, float]]]


def loss(measure: Measure, value: float, full: float | None) -> float | None:
    """How far a figure is from full attention's, 0 to 1; ``None`` where nothing is good or bad."""
    if measure.name in ("attended", "repeated"):
        return None
    if measure.name == "KL":  # 0.001 nats are little, 1 is a different text
        return 0.0 if value <= 1e-3 else min(1.0, 1 + math.log10(value) / 3)
    if full is None or not full:
        return None
    if measure.name == "first difference":
        return 1 - min(1.0, value / full)
    if measure.exponential:
        return min(1.0, max(0.0, 2 * (value / full - 1)))
    return min(1.0, max(0.0, (full - value) / 0.3))


def tables(section: Section) -> Iterable[Table]:
    """The tables of a section: one a length and measure, or a length if there is one task."""
    for length in sorted({f.length for f in section.figures}):
        here = [f for f in section.figures if f.length == length]
        tasks = list(dict.fromkeys(f.task for f in here))
        value = {(f.measure, f.task, f.cache): f.value for f in here}
        where = f"{length:,} tokens" if length else "all lengths"
        whole = Table(where)
        for measure in section.measures:
            if measure.beside is not None and any(m.name == measure.beside for m in section.measures):
                continue  # in the cells of that one
            besides = [m for m in section.measures if m.beside == measure.name]
            pair = [m for m in (measure, *besides) if any(f.measure == m.name for f in here)]
            if not pair:
                continue
            names = " / ".join(m.name for m in pair) + (", %" if measure.percent else "")
            mine = [f.task for f in here if f.measure == measure.name]
            several = len(dict.fromkeys(mine)) > 1
            table = Table(f"{where}: {names}") if several else whole
            for task in dict.fromkeys(task for task in tasks if task in mine):
                for cache in dict.fromkeys(f.cache for f in here):
                    cell = _cell(pair, task, cache, value)
                    if cell is not None:
                        table.put(cache, task if several else names, cell)
            if several:
                yield table
        if whole.rows:
            yield whole


def _cell(pair: list[Measure], task: str, cache: str, value: dict) -> Cell | None:
    held = [(m, value[m.name, task, cache]) for m in pair if (m.name, task, cache) in value]
    if not held:
        return None
    far = [loss(m, v, value.get((m.name, task, FULL))) for m, v in held]
    shown = [x for x in far if x is not None]
    return Cell(" / ".join(m.show(v) for m, v in held), max(shown) if shown else None)


def summary(sections: list[Section]) -> list[Table]:
    """A table a length with the mean over tasks of what matters most."""
    by_name = {section.name: section for section in sections}
    out = []
    for length in sorted({f.length for s in sections for f in s.figures if f.length}):
        table = Table(f"{length:,} tokens ({_BOTH})")
        for name, measure_name, heading in _SUMMARY:
            section = by_name.get(name)
            if section is None:
                continue
            pair = [m for m in section.measures if measure_name in (m.name, m.beside)]
            value = {}
            for measure in pair:
                mine = [f for f in section.figures if f.measure == measure.name and f.length == length]
                value |= {(measure.name, "", cache): mean for cache, mean in _means(mine).items()}
            for cache in dict.fromkeys(f.cache for f in section.figures):
                cell = _cell(pair, "", cache, value)
                if cell is not None:
                    table.put(cache, heading, cell)
        out.append(table)
    return out


def _means(figures: list[Figure]) -> dict[str, float]:
    """By cache: the average over tasks, or the one task's figure."""
    out: dict[str, float] = {}
    for figure in figures:
        if figure.task == "average" or figure.cache not in out:
            out[figure.cache] = figure.value
    return out


def unsolved(sections: list[Section]) -> str:
    """A sentence on the tasks in whose samples full attention finds nothing; empty if there are none."""
    parts = []
    for section in sections:
        for length in sorted({f.length for f in section.figures}):
            mine = [f for f in section.figures if (f.length, f.cache, f.measure) == (length, FULL, "score")]
            names = [f.task for f in mine if f.value == 0 and f.task != "average"]
            if names:
                parts.append(f"{section.title} at {length:,} tokens ({', '.join(names)})")
    return f"Full attention finds nothing in {'; '.join(parts)}: these tell nothing about caches." if parts else ""


def charts(section: Section) -> list[Chart]:
    """KL along an answer; scores by length, where there are several."""
    out = []
    if section.name == "output":
        for length in sorted({f.length for f in section.figures}):
            lines: dict[str, list[tuple[str, float]]] = {}
            for f in section.figures:
                if f.length == length and f.measure == "KL" and f.task != "average" and f.cache != FULL:
                    lines.setdefault(f.cache, []).append((f.task.split("-")[-1], f.value))
            out.append(Chart(f"KL by token of the answer, after {length:,} tokens", lines))
        return out
    name, unit = ("KL", "KL") if section.name == "text" else ("score", "score, %, question prefilled")
    for measure in section.measures:
        if measure.name not in (name, f"{name} in steps"):
            continue
        lines = {}
        for length in sorted({f.length for f in section.figures if f.length}):
            found = _means([f for f in section.figures if f.measure == measure.name and f.length == length])
            for cache, value in found.items():
                lines.setdefault(cache, []).append((f"{length:,}", 100 * value if measure.percent else value))
        if any(len(line) > 1 for line in lines.values()):
            title = unit.replace("prefilled", "in steps") if measure.name.endswith("in steps") else unit
            out.append(Chart(f"{title} by length", lines))
    return out


# ---------------------------------------------------------------------- markdown


def as_markdown(title: str, about: dict[str, str], sections: list[Section]) -> str:
    """The report as markdown."""
    out = [f"# {title}", "\n".join(f"* {name}: {value}" for name, value in about.items())]
    out += [_markdown_table(table, "##") for table in summary(sections)]
    if none := unsolved(sections):
        out.append(none)
    for section in sections:
        out += [f"## {section.title}", *section.notes]
        out += [_markdown_table(table, "###") for table in tables(section)]
    out.append(_WHERE)
    return "\n\n".join(out) + "\n"


_WHERE = (
    f"95 % intervals (bootstrap over samples, {RESAMPLES} draws) are in results.md and results.csv of each part's "
    "directory, answers in its samples.jsonl."
)


def _markdown_table(table: Table, level: str) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"

    rows = [
        line([name, *(c.text if (c := cells.get(column)) else "" for column in table.columns)])
        for name, cells in table.rows.items()
    ]
    return "\n".join(
        [f"{level} {table.title}\n", line(["cache", *table.columns]), "|---" * (1 + len(table.columns)) + "|", *rows]
    )


# ---------------------------------------------------------------------- HTML

_LEGEND = "Green: as full attention. Red: 30 points less, a KL of 1, or half as much perplexity again."
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-size: 13px; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
td { white-space: nowrap; }
th, td { border: 1px solid #ddd; padding: .25rem .5rem; text-align: right; font-variant-numeric: tabular-nums; }
th { background: #f5f5f5; font-weight: 600; vertical-align: bottom; }
th:first-child { text-align: left; max-width: 22rem; }
svg { overflow: visible; max-width: 100%; } figure { margin: 1rem 0; }
.note, dl { color: #555; font-size: 13px; }
dl { display: grid; grid-template-columns: max-content auto; gap: 0 1rem; } dd { margin: 0; }
div.wide { overflow-x: auto; }
"""


def as_html(title: str, about: dict[str, str], sections: list[Section]) -> str:
    """The report as one HTML file: no scripts, nothing from elsewhere."""
    esc = html.escape
    out = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>{esc(title)}</title><style>{_STYLE}</style></head><body><h1>{esc(title)}</h1>",
        "<dl>" + "".join(f"<dt>{esc(name)}</dt><dd>{esc(value)}</dd>" for name, value in about.items()) + "</dl>",
    ]
    out += [_html_table(table) for table in summary(sections)]
    if none := unsolved(sections):
        out.append(f'<p class="note">{esc(none)}</p>')
    out.append(f'<p class="note">{_LEGEND}</p>')
    for section in sections:
        out.append(f"<h2>{esc(section.title)}</h2>")
        out += [f'<p class="note">{esc(text)}</p>' for text in section.notes]
        out += [_svg(chart) for chart in charts(section) if chart.lines]
        out += [_html_table(table) for table in tables(section)]
    out.append(f'<p class="note">{esc(_WHERE)}</p></body></html>\n')
    return "\n".join(out)


def _html_table(table: Table) -> str:
    esc = html.escape
    head = "".join(f"<th>{esc(column)}</th>" for column in ("cache", *table.columns))
    rows = []
    for name, cells in table.rows.items():
        made = [f"<th>{esc(name).replace(',', ',<wbr>')}</th>"]
        for column in table.columns:
            cell = cells.get(column, Cell(""))
            style = "" if cell.loss is None else f' style="background:{_colour(cell.loss)}"'
            made.append(f"<td{style}>{esc(cell.text)}</td>")
        rows.append(f"<tr>{''.join(made)}</tr>")
    return f'<div class="wide"><table><caption>{esc(table.title)}</caption><tr>{head}</tr>{"".join(rows)}</table></div>'


def _colour(far: float) -> str:
    """Green at 0, yellow, red at 1; light enough for black text."""
    return f"hsl({120 * (1 - far):.0f} 60% 86%)"


def _svg(chart: Chart) -> str:
    """Lines over evenly spaced places, with a scale from 0 to the largest value."""
    esc = html.escape
    places = list(dict.fromkeys(place for line in chart.lines.values() for place, _ in line))
    top = max((value for line in chart.lines.values() for _, value in line), default=0) or 1.0
    width, height, left, bottom = 640, 220, 56, 24

    def x(place: str) -> float:
        return left + (width - left - 12) * (places.index(place) + 0.5) / len(places)

    def y(value: float) -> float:
        return 14 + (height - bottom - 14) * (1 - value / top)

    out = []
    for share in (0, 0.5, 1):
        at = y(share * top)
        out.append(f'<path d="M{left} {at:.1f}H{width - 12}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{share * top:.3g}</text>')
    for i, place in enumerate(places):
        if i % (1 + len(places) // 16) == 0:
            out.append(f'<text x="{x(place):.1f}" y="{height - 8}" text-anchor="middle">{esc(place)}</text>')
    for i, (name, line) in enumerate(chart.lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        points = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in line)
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        out += [f'<circle cx="{x(p):.1f}" cy="{y(v):.1f}" r="2.4" fill="{colour}"/>' for p, v in line]
        at = height + 14 + 16 * i
        out.append(f'<path d="M{left} {at - 4}h18" stroke="{colour}" stroke-width="3"/>')
        out.append(f'<text x="{left + 24}" y="{at}">{esc(name)}</text>')
    whole = height + 20 + 16 * len(chart.lines)
    return (
        f'<figure><figcaption>{esc(chart.title)}</figcaption><svg viewBox="0 0 {width} {whole}" width="{width}" '
        f'height="{whole}" font-size="11" font-family="system-ui, sans-serif">{"".join(out)}</svg></figure>'
    )
