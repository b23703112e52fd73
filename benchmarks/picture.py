"""README's pictures: times a token and the score of the same settings from the newest rows; badges from pyproject.toml.

Written as SVG without a library, so that it is small and the same on every machine. One file is for light pages and one
for dark ones. ``python -m benchmarks.readme --write`` draws it together with the tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from packaging.requirements import Requirement

from . import ROOT
from .readme import DATA, GPU, newest, read, ruler_by_default, shape, since_defaults

LIGHT, DARK, BADGES = "docs/first-light.svg", "docs/first-dark.svg", "docs/badges.svg"
WIDTH, LABEL, VALUE = 860, 104, 50  # of the picture, of names before bars, of figures after them
SPLIT = 472  # width of the first column
TOP, HEAD, BAR, GAP, AFTER = 58, 28, 20, 5, 24  # first heading, heading to bars, a bar, between bars, after a panel
OURS = "hf-sparsekv"
COLORS = {  # text, notes; bars of others, of ours
    False: ("#1f2328", "#59636e", "#afb8c1", "#1a7f5a"),
    True: ("#f0f6fc", "#9198a1", "#545d68", "#3fb98a"),
}


class Panel(NamedTuple):
    """Bars with one heading."""

    heading: str
    note: str
    bars: tuple[tuple[str, float], ...]  # ours last
    most: float  # of the longest bar there could be

    def said(self) -> str:
        bars = ", ".join(f"{name} {_figure(value)}" for name, value in self.bars)
        return f"{self.heading}, {self.note}: {bars}"


class Times(NamedTuple):
    """Milliseconds a token of one shape."""

    panel: Panel
    chosen: float  # share of the context that ours attends to


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def times(place: str) -> list[Times]:
    """Times of readme.yaml's ``picture`` with the KV cache in ``place``, as far as there are rows."""
    rows, found = read("step.csv", GPU), []
    theirs, ours = next((theirs, ours) for where, theirs, ours, _ in DATA["speed"] if where == place)
    todays = since_defaults(rows, ours)
    for text in DATA["picture"][place]:
        at = shape(text)
        stock = newest(rows, theirs, "tpot_ms", *at)
        token, chosen = (newest(todays, ours, metric, *at) for metric in ("tpot_ms", "tokens"))
        if stock is None or token is None or chosen is None:
            continue
        vllm = (("vLLM 0.26.0", DATA["vllm"][text]),) if place == "GPU" else ()
        batch, context = text.split("x")
        heading = f"{batch} sequence{'s' * (batch != '1')} of {context} tokens"
        note = f"KV in {'GPU memory' if place == 'GPU' else place}, ms"
        bars = ("transformers", stock), *vllm, (OURS, token)
        found.append(Times(Panel(heading, note, bars, stock), chosen / at[1]))
    return found


def score() -> Panel:
    """RULER by the same settings, on the first of readme.yaml's ``models``."""
    about, case, context = DATA["models"][0]
    (full, _), (ours, _), _ = ruler_by_default(case, context)
    note = f"{about.removesuffix('-Instruct')}, %"
    return Panel(f"RULER, {context // 1000}k tokens", note, (("full attention", full), (OURS, ours)), 100)


def panels() -> tuple[list[Panel], list[Panel], str]:
    """Panels of the left and of the right column, and the text below them.

    Raises:
        ValueError: there are no rows.
    """
    gpu, host = times("GPU"), times("host memory")
    if not gpu:
        raise ValueError("step.csv has no rows of the picture's shapes")
    low, high = (round(100 * pick(one.chosen for one in (*gpu, *host))) for pick in (min, max))
    share = f"{low} %" if low == high else f"{low} to {high} %"
    longest = max(one.panel.most for one in gpu)
    left = [one.panel._replace(most=longest) for one in gpu]
    about = f"Times: Qwen3-8B's shape, random weights, keys like recorded ones, one {GPU.removeprefix('NVIDIA ')}. "
    about += f"Default settings: each head chooses {share} of the tokens."
    return left, [*(one.panel for one in host), score()], about


def said() -> str:
    """The picture in words, for those who do not see it."""
    left, right, about = panels()
    return ". ".join(panel.said() for panel in (*left, *right)) + f". {about}"


def embedded() -> str:
    """HTML that shows the file for the reader's colours."""
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{DARK}">\n'
        f'  <img src="{LIGHT}" width="{WIDTH}" alt="{escape(said())}">\n</picture>'
    )


def _drawn(panel: Panel, left: float, top: float, room: float, colors: tuple[str, ...]) -> Iterator[str]:
    note = f'<tspan class="s" dx="8">{panel.note}</tspan>'
    yield f'<text x="{left}" y="{top}"><tspan class="b">{panel.heading}</tspan>{note}</text>'
    for place, (name, value) in enumerate(panel.bars):
        y, ours = top + HEAD - 15 + place * (BAR + GAP), name == OURS
        mark, long = ' class="b"' if ours else "", max(2.0, room * value / panel.most)
        bar = f'width="{long:.1f}" height="{BAR}" rx="3" fill="{colors[3 if ours else 2]}"'
        yield f'<text x="{left + LABEL - 8}" y="{y + 15}" text-anchor="end"{mark}>{name}</text>'
        yield f'<rect x="{left + LABEL}" y="{y}" {bar}/>'
        yield f'<text x="{left + LABEL + long + 7:.1f}" y="{y + 15}"{mark}>{_figure(value)}</text>'


def draw(dark: bool) -> str:
    """The file's text."""
    left, right, about = panels()
    colors, lines, foot = COLORS[dark], [], 0.0
    for start, width, column in ((12, SPLIT, left), (12 + SPLIT, WIDTH - SPLIT - 12, right)):
        y = TOP
        for panel in column:
            lines += _drawn(panel, start, y, width - LABEL - VALUE, colors)
            y += HEAD - 15 + len(panel.bars) * (BAR + GAP) + AFTER
        foot = max(foot, y)
    style = (
        "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;"
        f"fill:{colors[0]}}}.t{{font-size:17px;font-weight:600}}.b{{font-weight:600}}"
        f".s{{font-size:12px;font-weight:400;fill:{colors[1]}}}"
    )
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {foot + 10:g}" role="img">',
        f"<title>{escape(said())}</title>",
        f"<style>{style}</style>",
        '<text x="12" y="24" class="t">Time per token, and accuracy with the same settings</text>',
    ]
    below = f'<text x="12" y="{foot:g}" class="s">{about}</text>'
    return "\n".join([*head, *lines, below, "</svg>"]) + "\n"


def needed() -> list[tuple[str, str]]:
    """Name and value of each badge."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    python, license = (re.search(rf'^{key} = "(.+)"$', text, re.M)[1] for key in ("requires-python", "license"))
    given = map(Requirement, re.findall(r'^    "((?:torch|transformers)>=[^"]+)",$', text, re.M))
    lowest = {one.name: next(part.version for part in one.specifier if part.operator == ">=") for one in given}
    found = {"python": python.removeprefix(">="), **lowest}
    return [*((name, f"{version} or later") for name, version in found.items()), ("license", license)]


def badges() -> str:
    """One file with a badge for each of :func:`needed`."""
    x, height, parts = 0, 20, []
    for pair in needed():
        for text, color in zip(pair, ("#57606a", "#1a7f5a")):
            width = round(6.6 * len(text)) + 14
            parts.append(f'<rect x="{x}" width="{width}" height="{height}" fill="{color}"/>')
            length = f'textLength="{width - 14}" lengthAdjust="spacingAndGlyphs"'
            parts.append(f'<text x="{x + 7}" y="14" {length}>{escape(text)}</text>')
            x += width
        x += 6
    about = escape(", ".join(" ".join(pair) for pair in needed()))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x - 6}" height="{height}" role="img">'
    style = "<style>text{font:11px Verdana,DejaVu Sans,sans-serif;fill:#fff}</style>"
    return "\n".join([head, f"<title>{about}</title>", style, *parts, "</svg>"]) + "\n"


def files() -> dict[str, str]:
    """All pictures: path and text."""
    return {LIGHT: draw(dark=False), DARK: draw(dark=True), BADGES: badges()}
