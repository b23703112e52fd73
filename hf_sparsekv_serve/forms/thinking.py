"""Reasoning that stands between marks at the beginning of an answer."""

from __future__ import annotations

from typing import NamedTuple

from .events import Sink
from .source import Source, Steps


class Marks(NamedTuple):
    """What stands around reasoning."""

    open: str
    close: str


KNOWN = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|channel>thought\n", "<channel|>"),
    Marks("<seed:think>", "</seed:think>"),
)


def marks_of(template: str, added: frozenset[str] | set[str]) -> Marks | None:
    """The marks of a model.

    Args:
        template: of its chats.
        added: tokens that its vocabulary has beside words.
    """
    for marks in KNOWN:
        open = marks.open.partition("\n")[0].removesuffix("thought")
        if marks.close in template or (open in added and marks.close in added):
            return marks
    return None


def begun(prompt: str, marks: Marks) -> bool:
    """Whether the template has begun the reasoning, so that the answer goes on with it."""
    return prompt.rstrip().endswith(marks.open.rstrip())


def reasoning(source: Source, sink: Sink, marks: Marks, begun: bool) -> Steps[None]:
    """Read reasoning, if the answer has any."""
    if not begun:
        space = yield from source.space()
        if not (yield from source.take(marks.open)):
            return sink.text(space)
    yield from source.until((marks.close,), sink.thought)
    sink.thought_over()
