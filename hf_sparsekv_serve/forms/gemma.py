"""Calls with values in Gemma's own way to write them: Gemma 4 and FunctionGemma."""

from __future__ import annotations

from .calls import Tools, calls, json_arguments, tried
from .events import Sink
from .literals import JSON_WORDS, Dialect
from .source import Source, Steps

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FUNCTION_OPEN, FUNCTION_CLOSE, FUNCTION_QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
WORDS = {**JSON_WORDS, "None": "null"}


def read(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`: Gemma 4."""
    yield from _read(source, sink, OPEN, CLOSE, QUOTE)


def read_function(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`: FunctionGemma."""
    yield from _read(source, sink, FUNCTION_OPEN, FUNCTION_CLOSE, FUNCTION_QUOTE)


def _read(source: Source, sink: Sink, open: str, close: str, quote: str) -> Steps[None]:
    dialect = Dialect((quote,), escapes=False, words=WORDS, bare_keys=True)

    def call() -> Steps[None]:
        yield from source.expect("call:")
        name = yield from source.name("")
        yield from json_arguments(source, sink, name, dialect=dialect)
        yield from source.space()
        yield from source.expect(close)

    def one(source: Source, sink: Sink, mark: str) -> Steps[None]:
        yield from tried(source, sink, mark, call())

    yield from calls(source, sink, (open,), one)
