"""Calls after ``[TOOL_CALLS]``: a list in JSON, or from tokenizer version 11 on names and arguments with marks between.

Mistral's templates refuse ids of calls that are not nine letters or digits.
"""

from __future__ import annotations

import secrets
import string

from .calls import Tools, calls, json_arguments, json_call, tried
from .events import Sink
from .source import LONGEST, NAME, Malformed, Source, Steps

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
LETTERS = string.ascii_letters + string.digits


def new_id() -> str:
    """An id as the templates need it."""
    return "".join(secrets.choice(LETTERS) for _ in range(9))


def read(source: Source, sink: Sink, tools: Tools) -> Steps[None]:
    """See :class:`.Form`."""
    yield from calls(source, sink, (OPEN,), _calls)


def _calls(source: Source, sink: Sink, mark: str) -> Steps[None]:
    mark += yield from source.space()
    if not (yield from source.comes("[")):
        one = json_call(source, sink, None, new_id) if (yield from source.comes("{")) else _named(source, sink)
        yield from tried(source, sink, mark, one)
        return
    mark += yield from source.next()
    while (yield from tried(source, sink, mark, json_call(source, sink, None, new_id))):
        mark = yield from source.space()
        if (yield from source.take("]")):
            return
        if not (yield from source.take(",")):
            return sink.text(mark)
        mark += ","


def _named(source: Source, sink: Sink) -> Steps[None]:
    name = yield from source.all(NAME, LONGEST)
    if not name:
        raise Malformed
    id = None
    if (yield from source.take(ID)):
        id = yield from source.all(NAME, LONGEST)
    yield from source.take(ARGS)
    yield from json_arguments(source, sink, name, id or new_id())
