"""A recorded race of the demo as an animated picture: ``python -m benchmarks.race_picture``.

One SVG without a library or a script: what each lane had said at each moment, its clock and its median time per token.
Tokens without a text, and those that were decoded after the answer for the clocks, are marks.
It follows the reader's colours, and stands still at the end for readers who want less motion.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from html import escape
from itertools import accumulate
from pathlib import Path

from . import ROOT

PICTURES = {  # recordings in demo/recorded, and where they are drawn
    "qwen05-32x28k": "docs/race.svg",
    "qwen3-8b-128k": "docs/race-h200.svg",
}
WIDTH, LANE, EDGE = 860, 410, 12  # of the picture, of a lane, of what is beside it
COLUMNS, CHARACTER, LINE = 50, 7.8, 20  # characters of a line; pixels of one, and between lines
CLOCK, TEXT = 92, 124  # where clocks and answers begin
PLAYED, HELD, TICKS = 12.0, 4.0, 10  # seconds that a race is played and held at most, and looks at the clock in one
STYLE = (
    "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#1f2328;"
    "white-space:pre}.h,.s{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
    ".h{font-weight:600;font-size:15px}.s{font-size:12px;fill:#59636e}.c{font-weight:600}.o .c{fill:#1a7f5a}"
    ".m{stroke:#afb8c1;stroke-width:6;stroke-dasharray:6 2}.o .m{stroke:#1a7f5a}"
    ".p{fill:#f6f8fa;stroke:#d1d9e0}.g{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.s{fill:#9198a1}.o .c{fill:#3fb98a}"
    ".m{stroke:#545d68}.o .m{stroke:#3fb98a}.p{fill:#151b23;stroke:#3d444d}.g{fill:#0d1117}}"
    "@media(prefers-reduced-motion:reduce){*{animation:none!important}}"
)


def placed(pieces: list[str]) -> Iterator[tuple[int, int, str]]:
    """Column, line and text of each piece, where lines break before words that do not fit.

    A piece that begins a line loses its space. One with line breaks is placed as the text after them.
    """
    column, line = 0, 0
    for place, piece in enumerate(pieces):
        *before, text = piece.split("\n")
        if before and column:
            column, line = 0, line + 1
        whole = text  # of the word, of which a piece may be a part
        for further in pieces[place + 1 :]:
            if further[:1].isspace():
                break
            whole += further
        if column and column + len(whole) > COLUMNS and (text[:1].isspace() or column + len(text) > COLUMNS):
            column, line = 0, line + 1
        text = text if column else text.lstrip()
        yield column, line, text
        column += len(text)


def marks(count: int, rows: int) -> Iterator[tuple[int, int]]:
    """Places for tokens without a text, as random weights give: columns of as many marks as rows."""
    across = COLUMNS // 2 * 2
    for token in range(count):
        yield token % across, token // across * (rows + 1)


class Lane:
    """One lane: when each of its tokens was there, in seconds as played."""

    def __init__(self, recorded: dict, rows: int, pace: float):
        self.name, self.ms = recorded["name"], recorded["ms"]
        self.pieces = recorded["pieces"][: recorded["answer_tokens"]]
        self.rows = 1 if self.pieces else rows
        self.real = [total / 1e3 for total in accumulate(self.ms)]
        self.at = [pace * each for each in self.real]

    @property
    def said(self) -> int:
        """Lines of the answer."""
        return 1 + max(line for _, line, _ in placed(self.pieces)) if self.pieces else 0

    def lines(self) -> int:
        below = [line for _, line in marks(len(self.ms) - len(self.pieces), self.rows)]
        return self.said + (8 * (1 + max(below) + self.rows) // LINE if below else 0)

    def median(self, tokens: int) -> float:
        """Milliseconds for each token but the first, which reads the question."""
        return statistics.median(self.ms[1:tokens]) if tokens > 1 else 0.0

    def clock(self, played: float, pace: float) -> str:
        tokens = sum(each <= played for each in self.at)
        seconds = min(played / pace, self.real[-1])
        each = f"{self.median(tokens):6.1f} ms a token" if tokens > 1 else " " * 17
        return f"{seconds:5.1f} s  {tokens:3} tokens  {each}"

    def drawn(self, left: float, period: float, pace: float, name: str) -> Iterator[str]:
        """Elements and their animations: each token appears when it was there; the clock is a strip that moves."""
        looks = int(self.at[-1] * TICKS) + 1
        strip = [self.clock(min(look / TICKS, self.at[-1]), pace) for look in range(looks)] + [self.clock(1e9, pace)]
        ended = 100 * self.at[-1] / period
        end = f"transform:translateY(-{LINE * looks}px)"
        yield f"<style>@keyframes {name}{{0%{{transform:none}}{ended:.2f}%,to{{{end}}}}}"
        yield f".{name}{{{end};animation:{name} {period:g}s steps({looks},end) infinite}}"
        for token, at in enumerate(self.at):
            yield (
                f"@keyframes {name}{token}{{0%{{visibility:hidden}}{100 * at / period:.2f}%,to{{visibility:visible}}}}"
                f".{name}{token}{{animation:{name}{token} {period:g}s steps(1,end) infinite}}"
            )
        yield "</style>"
        yield f'<g clip-path="url(#{name})"><g class="{name}">'
        for look, text in enumerate(strip):
            yield f'<text class="c" x="{left}" y="{CLOCK + LINE * look}">{text}</text>'
        yield "</g></g>"
        top = TEXT - 12 + LINE * self.said
        for token, (column, line) in enumerate(marks(len(self.ms) - len(self.pieces), self.rows), len(self.pieces)):
            yield f'<path class="m {name}{token}" d="M{left + 8 * column + 3:g} {top + 8 * line}v{8 * self.rows - 2}"/>'
        for token, (column, line, text) in enumerate(placed(self.pieces)):
            if text.strip():
                x, wide = left + CHARACTER * column, CHARACTER * len(text)
                size = f'textLength="{wide:.1f}" lengthAdjust="spacingAndGlyphs"'
                yield f'<text class="{name}{token}" x="{x:.1f}" y="{TEXT + LINE * line}" {size}>{escape(text)}</text>'


def animate(path: Path) -> str:
    """The file's text."""
    race = json.loads(path.read_text(encoding="utf-8"))
    longest = max(sum(lane["ms"]) for lane in race["lanes"]) / 1e3
    pace = PLAYED / longest if longest > PLAYED else max(1.0, round(PLAYED / 2 / longest))
    lanes = [Lane(one, race["rows"], pace) for one in race["lanes"]]
    period = round(max(lane.at[-1] for lane in lanes) + HELD, 1)
    foot = TEXT + LINE * max(lane.lines() for lane in lanes) + 12
    speed = (
        "at its own speed"
        if pace == 1
        else f"{pace:.1f} times as slowly"
        if pace > 1
        else f"{1 / pace:.1f} times as fast"
    )
    about = f"{race['device']}, {race['date']}, commit {race['commit']}, played {speed}."
    names = " | ".join(f"{lane.name}: {lane.clock(1e9, pace).strip()}" for lane in lanes)
    said = " ".join(escape(f"A recorded race. {race['title']}. {names}. {about}").split())
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {foot + 28}" role="img">'
    lines = [head, f"<title>{said}</title>", f"<style>{STYLE}</style>"]
    lines.append(f'<rect class="g" width="{WIDTH}" height="{foot + 28}" rx="8"/>')
    lines.append(f'<text class="h" x="{EDGE}" y="28">{escape(race["title"])}</text>')
    for name, mark, left, lane in zip("ab", ("", ' class="o"'), (EDGE, EDGE + LANE + 16), lanes):
        lines.append(f'<rect class="p" x="{left - 4}" y="46" width="{LANE}" height="{foot - 52}" rx="6"/>')
        lines.append(f'<text class="s" x="{left + 4}" y="66">{escape(lane.name)}</text>')
        window = f'<rect x="{left}" y="{CLOCK - 14}" width="{LANE}" height="{LINE}"/>'
        lines.append(f'<clipPath id="{name}">{window}</clipPath>')
        lines += [f"<g{mark}>", *lane.drawn(left + 4, period, pace, name), "</g>"]
    lines += [f'<text class="s" x="{EDGE}" y="{foot + 16}">{escape(about)}</text>', "</svg>"]
    return "\n".join(lines) + "\n"


def files() -> dict[str, str]:
    """All animations: path and text."""
    return {picture: animate(ROOT / f"demo/recorded/{name}.json") for name, picture in PICTURES.items()}


def main() -> None:
    """The command line."""
    for path, drawn in files().items():
        (ROOT / path).write_text(drawn, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
