"""The messages of a conversation: checked, and as chat templates take them.

The other fields of a request are in :mod:`.schema`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from hf_sparsekv.serving.sampling import shown

from . import fields as fields_of
from .errors import ApiError
from .fields import Fields
from .scan import Scan
from .values import all_whole, empty, json_kind, parsed

REASONING = "reasoning_content"
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096  # templates are Python, and some look at all messages for each of them
# Fields of a message. Besides role and content: the speaker's name, and fields of an answer that OpenAI's client sends
# back. Templates may ignore them; a template must know every other field.
MESSAGE_LABELS = {"role", "content", "name", "tool_call_id", "tool_calls", "refusal", "reasoning_content"}
PART_LABELS = {"type", "text", "cache_control", "annotations"}  # text, and what clients say about it
EMPTY_OF_ANSWERS = {"tool_calls", "function_call", "audio", "annotations", "refusal"}  # in messages: as if not there


def messages_of(messages: object, scan: Scan, fields: Fields) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise ApiError(400, f"messages must be a list of {{role, content}}, got {json_kind(messages)}", "messages")
    if not messages:
        raise ApiError(400, "messages is empty: an answer needs something to follow", "messages")
    if len(messages) > MAX_MESSAGES:
        raise ApiError(400, f"messages has {len(messages):,}: a request may have {MAX_MESSAGES:,}", "messages")
    return [_message(message, f"messages[{i}]", scan, fields) for i, message in enumerate(messages)]


def _message(message: object, where: str, scan: Scan, fields: Fields) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} must be an object with role and content, got {json_kind(message)}", "messages")
    message = {name: value for name, value in message.items() if value is not None}
    all_whole(message, "messages")
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", "messages")
    if role == "developer":
        message["role"] = "system"  # the name that templates know
    if "content" in message:
        message["content"] = _content(message["content"], f"{where}.content", fields)
    elif role == "assistant" and message.get("tool_calls"):
        message["content"] = ""
    else:
        raise ApiError(400, f"{where}.content is missing", "messages")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls", scan, fields)
    return {name: value for name, value in message.items() if not (name in EMPTY_OF_ANSWERS and empty(value))}


def without_unknown(messages: list[dict[str, Any]], template: str) -> tuple[list[dict[str, Any]], list[str]]:
    """A conversation without fields that its template does not know, and their names, as ``messages.0.mood``."""
    made, names = [], []
    for i, message in enumerate(messages):
        left_out = {name for name in message if name not in MESSAGE_LABELS and name not in template}
        made.append({name: value for name, value in message.items() if name not in left_out} if left_out else message)
        names += [f"messages.{i}.{name}" for name in message if name in left_out]
    return made, names


def check_history(messages: list[dict[str, Any]], template: str) -> None:
    """400 if a conversation has what its template would leave out.

    Args:
        messages: of :attr:`Asked.messages`.
        template: the source of the chat template.
    """
    for i, message in enumerate(messages):
        where, calls = f"messages[{i}]", bool(message.get("tool_calls"))
        if (calls and "tool_calls" not in template) or (message["role"] == "tool" and "tool" not in template):
            what = "tool_calls" if calls else "role 'tool'"
            why = f"{where} has {what}, but this model's chat template knows no tools: it would leave that out"
            raise ApiError(400, why, "messages", "unsupported_parameter")
        for name in message:
            if name not in MESSAGE_LABELS and name not in template:
                why = f"{where} has a field {shown(name)} that this model's chat template does not know"
                raise ApiError(400, why, "messages", "unsupported_parameter")


def with_reasoning(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """A conversation whose reasoning has the name that its template knows, if that is another than OpenAI's clients'.

    Args:
        messages: with ``reasoning_content``.
        template: the source of the chat template.
    """
    if REASONING in template:
        return messages
    for name in ("thinking", "reasoning"):  # gpt-oss'; others'
        if re.search(rf"""message\.{name}\b|message\[['"]{name}['"]\]|['"]{name}['"] in message""", template):
            given = ({**one, name: one[REASONING]} if REASONING in one else one for one in messages)
            return [{key: value for key, value in one.items() if key != REASONING} for one in given]
    return messages


def applied(messages: list[dict[str, Any]], apply: Callable[[list[dict[str, Any]]], str]) -> str:
    """What a template makes of a conversation. Some templates (DeepSeek V3's) add arguments of calls to texts."""
    try:
        return apply(messages)
    except TypeError:
        if not any(one.get("tool_calls") for one in messages):
            raise
        return apply(
            [{**one, "tool_calls": _as_text(one["tool_calls"])} if one.get("tool_calls") else one for one in messages]
        )


def _as_text(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls with their arguments as JSON in a string."""
    made = []
    for call in calls:
        given = call["function"]["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        made.append({**call, "function": {**call["function"], "arguments": text}})
    return made


def _content(content: object, where: str, fields: Fields) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be text or a list of parts, got {json_kind(content)}", "messages")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            what = f"a part of type {shown(kind)}" if isinstance(kind, str) else "a part without a type"
            raise ApiError(400, f"{where} has {what}: this server reads text only", "messages")
        if not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}: text must be a string, got {json_kind(part.get('text'))}", "messages")
        for name, value in part.items():
            if name in PART_LABELS or value is None or empty(value):
                continue
            if not fields.leaves_out(f"{where}[{i}]", name):
                why = f"{where} has a part with a field {shown(name)}, which no template gets: leave it out"
                raise ApiError(400, why, "messages", "unsupported_parameter")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: object, where: str, scan: Scan, fields: Fields) -> list[dict[str, Any]]:
    """As templates take them: with arguments as an object, where OpenAI's API has JSON in a string."""
    made = []
    for i, call in enumerate(calls if isinstance(calls, list) else [None]):
        named = call.get("function") if isinstance(call, dict) else None
        if not isinstance(named, dict) or not isinstance(named.get("name"), str):
            raise ApiError(400, f"{where} must be a list of {{id, type, function: {{name, arguments}}}}", "messages")
        call = fields.of(call, fields_of.TOOL_CALL, f"{where}[{i}]", empty_too=True)
        function = fields.of(named, fields_of.CALLED, f"{where}[{i}].function", empty_too=True)
        arguments = function.get("arguments", {})
        try:
            if isinstance(arguments, str):
                scan.text(arguments.encode())
                arguments = parsed(arguments) if arguments.strip() else {}  # of a function without parameters
        except (ValueError, RecursionError):
            raise ApiError(400, f"{where}: arguments of {shown(function['name'])} are not JSON", "messages") from None
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made
