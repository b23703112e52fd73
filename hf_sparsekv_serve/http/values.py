"""JSON of a body as Python has it: how it is parsed, and what errors call it.

:mod:`.schema` and :mod:`.messages` both look into bodies with these.
"""

from __future__ import annotations

import json
from typing import Any

from hf_sparsekv.serving.sampling import shown

from .errors import ApiError


def parsed(text: str) -> Any:
    """Parse JSON. A field that appears twice is an error, because other parsers may have read the first one."""
    return json.loads(text, object_pairs_hook=_once_each)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))
        raise ValueError(f"the field {shown(twice)} is there twice")
    return made


def empty(value: object) -> bool:
    return value in ("", [], {})


def all_whole(value: object, name: str) -> None:
    """Every text in there can be written as UTF-8."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            whole(one, name)
        elif isinstance(one, dict):
            todo += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            todo += one


def whole(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{name} has half a surrogate pair (\\ud800 to \\udfff): that is no text", name) from None


def json_kind(value: object) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value)) or shown(value)
