"""Calls in tags, with each argument's value between tags of its own: Qwen 3 Coder, Qwen 3.5 and Nemotron 3.

Some models leave the outer ``<tool_call>`` out. Then the name has to be that of a tool.
"""

from __future__ import annotations

from .calls import Tagged, Tools, calls, closed, short_name, tried
from .events import Sink
from .source import Malformed, Source, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def read(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`."""

    def one(source: Source, sink: Sink, mark: str) -> Steps[None]:
        yield from tried(source, sink, mark, _call(source, sink, tools, mark == OPEN))

    yield from calls(source, sink, (OPEN, FUNCTION), one)


def _call(source: Source, sink: Sink, tools: Tools, wrapped: bool) -> Steps[None]:
    if wrapped:
        yield from source.space()
        yield from source.expect(FUNCTION)
    name, _ = yield from short_name(source, (">",))
    if not wrapped and name not in tools.schemas:
        raise Malformed
    yield from source.space()
    arguments, begun = Tagged(source, sink, tools, name), False
    while not (yield from source.take(FUNCTION_END)):
        yield from source.expect(PARAMETER)
        key, _ = yield from short_name(source, (">",))
        if not begun:
            sink.begin(name)
            begun = True
        yield from arguments.argument(key, PARAMETER_END, "\n")
        yield from source.space()
    if not begun:
        sink.begin(name)
    arguments.end()
    if wrapped:
        yield from closed(source, CLOSE, OPEN, FUNCTION)
    else:
        yield from source.space()
        yield from source.take(CLOSE)
