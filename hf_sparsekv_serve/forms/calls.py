"""Parts that several forms share: calls as JSON objects, arguments in tags, and what to do with those that are none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .events import MOST_CALLS, Sink
from .literals import DIGITS, JSON, JSON_WORDS, NUMBER, Dialect, escaped, string, value
from .source import LONGEST, NAME, Malformed, Source, Steps

ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
        schemas: of their parameters, by name.
    """

    schemas: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(tools: Sequence[Mapping[str, Any]]) -> Tools:
        """Of tools as clients of chat completions give them."""
        named = [tool["function"] for tool in tools]
        return Tools({one["name"]: one.get("parameters") for one in named})

    def types(self, name: str, key: str) -> frozenset[str] | None:
        """Types of an argument; None: the schema does not say."""
        schema = self.schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return types_of(properties.get(key)) if isinstance(properties, dict) else None


def types_of(schema: object, depth: int = 8) -> frozenset[str] | None:
    """Types that values of a schema may have; None: it does not say."""
    if not isinstance(schema, dict) or not depth:
        return None
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given}) | ({"null"} if schema.get("nullable") is True else set())
    if isinstance(given, list):
        return frozenset(one for one in given if isinstance(one, str))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            found = [types_of(one, depth - 1) for one in schema[word][:MOST_CALLS]]
            return None if None in found else frozenset().union(*found)  # type: ignore[arg-type]
    if isinstance(schema.get("enum"), list):
        return frozenset(_kind(one) for one in schema["enum"])
    return None


def _kind(one: object) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(one), "null")


def calls(
    source: Source, sink: Sink, opens: tuple[str, ...], read: Callable[[Source, Sink, str], Steps[Any]]
) -> Steps[None]:
    """Text, and calls that begin with one of some marks.

    Args:
        read: reads what follows a mark, by :func:`tried`.
    """
    while (mark := (yield from source.until(opens if sink.calls < MOST_CALLS else (), sink.text))) is not None:
        yield from read(source, sink, mark)


def tried(source: Source, sink: Sink, begun: str, steps: Steps[None]) -> Steps[bool]:
    """Read a call. If it is none, its text is text of the answer.

    Args:
        begun: the text of the call that has been taken.
        steps: tell its beginning and its arguments.

    Returns:
        whether it is a call.
    """
    source.keep(begun)
    try:
        if sink.calls == MOST_CALLS:
            raise Malformed
        yield from steps
    except Malformed:
        sink.broken(source.kept(), source.ended)
        return False
    source.kept()
    sink.end()
    return True


def section(
    source: Source, sink: Sink, begun: str, open: str, close: str, read: Callable[..., Steps[None]]
) -> Steps[None]:
    """Read the calls between two marks, of which the first has been taken; text if there are none.

    Args:
        begun: the first mark.
        open: begins each call.
        close: ends the section; it may be missing.
        read: reads a call after ``open``.
    """
    while True:
        begun += yield from source.space()
        if not (yield from source.take(open)):
            break
        if not (yield from tried(source, sink, begun + open, read(source, sink))):
            return
        begun = ""
    if begun.strip() or not (yield from source.take(close)):
        sink.text(begun)


def closed(source: Source, close: str, *opens: str) -> Steps[None]:
    """Take a call's closing mark. The end of the answer, also in that mark, or the next call's beginning close it, too.

    Raises:
        Malformed: something else follows.
    """
    yield from source.space()
    if (yield from source.take(close)) or (yield from source.cut_off(close)):
        return
    for mark in opens:
        if (yield from source.comes(mark)):
            return
    raise Malformed


def json_arguments(
    source: Source, sink: Sink, name: str, id: str | None = None, dialect: Dialect = JSON
) -> Steps[None]:
    """Read arguments, an object, of a call whose name is known."""
    yield from source.space()
    if (yield from source.peek()) != "{":
        raise Malformed
    sink.begin(name, id)
    yield from value(source, sink.arguments, dialect)


def json_call(
    source: Source, sink: Sink, known: Callable[[str], bool] | None = None, new_id: Callable[[], str] | None = None
) -> Steps[None]:
    """Read a call that is an object with its name and its arguments, and tell it up to its end.

    Args:
        known: whether a name is that of a tool; None: any name is.
        new_id: makes ids of calls that have none.
    """
    name = id = None
    given: list[str] | None = None  # arguments that came before the name
    begun = False
    yield from source.space()
    yield from source.expect("{")
    while True:
        yield from source.space()
        key = yield from string(source)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if key == "name" and name is None:
            name = yield from string(source)
            if not name or (known is not None and not known(name)):
                raise Malformed
        elif key in ARGUMENTS and given is None:
            given = []
            if name is not None:
                begun = True
                yield from _as_object(source, sink, name, id or (new_id and new_id()), given)
            else:
                yield from _object(source, given)
        elif key == "id" and id is None:
            id = yield from string(source)
        else:
            yield from value(source, len)
        yield from source.space()
        if (yield from source.take("}")):
            break
        yield from source.expect(",")
    if name is None:
        raise Malformed
    if not begun:
        sink.begin(name, id or (new_id and new_id()))
        sink.arguments("".join(given or ["{}"]))


def _as_object(source: Source, sink: Sink, name: str, id: str | None, given: list[str]) -> Steps[None]:
    """Read arguments, and tell them as they come if they are an object as such."""
    if (yield from source.peek()) == "{":
        return (yield from json_arguments(source, sink, name, id))
    yield from _object(source, given)
    sink.begin(name, id)
    sink.arguments("".join(given))


def _object(source: Source, given: list[str]) -> Steps[None]:
    """Read arguments: an object, its JSON in a string, or null for none."""
    mark = yield from source.peek()
    yield from value(source, given.append)
    if mark == "{":
        return
    try:
        found = json.loads("".join(given)) or "{}"
        if not isinstance(json.loads(found), dict):
            raise Malformed
    except (TypeError, ValueError, RecursionError):
        raise Malformed from None
    given[:] = [found]


class Tagged:
    """Tells arguments whose values are texts, as an object.

    Args:
        name: of the tool.
    """

    def __init__(self, source: Source, sink: Sink, tools: Tools, name: str) -> None:
        self._source, self._sink, self._tools, self._name = source, sink, tools, name
        self._keys: set[str] = set()

    def argument(self, key: str, close: str, trim: str = "", text: bool | None = None) -> Steps[None]:
        """Read a value up to ``close``.

        Args:
            trim: a line end or so that the form puts before and after values.
            text: whether it is a string; None: as the schema says, and if it does not, what is no other JSON.
        """
        sink, source = self._sink, self._source
        if key in self._keys:
            raise Malformed
        sink.arguments(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys.add(key)
        types = self._tools.types(self._name, key)
        if trim:
            yield from source.take(trim)
        if text or (text is None and types == {"string"}):
            sink.arguments('"')
            if (yield from source.until((trim + close, close) if trim else (close,), self._part)) is None:
                raise Malformed
            sink.arguments('"')
            return
        found, _ = yield from source.whole((close,))
        sink.arguments(typed(found.removesuffix(trim), None if text is False else types))

    def _part(self, text: str) -> None:
        self._sink.arguments(escaped(text))

    def end(self) -> None:
        """All arguments have come."""
        self._sink.arguments("}" if self._keys else "{}")


def typed(text: str, types: frozenset[str] | None) -> str:
    """The JSON of an argument that is given as text: that of its types that it can be, or a string."""
    bare = text.strip()
    word = bare if types is not None and "string" in types else bare.lower().replace("none", "null")
    if word in JSON_WORDS and (types is None or ("null" if word == "null" else "boolean") in types):
        return word
    if NUMBER.fullmatch(bare) and len(bare) <= DIGITS and (types is None or types & {"integer", "number"}):
        return bare
    if bare[:1] in ("{", "[") and (types is None or types & {"object", "array"}):
        try:
            return json.dumps(json.loads(bare, parse_constant=_no_number), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return f'"{escaped(text)}"'


def _no_number(word: str) -> None:
    raise ValueError(word)


def short_name(source: Source, closes: tuple[str, ...]) -> Steps[tuple[str, str]]:
    """Read a name up to one of some marks, and the mark.

    Raises:
        Malformed: it is none, or a long one.
    """
    name, mark = yield from source.whole(closes, LONGEST)
    if not NAME.fullmatch(name.strip()) or not name.strip():
        raise Malformed
    return name.strip(), mark
