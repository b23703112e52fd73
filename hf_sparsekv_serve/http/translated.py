"""What requests of other APIs have in common: they become bodies of chat completions, which :mod:`.schema` checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hf_sparsekv.serving.sampling import shown

from . import schema
from .errors import ApiError
from .fields import MOST_TOLD, Fields, Kind
from .messages import MAX_MESSAGES
from .scan import Scan
from .values import json_kind


class Hint(NamedTuple):
    """A wish that only some templates know.

    Attributes:
        field: where the client has it.
        variables: of templates; those that the template knows are given to it.
    """

    field: str
    variables: Mapping[str, Any]


def asked_of(
    chat: Mapping[str, Any],
    names: Mapping[str, str],
    scan: Scan | None,
    fields: Fields,
    hints: Iterable[Hint] = (),
    ignored: Iterable[str] = (),
) -> schema.Asked:
    """A request of a client, by the body of chat completions that says the same.

    Args:
        names: of fields that the client calls otherwise, by their names in chats.
        fields: what checked the client's own objects.
        ignored: fields that say nothing that this server does; the client is told.

    Raises:
        ApiError: a field is wrong, by the client's name of it.
    """
    try:
        asked = schema.chat({name: value for name, value in chat.items() if value is not None}, scan)
    except ApiError as error:
        name = names.get(error.param or "", error.param)
        message = str(error)
        if name != error.param and error.param is not None:
            message = message.replace(error.param, str(name), 1)
        raise ApiError(error.status, message, name, error.code, error.headers) from None
    told = (*fields.ignored, *ignored)
    return replace(asked, hints=tuple(hints), ignored=told[:MOST_TOLD])


def blocks_of(content: object, where: str, fields: Fields, kinds: Mapping[str, Kind]) -> list[dict[str, Any]]:
    """The parts of a content, which may be text alone.

    Args:
        kinds: of parts that may be there, by type.

    Raises:
        ApiError: it is neither, or has a part of another type.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong(f"{where} must be text or a list of parts, got {json_kind(content)}", where)
    made = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            what = f"a part of type {shown(kind)}" if isinstance(kind, str) else "a part without a type"
            raise wrong(f"{where} has {what}: this server reads {', '.join(kinds)}", where)
        made.append(fields.of(part, kinds[kind], f"{where}[{i}]"))
    return made


def few(given: list[Any], name: str) -> list[Any]:
    """Messages or items, if they are not too many.

    Raises:
        ApiError: there are more than a request may have.
    """
    if len(given) > MAX_MESSAGES:
        raise ApiError(400, f"{name} has {len(given):,}: a request may have {MAX_MESSAGES:,}", name)
    return given


def text_of(part: Mapping[str, Any], name: str, where: str) -> str:
    """A field that has to be text.

    Raises:
        ApiError: it is none, or missing.
    """
    if not isinstance(part.get(name), str):
        raise wrong(f"{where}.{name} must be a string, got {json_kind(part.get(name))}", where)
    return part[name]


def one_of(given: object, choices: Iterable[str], name: str) -> str:
    """A word.

    Raises:
        ApiError: it is another one.
    """
    choices = list(choices)
    if not isinstance(given, str) or given not in choices:
        raise ApiError(400, f"{name} must be one of {', '.join(choices)}, got {shown(given)}", name.partition(".")[0])
    return given


def flag(body: Mapping[str, Any], name: str, where: str = "") -> bool | None:
    """A truth value, if it is there.

    Raises:
        ApiError: it is none.
    """
    value = body.get(name)
    if not isinstance(value, bool | None):
        message = f"{where}{name} must be true or false, got {json_kind(value)}"
        raise ApiError(400, message, (where or name).partition(".")[0])
    return value


def wrong(message: str, where: str) -> ApiError:
    """The error of something in a field."""
    return ApiError(400, message, where.partition(".")[0].partition("[")[0])


def thinks(on: bool) -> dict[str, bool]:
    """Variables by which templates turn reasoning on and off: Qwen's, GLM's and Gemma's; DeepSeek's and Kimi's."""
    return {"enable_thinking": on, "thinking": on}
