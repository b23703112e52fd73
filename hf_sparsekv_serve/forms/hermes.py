"""Calls as JSON between ``<tool_call>`` and ``</tool_call>``: Hermes, Qwen 2.5 and Qwen 3."""

from __future__ import annotations

from .calls import Tools, calls, closed, json_call, tried
from .events import Sink
from .source import Source, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`."""

    def one(source: Source, sink: Sink, mark: str) -> Steps[None]:
        yield from tried(source, sink, mark, _call(source, sink))

    yield from calls(source, sink, (OPEN,), one)


def _call(source: Source, sink: Sink) -> Steps[None]:
    yield from json_call(source, sink)
    yield from closed(source, CLOSE, OPEN)
