"""Fields of a chat that are hostile: text everywhere, and schemas whose automata grow with a number.

:mod:`.attacks` sends them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/latest/meta-data"}}
JINJA = "{{ ''.__class__.__mro__ }}{% for i in range(10**9) %}x{% endfor %}"


def deep_schema(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


# ---------------------------------------------------------------------- text in every field


def _text(size: int) -> str:
    return "the cat of " * max(1, size // 11)


def _with(make: Callable[[str], dict]) -> Callable[[int], dict]:
    return lambda size: make(_text(size))


def _call(name: str = "f", arguments: object = "{}", **more: object) -> dict:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}
    return {"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]}


def deep_arguments(size: int) -> dict:
    return _call(arguments="[" + "[]," * (size // 3) + "1]")


def tool(parameters: object = None, **more: object) -> dict:
    function = {"name": "f", "parameters": parameters or {"type": "object"}, **more}
    return {"tools": [{"type": "function", "function": function}]}


def _said(role: str = "user", **more: object) -> dict:
    return {"messages": [{"role": role, "content": "a", **more}]}


# A template may show these; then the prompt is too long.
_TEXTS: dict[str, Callable[[str], dict]] = {
    "content": lambda text: _said(content=text),
    "parts": lambda text: _said(content=[{"type": "text", "text": text[i::100]} for i in range(100)]),
    "a name": lambda text: _said(name=text),
    "reasoning": lambda text: _said("assistant", reasoning_content=text),
    "a refusal": lambda text: _said("assistant", refusal=text),
    "the id of a call": lambda text: _said("tool", tool_call_id=text),
    "a call": lambda text: _call(name=text),
    "arguments": lambda text: _call(arguments=json.dumps({"a": text})),
    "arguments as an object": lambda text: _call(arguments={text: 1}),
    "a tool's name": lambda text: tool(name=text),
    "a tool's description": lambda text: tool(description=text),
    "a tool's parameters": lambda text: tool(
        {"type": "object", "properties": {text[::2]: {"description": text[1::2]}}}
    ),
    "a variable": lambda text: {"chat_template_kwargs": {"mood": text}},
    "an effort": lambda text: {"reasoning_effort": text},
    "characters of four bytes": lambda text: _said(content="\U00010348" * (len(text) // 4)),
}
# Nothing uses these.
_LABELS: dict[str, Callable[[str], dict]] = {
    "user": lambda text: {"user": text},
    "metadata": lambda text: {"metadata": {text[:99]: text}},
    "a schema's name": lambda text: {
        "response_format": {"type": "json_schema", "json_schema": {"name": text, "schema": {"type": "object"}}}
    },
    "a part's label": lambda text: _said(content=[{"type": "text", "text": "a", "cache_control": text}]),
}


def _asked(item: Callable[[str], dict]) -> Callable[[str], dict]:
    """The input of ``/v1/responses``, without what chats have."""
    return lambda text: {"messages": None, "max_tokens": None, "input": [*HI, item(text)]}


MESSAGES, RESPONSES, COUNT = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"
# The same of other APIs.
_ELSEWHERE: dict[str, tuple[str, Callable[[str], dict]]] = {
    "a system prompt": (
        MESSAGES,
        lambda text: {"system": [{"type": "text", "text": text[i::100]} for i in range(100)]},
    ),
    "a later system prompt": (MESSAGES, lambda text: {"messages": [*HI, {"role": "system", "content": text}]}),
    "a result": (
        MESSAGES,
        lambda text: _said(content=[{"type": "tool_result", "tool_use_id": "1", "content": text}]),
    ),
    "an input of a tool": (
        MESSAGES,
        lambda text: {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {text: 1}}]},
                *HI,
            ]
        },
    ),
    "an input schema": (
        MESSAGES,
        lambda text: {"tools": [{"name": "f", "input_schema": {"type": "object", "description": text}}]},
    ),
    "what is counted": (COUNT, lambda text: {"max_tokens": None, **_said(content=text)}),
    "instructions": (RESPONSES, lambda text: {**_asked(lambda _: HI[0])(text), "instructions": text}),
    "an output": (
        RESPONSES,
        _asked(lambda text: {"type": "function_call_output", "call_id": "1", "output": text}),
    ),
    "a call of responses": (
        RESPONSES,
        _asked(
            lambda text: {"type": "function_call", "call_id": "1", "name": "f", "arguments": json.dumps({"a": text})}
        ),
    ),
    "a summary": (
        RESPONSES,
        _asked(lambda text: {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}),
    ),
    "a namespace": (
        RESPONSES,
        lambda text: {
            **_asked(lambda _: HI[0])(text),
            "tools": [{"type": "namespace", "name": text, "tools": [{"type": "function", "name": "g"}] * 100}],
        },
    ),
}
ELSEWHERE = {name: (path, _with(make)) for name, (path, make) in _ELSEWHERE.items()}
TEXTS = {name: _with(make) for name, make in _TEXTS.items()}
LABELS = {name: _with(make) for name, make in _LABELS.items()}


# ---------------------------------------------------------------------- schemas that grow with a number

PRIMES = (7, 9_973, 999_983, 9_999_991, 2_147_483_647, 999_999_999_989)
COUNTS = (10, 1000, 100_000, 10_000_000, 10**12)


def _nested(depth: int, most: int) -> dict:
    schema: dict = {"type": "boolean"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": most, "maxItems": most}
    return schema


def _doubled(depth: int) -> dict:
    """2 ** depth times one definition."""
    twice = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**twice, f"d{depth}": {"type": "null"}}}


def _object(count: int) -> dict:
    names = [f"p{i}" for i in range(min(count, 1200))]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names[::2]}


# By a number, which is one of COUNTS.
SCHEMAS: dict[str, Callable[[int], dict]] = {
    "multipleOf": lambda n: {"type": "integer", "multipleOf": PRIMES[COUNTS.index(n) + 1]},
    "two multiples": lambda n: {"type": "integer", "allOf": [{"multipleOf": one} for one in (n + 1, n + 3)]},
    "a fraction of multipleOf": lambda n: {"type": "number", "multipleOf": 1 / n},
    "a multiple in a range": lambda n: {
        "type": "integer",
        "multipleOf": n + 1,
        "minimum": -n * n,
        "maximum": n * n + 7,
    },
    "a range": lambda n: {"type": "integer", "minimum": -n - 1, "exclusiveMaximum": n * n + 3},
    "a range of fractions": lambda n: {"type": "number", "exclusiveMinimum": -1 / n, "maximum": n + 1 / 3},
    "maxLength": lambda n: {"type": "string", "maxLength": n},
    "minLength": lambda n: {"type": "string", "minLength": n, "maxLength": 2 * n},
    "a repeat": lambda n: {"type": "string", "pattern": f"^[a-f]{{{n}}}$"},
    "repeats of repeats": lambda n: {"type": "string", "pattern": f"^(([ab]{{1,{n}}}c?){{1,{n}}}){{1,{n}}}$"},
    "a choice far back": lambda n: {"type": "string", "pattern": f"^(a|b)*a(a|b){{{min(n, 60)}}}$"},
    "many patterns": lambda n: {
        "type": "string",
        "allOf": [{"pattern": f"^(.{{{i + 2}}})*[a-{chr(98 + i)}]*$"} for i in range(min(n, 16))],
    },
    "minItems": lambda n: {"type": "array", "items": {"type": "integer"}, "minItems": n},
    "maxItems": lambda n: {"type": "array", "items": {"enum": [1, 2]}, "maxItems": n},
    "arrays of arrays": lambda n: _nested(4, n),
    "minProperties": lambda n: {"type": "object", "minProperties": n, "additionalProperties": {"type": "null"}},
    "maxProperties": lambda n: {"type": "object", "maxProperties": n, "additionalProperties": {"type": "null"}},
    "many properties": _object,
    "many values": lambda n: {"enum": [f"v{i}" for i in range(min(n, 6000))]},
    "many alternatives": lambda n: {"anyOf": [{"type": "array", "maxItems": i} for i in range(min(n, 1000))]},
    "definitions of definitions": lambda n: _doubled(min(n, 40)),
    "a definition of itself": lambda n: {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}},
    },
    "names of properties": lambda n: {"type": "object", "patternProperties": {f"^x{{1,{n}}}$": {"type": "null"}}},
}


def _multiple(of: int) -> dict:
    return {"type": "integer", "multipleOf": of}


def _pattern(text: str) -> dict:
    return {"type": "string", "pattern": text}


OPTIONS = "a?" * 25_000
# Schemas that take seconds or gigabytes, by a number: compiled ones are kept. The last one is compiled at once, and
# takes seconds where the answer comes to its pattern.
SLOW: dict[str, Callable[[int], dict]] = {
    "multipleOf": lambda n: _multiple(9_000_001 + 10 * n),
    "multipleOf in allOf": lambda n: {"allOf": [_multiple(997), _multiple(n)]},
    "many multipleOf": lambda n: {"anyOf": [_multiple(n + i) for i in range(200)]},
    "patterns": lambda n: {"allOf": [_pattern(f"a{n + i}") for i in range(30)]},
    "repeats": lambda n: _pattern(f"^(((a{{10}}){{10}}){{10}}){{{n}}}$"),
    "options": lambda n: _pattern(f"^{n}{OPTIONS}$"),
    "options, later": lambda n: {
        "type": "array",
        "prefixItems": [{"const": n}, _pattern(f"^{OPTIONS}$")],
        "minItems": 2,
    },
}


def _new(schema: dict) -> dict:
    """Such that no compiled one is found again."""
    return {**schema, "description": str(random.random())}


def as_format(make: Callable[[int], dict]) -> Callable[[int], dict]:
    """An answer that follows it."""

    def fields(size: int) -> dict:
        named = {"name": "a", "schema": _new(make(random.choice(COUNTS)))}
        return {"max_tokens": 8, "response_format": {"type": "json_schema", "json_schema": named}}

    return fields


def as_tool(make: Callable[[int], dict]) -> Callable[[int], dict]:
    """An answer that calls a tool with it."""

    def fields(size: int) -> dict:
        arguments = {"a": _new(make(random.choice(COUNTS)))}
        schema = {"type": "object", "properties": arguments, "required": ["a"]}
        return {"max_tokens": 8, "tool_choice": "required", **tool(schema)}

    return fields
