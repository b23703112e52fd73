"""Texts above the panes and in them, as HTML; pictures are in ``charts``."""

from __future__ import annotations

from . import charts
from .view import RaceView

ROLES = ("full attention", "sparse")


def status(message: str, fraction: float | None = None, error: bool = False) -> str:
    """The line above the panes."""
    bar = "" if fraction is None else f"<div class='bar'><i style='width:{100 * fraction:.0f}%'></i></div>"
    return f"<div class='status{' error' * error}' role='status'>{charts.esc(message)}{bar}</div>"


def verdict(view: RaceView) -> str:
    """The headline, above everything else; of a recording with its mark below."""
    mark = ""
    if view.recorded:
        silent = "" if view.question else "; random weights say nothing, so this race is of times"
        mark = f"<div class='mark'><b>Recorded</b> {charts.esc(view.recorded + silent)}</div>"
    if (said := view.verdict()) is None:
        return mark
    headline, below = map(charts.esc, said)
    return f"<div class='verdict'><strong>{headline}</strong><span>{below}</span></div>{mark}"


def pane(view: RaceView, number: int, history: list[tuple[str, list[str]]]) -> str:
    """Questions and answers of one cache; nothing where there are none, as of random weights."""
    if view.recorded and not view.question:
        return ""
    lane = view.lanes[number]
    name, _, about = (lane.name or ROLES[number]).partition(", ")
    said = [f"<p class='q'>{charts.esc(q)}</p><p class='a'>{charts.esc(a[number])}</p>" for q, a in history]
    foot = "" if lane.ids or view.ended else "<span>waits until the document is read</span>"
    if lane.ids:
        foot = f"<span>{len(lane.ids)} tokens{f' x {view.rows} sequences' if view.rows > 1 else ''}</span>"
        found = view.found(lane)
        mark = ("right", "the hidden fact: found") if found else ("wrong", "the hidden fact: not found")
        if found is False and view.model_missed:  # no fault of the cache
            mark = ("quiet", "the hidden fact: not found by the model" + ", nor here" * number)
        foot += f"<span class='{mark[0]}'>{mark[1]}</span>" if found is not None else ""
    said.append(
        f"<p class='q'>{charts.esc(view.question)}</p><p class='a'>{_marked(lane.answer, view.wanted)}</p>"
        + (f"<p class='after'>decoding on: &hellip;{charts.esc(lane.after[-60:])}</p>" if lane.after else "")
    )
    talk = "talk whole" if view.ended and not history else "talk"  # a single answer is read from its beginning
    badge = "<span class='badge'>recorded</span>" if view.recorded else ""
    return (
        f"<div class='pane'><div class='name {charts.NAMES[number]}'>{charts.esc(name)}{badge}</div>"
        f"<div class='about'>{charts.esc(about)}</div><div class='{talk}'><div>{''.join(said)}</div></div>"
        f"<div class='foot'>{foot}</div></div>"
    )


def _marked(answer: str, wanted: str | None) -> str:
    """The answer as HTML, with the first place of the hidden fact marked."""
    before, fact, after = answer.partition(wanted) if wanted else (answer, "", "")
    mark = f"<mark>{charts.esc(fact)}</mark>" if fact else ""
    return f"{charts.esc(before)}{mark}{charts.esc(after)}"
