"""What readers tell of an answer: text, reasoning and calls of tools, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .source import Source, Steps

MOST_CALLS = 128  # of an answer; what follows is text


class Text(NamedTuple):
    """Text of the answer itself."""

    text: str


class Thought(NamedTuple):
    """Text of the reasoning."""

    text: str


class Begin(NamedTuple):
    """A call begins. ``id``: as the model has written it, or as its template needs one; None: any."""

    name: str
    id: str | None


class Arguments(NamedTuple):
    """Text of the call's arguments, which is JSON."""

    text: str


class End(NamedTuple):
    """The call is whole."""


class Broken(NamedTuple):
    """The call that has begun is none after all.

    Attributes:
        text: the text of the answer that it was made of.
        cut: the answer has ended in it.
    """

    text: str
    cut: bool


Event = Text | Thought | Begin | Arguments | End | Broken


class Sink:
    """Takes what a reader finds. Whitespace around calls and reasoning is layout, and left out.

    Attributes:
        calls: that have begun.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._events: list[Event] = []
        self._space, self._lost = "", ""  # not told yet; left out before the call that has begun
        self._bare = False  # text follows that begins with layout
        self._thinks = False
        self._told = False  # some text
        self._open = False  # a call

    def taken(self) -> list[Event]:
        """The events since the last call, texts of a kind joined."""
        joined: list[Event] = []
        for event in self._events:
            last = joined[-1] if joined else None
            if isinstance(event, Text | Thought | Arguments) and type(last) is type(event):
                joined[-1] = type(event)(last.text + event.text)  # type: ignore[union-attr]
            else:
                joined.append(event)
        self._events = []
        return joined

    def text(self, text: str) -> None:
        """Text of the answer."""
        if self._thinks:
            self.thought_over()
        self._plain(text, Text)

    def thought(self, text: str) -> None:
        """Text of the reasoning."""
        if not self._thinks:
            self._thinks, self._bare, self._space = True, True, ""
        self._plain(text, Thought)

    def thought_over(self) -> None:
        """The reasoning ends."""
        self._thinks, self._bare, self._space = False, not self._told, ""

    def _plain(self, text: str, kind: type[Text] | type[Thought]) -> None:
        if self._bare:
            text = text.lstrip()
        if not text:
            return
        self._bare = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._events.append(kind(shown))
            self._told = self._told or kind is Text

    def begin(self, name: str, id: str | None = None) -> None:
        """A call begins."""
        if self._thinks:
            self.thought_over()
        self._lost, self._space = self._space, ""
        self.calls += 1
        self._open = True
        self._events.append(Begin(name, id))

    def arguments(self, text: str) -> None:
        """Arguments of the call."""
        if text:
            self._events.append(Arguments(text))

    def end(self) -> None:
        """The call is whole."""
        self._open = False
        self._bare = not self._told
        self._events.append(End())

    def broken(self, text: str, cut: bool) -> None:
        """What was read as a call is none: all of its text is text of the answer."""
        if not self._open:
            return self.text(text)
        self._open, self._bare = False, False
        self._told = True
        self.calls -= 1
        self._events.append(Broken(self._lost + text, cut))

    def over(self) -> None:
        """The answer has ended."""
        if self._space and not self._thinks and not self.calls:
            self._events.append(Text(self._space))
        self._space = ""


class Reader:
    """Reads one answer: :meth:`feed` its text as it comes, then :meth:`finish`.

    Args:
        steps: the form's generator over a source and a sink.
    """

    def __init__(self, steps: Callable[[Source, Sink], Steps[None]]) -> None:
        self._source, self._sink = Source(), Sink()
        self._steps = self._run(steps)
        next(self._steps)

    def _run(self, steps: Callable[[Source, Sink], Steps[None]]) -> Steps[None]:
        yield
        yield from steps(self._source, self._sink)
        yield from self._source.until((), self._sink.text)

    def feed(self, text: str) -> list[Event]:
        """Events of the next piece of text."""
        if text:
            self._source.add(text)
            next(self._steps, None)
        return self._sink.taken()

    def finish(self) -> list[Event]:
        """Events at the end of the answer."""
        self._source.ended = True
        for _ in self._steps:
            raise AssertionError("a reader waits for text after the end")
        self._sink.over()
        return self._sink.taken()
