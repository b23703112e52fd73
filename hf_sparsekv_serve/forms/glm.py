"""Calls as a name and pairs of tags: GLM 4.5 and later."""

from __future__ import annotations

from .calls import Tagged, Tools, calls, short_name, tried
from .events import Sink
from .source import Source, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def read(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`."""

    def one(source: Source, sink: Sink, mark: str) -> Steps[None]:
        yield from tried(source, sink, mark, _call(source, sink, tools))

    yield from calls(source, sink, (OPEN,), one)


def _call(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    name, mark = yield from short_name(source, (KEY, CLOSE))
    sink.begin(name)
    arguments = Tagged(source, sink, tools, name)
    while mark == KEY:
        key, _ = yield from short_name(source, (KEY_END,))
        yield from source.space()
        yield from source.expect(VALUE)
        yield from arguments.argument(key, VALUE_END)
        yield from source.space()
        if not (yield from source.take(KEY)):
            yield from source.expect(CLOSE)
            break
    arguments.end()
