"""Calls that are the answer: JSON (Llama 3, and 4 by its template), or a list as Python has it (Llama 4's prompts).

The answer has to begin with them, and the name has to be that of a tool: an answer may be JSON for other reasons.
``<|python_tag|>`` or ``<|python_start|>`` before them may follow text.
"""

from __future__ import annotations

import json
import re

from .calls import Tools, calls, json_call, tried
from .events import Sink
from .literals import PYTHON, WORD, value
from .source import LONGEST, NAME, Malformed, Source, Steps

OPENS = ("<|python_tag|>", "<|python_start|>")
END = "<|python_end|>"
SEPARATORS = re.compile(r"[\s;,]*")


def read(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`."""

    def found(source: Source, sink: Sink, mark: str) -> Steps[None]:
        yield from _calls(source, sink, tools, mark + (yield from source.space()))

    yield from found(source, sink, "")
    yield from calls(source, sink, OPENS, found)


def _calls(source: Source, sink: Sink, tools: Tools, begun: str) -> Steps[None]:
    """Calls, if they come next; otherwise ``begun`` is text."""
    mark = yield from source.peek()
    if mark == "{":
        while (yield from tried(source, sink, begun, json_call(source, sink, tools.schemas.__contains__))):
            begun = yield from source.all(SEPARATORS)
            if not (yield from source.comes("{")):
                yield from source.take(END)
                return
    elif mark == "[":
        while (yield from tried(source, sink, begun, _listed(source, sink, tools, not begun.endswith(",")))):
            begun = yield from source.space()
            if (yield from source.take("]")):
                yield from source.space()
                yield from source.take(END)
                return
            if not (yield from source.take(",")):
                sink.text(begun)
                return
            begun += ","
    else:
        sink.text(begun)


def _listed(source: Source, sink: Sink, tools: Tools, first: bool) -> Steps[None]:
    """One call of a list."""
    if first:
        yield from source.expect("[")
    yield from source.space()
    if (yield from source.peek()) == "{":
        return (yield from json_call(source, sink, tools.schemas.__contains__))
    name = yield from source.all(NAME, LONGEST)
    if name not in tools.schemas:
        raise Malformed
    yield from source.expect("(")
    yield from source.space()
    keys: set[str] = set()
    while not (yield from source.take(")")):
        key = yield from source.all(WORD, LONGEST)
        yield from source.space()
        yield from source.expect("=")
        if not key or key in keys:
            raise Malformed
        if not keys:
            sink.begin(name)
        sink.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        yield from source.space()
        yield from value(source, sink.arguments, PYTHON)
        yield from source.space()
        if not (yield from source.take(",")):
            yield from source.expect(")")
            break
        yield from source.space()
    if not keys:
        sink.begin(name)
    sink.arguments("}" if keys else "{}")
