"""Calls between DeepSeek's marks: V3 and R1 with the arguments as a block of code, V3.1 with the arguments alone."""

from __future__ import annotations

from .calls import Tools, calls, json_arguments, section, short_name
from .events import Sink
from .source import Source, Steps

BAR = "\N{FULLWIDTH VERTICAL LINE}"
OPEN, CLOSE = f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>"
CALL, SEPARATOR, CALL_END = f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁sep{BAR}>", f"<{BAR}tool▁call▁end{BAR}>"
KIND = "function"  # of V3's calls, before the name
CODE, CODE_END = "```json", "```"


def read(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`."""

    def inner(source: Source, sink: Sink, mark: str) -> Steps[None]:
        yield from section(source, sink, mark, CALL, CLOSE, _call)

    yield from calls(source, sink, (OPEN,), inner)


def _call(source: Source, sink: Sink) -> Steps[None]:
    name, _ = yield from short_name(source, (SEPARATOR,))
    yield from source.space()
    if (yield from source.comes("{")) or name != KIND:
        yield from json_arguments(source, sink, name)
    else:
        name, _ = yield from short_name(source, (CODE,))
        yield from json_arguments(source, sink, name)
        yield from source.space()
        yield from source.expect(CODE_END)
    yield from source.space()
    yield from source.expect(CALL_END)
