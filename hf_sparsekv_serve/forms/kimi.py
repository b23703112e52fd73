"""Calls between Kimi K2's marks. The id has the name in it, and templates show it again: ``functions.NAME:0``."""

from __future__ import annotations

from .calls import Tools, calls, json_arguments, section, short_name
from .events import Sink
from .source import Malformed, Source, Steps

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def read(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`."""

    def inner(source: Source, sink: Sink, mark: str) -> Steps[None]:
        yield from section(source, sink, mark, CALL, CLOSE, _call)

    yield from calls(source, sink, (OPEN,), inner)


def _call(source: Source, sink: Sink) -> Steps[None]:
    id, _ = yield from short_name(source, (ARGUMENTS,))
    name = id.removeprefix("functions.").rpartition(":")[0] or id.removeprefix("functions.")
    if not name:
        raise Malformed
    yield from json_arguments(source, sink, name, id)
    yield from source.space()
    yield from source.expect(CALL_END)
