"""Grammars of answers that are calls of tools, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hf_sparsekv.serving.grammar import WHITESPACE

from ..forms.spelling import NUMBER, Spelling

# Each tool's schema is a document of its own: `#` in a reference means the schema's own root.
LARK = """start: {first} call{more} {last}
call: {begin} ({tools}) {end}
"""
LARK_TOOL = """tool{i}: {name} {middle} arguments{i}
arguments{i}: %json {schema}
"""
MOST_CALLS = 16
OF_ANY_TYPE = {"type", "$ref", "allOf", "anyOf", "oneOf", "enum", "const"}  # a schema without these may be any JSON


def grammar_of(
    tools: Sequence[dict[str, Any]], several: bool, spelling: Spelling, tokens: Mapping[str, int] | None = None
) -> str:
    """Calls of some functions, one or several.

    Args:
        tokens: ids of marks that are tokens. A grammar of their texts would let a model spell them in letters.
    """
    more = ""
    if several and spelling.between is not None:
        more = f" ({_literal(spelling.between, tokens)} call){{0,{MOST_CALLS - 1}}}"
    rules, texts = [], {name: _literal(getattr(spelling, name), tokens) for name in ("begin", "middle", "end")}
    for i, tool in enumerate(tools):
        name = f"name{i}" if spelling.quoted else json.dumps(tool["name"])
        schema = json.dumps(_arguments(tool))
        rules.append(LARK_TOOL.format(i=i, name=name, middle=texts["middle"], schema=schema))
        if spelling.quoted:  # in any way that JSON may write it
            rules.append(f"name{i}: %json {json.dumps({'const': tool['name']})}\n")
    first, last = _literal(spelling.first, tokens), _literal(spelling.last, tokens)
    names = " | ".join(f"tool{i}" for i in range(len(tools)))
    head = LARK.format(first=first, more=more, last=last, begin=texts["begin"], tools=names, end=texts["end"])
    return "".join((head, *rules))


def _literal(text: str, tokens: Mapping[str, int] | None) -> str:
    """A text, in which marks that are tokens are written by their ids."""
    marks = {one: f"<[{id}]>" for one, id in (tokens or {}).items() if one in text}
    if NUMBER in text:
        marks[NUMBER] = "/[0-9]{1,3}/"
    if not text:
        return ""
    longest = "|".join(re.escape(one) for one in sorted(marks, key=len, reverse=True))
    parts = re.split(f"({longest})", text) if marks else [text]
    return " ".join(marks.get(part) or json.dumps(part) for part in parts if part)


def _arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object if it does not say what they are."""
    given = tool.get("parameters")
    given = given if isinstance(given, dict) else {}  # none, or true: any
    made = given if given.keys() & OF_ANY_TYPE else {"type": "object", **given}
    return {**made, "x-guidance": WHITESPACE}
