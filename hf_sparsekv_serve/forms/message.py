"""A whole message, made of the events of its reader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .events import Arguments, Begin, Broken, End, Event, Text, Thought


@dataclass
class Call:
    """A call of a tool: ``arguments`` is JSON. ``id``: None: any."""

    name: str
    id: str | None
    arguments: str = ""


@dataclass
class Message:
    """What an answer consists of. Calls that are none are part of its text.

    Attributes:
        calls: whole ones.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @staticmethod
    def of(events: Iterable[Event]) -> Message:
        """Of all events of one answer."""
        texts: list[str] = []
        thoughts: list[str] = []
        arguments: list[str] = []
        made, call = Message(), Call("", None)
        for event in events:
            match event:
                case Text(text):
                    texts.append(text)
                case Thought(text):
                    thoughts.append(text)
                case Begin(name, id):
                    call, arguments = Call(name, id), []
                case Arguments(text):
                    arguments.append(text)
                case End():
                    call.arguments = "".join(arguments)
                    made.calls.append(call)
                case Broken(text):
                    texts.append(text)
        made.text, made.reasoning = "".join(texts), "".join(thoughts)
        return made
