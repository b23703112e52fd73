"""Calls as ``invoke`` and ``parameter`` elements: DeepSeek V3.2 (DSML) and MiniMax M2."""

from __future__ import annotations

from .calls import Tagged, Tools, calls, section, short_name
from .deepseek import BAR
from .events import Sink
from .source import Source, Steps

DSML = f"{BAR}DSML{BAR}"
OPEN, CLOSE = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
MINIMAX_OPEN, MINIMAX_CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"


def read(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`: DeepSeek V3.2."""
    yield from _read(source, sink, tools, OPEN, CLOSE, DSML)


def read_minimax(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`: MiniMax M2."""
    yield from _read(source, sink, tools, MINIMAX_OPEN, MINIMAX_CLOSE, "")


def _read(source: Source, sink: Sink, tools: Tools, open: str, close: str, prefix: str) -> Steps[None]:
    parameter, parameter_end = f'<{prefix}parameter name="', f"</{prefix}parameter>"

    def call(source: Source, sink: Sink) -> Steps[None]:
        name, _ = yield from short_name(source, ('">',))
        yield from source.space()
        arguments, begun = Tagged(source, sink, tools, name), False
        while not (yield from source.take(f"</{prefix}invoke>")):
            yield from source.expect(parameter)
            key, _ = yield from short_name(source, ('"',))
            is_text = None
            if (yield from source.take(' string="')):
                said, _ = yield from short_name(source, ('"',))
                is_text = said == "true"
            yield from source.expect(">")
            if not begun:
                sink.begin(name)
                begun = True
            yield from arguments.argument(key, parameter_end, text=is_text)
            yield from source.space()
        if not begun:
            sink.begin(name)
        arguments.end()

    def inner(source: Source, sink: Sink, mark: str) -> Steps[None]:
        yield from section(source, sink, mark, f'<{prefix}invoke name="', close, call)

    yield from calls(source, sink, (open,), inner)
