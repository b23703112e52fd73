"""Values as models write arguments of calls: JSON, Python's and Gemma's. They come out as JSON, piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .source import LONGEST, Malformed, Source, Steps

DEPTH = 64
DIGITS = 100  # of a number, as bodies of requests may have
WORD = re.compile(r"[-+.\w]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
ESCAPES = {'"': '\\"', "\\": "\\\\", "/": "/", "b": "\\b", "f": "\\f", "n": "\\n", "r": "\\r", "t": "\\t"}
HEX = re.compile(r"[0-9a-fA-F]+")
JSON_WORDS = {"true": "true", "false": "false", "null": "null"}


@dataclass(frozen=True)
class Dialect:
    """A way to write values.

    Attributes:
        quotes: of strings.
        escapes: whether a backslash escapes in them.
        words: other values than numbers, and what they are in JSON.
        bare_keys: names of fields may have no quotes.
        python: there are tuples, a comma may follow the last value, and an unknown escape is two characters.
    """

    quotes: tuple[str, ...] = ('"',)
    escapes: bool = True
    words: Mapping[str, str] = None  # type: ignore[assignment]
    bare_keys: bool = False
    python: bool = False


JSON = Dialect(words=JSON_WORDS)
PYTHON = Dialect(('"', "'"), words={"True": "true", "False": "false", "None": "null", **JSON_WORDS}, python=True)


def value(source: Source, emit: Callable[[str], object], dialect: Dialect = JSON) -> Steps[None]:
    """Read one value.

    Args:
        emit: gets its JSON as it comes.

    Raises:
        Malformed: it is none.
    """
    closing: list[str] = []
    while True:
        emit((yield from source.space()))
        if (opened := (yield from _opened(source, emit, dialect, closing))) is None:
            continue
        if not opened:
            yield from _scalar(source, emit, dialect)
        while closing:
            emit((yield from source.space()))
            mark = yield from source.next()
            if mark == closing[-1]:
                emit("]" if closing.pop() != "}" else "}")
                continue
            if mark != ",":
                raise Malformed
            space = yield from source.space()
            if dialect.python and (yield from source.take(closing[-1])):
                emit("]" if closing.pop() != "}" else "}")
                continue
            emit("," + space)
            if closing[-1] == "}":
                yield from _key(source, emit, dialect)
            break
        else:
            return


def _opened(source: Source, emit: Callable[[str], object], dialect: Dialect, closing: list[str]) -> Steps[bool | None]:
    """Take an opening bracket. None: a value follows in it; True: it is closed again; False: there is none."""
    mark = yield from source.peek()
    if not mark or mark not in ("{[(" if dialect.python else "{["):
        return False
    yield from source.next()
    if len(closing) == DEPTH:
        raise Malformed
    closing.append({"{": "}", "[": "]", "(": ")"}[mark])
    emit("[" if mark == "(" else mark)
    emit((yield from source.space()))
    if (yield from source.take(closing[-1])):
        emit("]" if closing.pop() != "}" else "}")
        return True
    if closing[-1] == "}":
        yield from _key(source, emit, dialect)
    return None


def _key(source: Source, emit: Callable[[str], object], dialect: Dialect) -> Steps[None]:
    """Read a field's name, and the colon after it."""
    if (quote := (yield from _quote(source, dialect))) is not None:
        yield from _text(source, emit, dialect, quote)
    elif dialect.bare_keys and (name := (yield from source.all(WORD, LONGEST))):
        emit(json.dumps(name, ensure_ascii=False))
    else:
        raise Malformed
    emit((yield from source.space()))
    yield from source.expect(":")
    emit(":")


def _quote(source: Source, dialect: Dialect) -> Steps[str | None]:
    for quote in dialect.quotes:
        if (yield from source.take(quote)):
            return quote
    return None


def _scalar(source: Source, emit: Callable[[str], object], dialect: Dialect) -> Steps[None]:
    """Read a string, a number, or a word."""
    if (quote := (yield from _quote(source, dialect))) is not None:
        return (yield from _text(source, emit, dialect, quote))
    word = yield from source.all(WORD, DIGITS)
    if word in dialect.words:
        emit(dialect.words[word])
    elif NUMBER.fullmatch(word):
        emit(word)
    else:
        raise Malformed


def _text(source: Source, emit: Callable[[str], object], dialect: Dialect, quote: str) -> Steps[None]:
    """Read a string, whose first quote is taken."""
    emit('"')
    marks = (quote, "\\") if dialect.escapes else (quote,)
    while (mark := (yield from source.until(marks, lambda text: emit(escaped(text))))) == "\\":
        yield from _escape(source, emit, dialect)
    if mark is None:
        raise Malformed
    emit('"')


def _escape(source: Source, emit: Callable[[str], object], dialect: Dialect) -> Steps[None]:
    mark = yield from source.next()
    if mark in ESCAPES:
        emit(ESCAPES[mark])
    elif mark == "u" or (dialect.python and mark == "x"):
        digits = yield from source.next(4 if mark == "u" else 2)
        if not HEX.fullmatch(digits):
            raise Malformed
        emit("\\u" + digits.rjust(4, "0"))
    elif dialect.python:
        emit("'" if mark == "'" else escaped("\\" + mark))
    else:
        raise Malformed


def escaped(text: str) -> str:
    """Text as it is within a string of JSON. Control characters, which a model may write as they are, are escaped."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def string(source: Source) -> Steps[str]:
    """Read a short string of JSON.

    Raises:
        Malformed: it is none, or a long one.
    """
    parts: list[str] = []
    yield from source.expect('"')
    while (mark := (yield from source.next())) != '"':
        parts.append(mark + (yield from source.next()) if mark == "\\" else mark)
        if len(parts) > LONGEST:
            raise Malformed
    try:
        return json.loads(f'"{"".join(parts)}"', strict=False)
    except ValueError:
        raise Malformed from None
