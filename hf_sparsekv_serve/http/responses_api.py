"""Bodies of OpenAI's ``/v1/responses``, as bodies of chat completions. Nothing is stored: the input is all there is.

Field by field: https://platform.openai.com/docs/api-reference/responses, and the types of its SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_sparsekv.serving.sampling import shown

from . import schema
from .errors import ApiError
from .fields import EFFORT, LABELS, MAX_NAME, SAMPLING, Fields, Kind, Refused, false, zero
from .scan import Scan
from .translated import Hint, asked_of, blocks_of, few, flag, one_of, text_of, thinks, wrong
from .values import empty, json_kind

NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
    "stream_options": "stream_options",
}
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
STORED = "is not there: this server stores no responses. Send the whole conversation as input"
_REFUSED = {
    "background": Refused(false, "is not there: an answer comes with its request"),
    "conversation": Refused(empty, STORED),
    "previous_response_id": Refused(empty, STORED),
    "prompt": Refused(empty, "is not there: this server stores no prompts. Send instructions and input"),
    "max_tool_calls": Refused(empty, "is not there: it counts tools that a server runs"),
    "moderation": Refused(empty, "is not there: this server moderates nothing"),
    "service_tier": Refused(lambda value: value in ("auto", "default"), "is not there: requests are all alike"),
    "top_logprobs": Refused(zero, "is not there: /v1/chat/completions has log probabilities"),
    "truncation": Refused(lambda value: value == "disabled", "is not there: nothing of an input is left out"),
}
RESPONSES = Kind(
    frozenset(
        {"model", "input", "instructions", "max_output_tokens", "parallel_tool_calls", "reasoning", "stream", "text"}
        | {"stream_options", "tool_choice", "tools", "include", "chat_template_kwargs", *LABELS, *SAMPLING}
        | {"client_metadata", "prompt_cache_retention", "prompt_cache_options", "context_management"}
    ),
    _REFUSED,
)
INCLUDED = ("reasoning.encrypted_content",)  # reasoning is in the answer as it is
_OF_ITEM = frozenset({"type", "id", "status"})
_DIRECT = Refused(lambda value: value == {"type": "direct"}, "is not there: the model itself calls tools")
MESSAGE = Kind(_OF_ITEM | {"role", "content", "phase"})
CALL = Kind(
    _OF_ITEM | {"call_id", "name", "arguments", "namespace"},
    {"caller": _DIRECT, "async": Refused(false, "is not there: calls wait for what they give")},
)
OUTPUT = Kind(_OF_ITEM | {"call_id", "output", "name", "namespace"}, {"caller": _DIRECT})
REASONING = Kind(
    _OF_ITEM | {"summary", "content"},
    {"encrypted_content": Refused(empty, "is another server's: this one cannot read it. Begin a new conversation")},
)
ITEMS = {"message": MESSAGE, "function_call": CALL, "function_call_output": OUTPUT, "reasoning": REASONING}
_TEXT = Kind(
    frozenset({"type", "text"}),
    {"annotations": Refused(empty, "are not there"), "logprobs": Refused(empty, "are not there")},
)
PARTS = dict.fromkeys(("input_text", "output_text", "text"), _TEXT)
THOUGHTS = dict.fromkeys(("reasoning_text", "summary_text", "text"), _TEXT)
TOOL = Kind(
    frozenset({"type", "name", "description", "parameters", "strict"}),
    {
        "allowed_callers": Refused(lambda value: value == ["direct"], "is not there: the model itself calls tools"),
        "defer_loading": Refused(false, "is not there: the model is shown all tools"),
        "output_schema": Refused(empty, "is not there: say it in the description"),
    },
)
NAMESPACE = Kind(frozenset({"type", "name", "description", "tools"}))
CHOICE = Kind(frozenset({"type", "name", "namespace"}))
REASONS = Kind(frozenset({"effort", "summary", "generate_summary", "context", "mode"}))
TEXTS = Kind(frozenset({"format", "verbosity"}))
FORMATS = {
    "text": Kind(frozenset({"type"})),
    "json_object": Kind(frozenset({"type"})),
    "json_schema": Kind(frozenset({"type", "name", "description", "schema", "strict"})),
}
ELSEWHERE = ("web_search", "web_search_preview")  # Codex offers it always, to servers that have it
BETWEEN = "__"  # a namespace and a name, as models see them


def responses(body: Mapping[str, Any], scan: Scan | None = None, ignore_unknown: bool = False) -> schema.Asked:
    """The body of ``/v1/responses``; see :func:`.schema.chat`."""
    fields = Fields(ignore_unknown)
    body = fields.of(body, RESPONSES)
    same = ("stream", "stream_options", "parallel_tool_calls", "chat_template_kwargs", *SAMPLING)
    chat: dict[str, Any] = {name: body[name] for name in same if name in body}
    names: dict[str, tuple[str, str]] = {}
    ignored = ["context_management"] * (not empty(body.get("context_management", [])))
    chat["max_tokens"] = body.get("max_output_tokens")
    chat["messages"] = _messages(body, fields)
    chat["tools"] = _tools(body.get("tools"), fields, names, ignored)
    chat["tool_choice"] = _choice(body.get("tool_choice"), fields)
    flag(body, "store")
    _included(body.get("include", []))
    hints = _reasoning(body.get("reasoning", {}), fields)
    text = fields.of(body.get("text", {}), TEXTS, "text")
    ignored += ["text.verbosity"] * (text.get("verbosity", "medium") != "medium")
    if "format" in text:
        chat["response_format"] = _format(text["format"], fields)
    asked = asked_of(chat, NAMES, scan, fields, hints, ignored)
    return replace(asked, names=names, told=_repeated(body))


def _repeated(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer repeats of the request. It is kept until then, so instructions, tools and schemas are not."""
    metadata = body.get("metadata", {})
    if not isinstance(metadata, dict) or len(metadata) > 16:
        raise ApiError(400, "metadata must be an object of up to 16 texts", "metadata")
    for name, value in metadata.items():
        if not isinstance(value, str) or len(name) > MAX_NAME or len(value) > 512:
            raise ApiError(400, "metadata must have texts of up to 512 characters, by names of up to 64", "metadata")
    choice = body.get("tool_choice", "auto")
    return {
        "metadata": metadata,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice["name"]},
        "max_output_tokens": body.get("max_output_tokens"),
    }


def _included(given: object) -> None:
    if not isinstance(given, list):
        raise ApiError(400, f"include must be a list, got {json_kind(given)}", "include")
    for one in given:
        if one not in INCLUDED:
            why = f"include has {shown(one)}, which is not there: it may have {', '.join(INCLUDED)}"
            raise ApiError(400, why, "include", "unsupported_parameter")


def _reasoning(given: object, fields: Fields) -> list[Hint]:
    effort = fields.of(given, REASONS, "reasoning").get("effort")
    if effort is None:
        return []
    if one_of(effort, ("none", *EFFORTS), "reasoning.effort") == "none":
        return [Hint("reasoning.effort", thinks(False))]
    return [Hint("reasoning.effort", {EFFORT: EFFORTS[effort]})]


def _format(given: object, fields: Fields) -> dict[str, Any]:
    kind = one_of(given.get("type") if isinstance(given, dict) else None, FORMATS, "text.format.type")
    form = fields.of(given, FORMATS[kind], "text.format")
    return {"type": kind} if kind != "json_schema" else {"type": kind, kind: {**form, "type": None}}


def _messages(body: Mapping[str, Any], fields: Fields) -> list[dict[str, Any]]:
    """The conversation. What developers say at its beginning is one message: many templates know no other."""
    made: list[dict[str, Any]] = []
    if "instructions" in body:
        made.append({"role": "system", "content": _parts(body["instructions"], "instructions", fields)})
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ApiError(400, f"input must be text or a list of items, got {shown(given)}", "input")
    for i, item in enumerate(few(given, "input")):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "item_reference":
            raise ApiError(400, f"{where} is a reference, which {STORED}", "input", "unsupported_parameter")
        if not isinstance(kind, str) or kind not in ITEMS:
            raise ApiError(400, f"{where} is an item of type {shown(kind)}: it may be {', '.join(ITEMS)}", "input")
        item = fields.of(item, ITEMS[kind], where)
        if kind == "message":
            _add_message(made, item, where, fields)
        elif kind == "function_call_output":
            content = _parts(item.get("output"), f"{where}.output", fields)
            made.append({"role": "tool", "tool_call_id": text_of(item, "call_id", where), "content": content})
        elif kind == "reasoning":
            thoughts = _thoughts(item, where, fields)
            if thoughts:
                made.append({"role": "assistant", "content": [], "reasoning_content": thoughts})
        else:
            _add_call(made, item, where)
    return made


def _add_message(made: list[dict[str, Any]], item: Mapping[str, Any], where: str, fields: Fields) -> None:
    role = one_of(item.get("role"), ("user", "assistant", "system", "developer"), f"{where}.role")
    content = _parts(item.get("content"), f"{where}.content", fields)
    last = made[-1] if made else {}
    if role == "assistant" and last.get("role") == role and not last["content"] and "tool_calls" not in last:
        last["content"] = content  # after its reasoning
    elif role in ("system", "developer") and len(made) == 1 and last["role"] == "system":
        last["content"] += [{"type": "text", "text": ""}, *content]
    else:
        made.append({"role": "system" if role == "developer" else role, "content": content})


def _add_call(made: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    name = text_of(item, "name", where)
    if "namespace" in item:
        name = f"{text_of(item, 'namespace', where)}{BETWEEN}{name}"
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": []})
    function = {"name": name, "arguments": text_of(item, "arguments", where) or "{}"}
    call = {"id": text_of(item, "call_id", where), "type": "function", "function": function}
    made[-1].setdefault("tool_calls", []).append(call)


def _thoughts(item: Mapping[str, Any], where: str, fields: Fields) -> str:
    """Reasoning, or its summary if that is all there is."""
    for name in ("content", "summary"):
        if not empty(item.get(name, [])):
            parts = blocks_of(item[name], f"{where}.{name}", fields, THOUGHTS)
            return "\n".join(text_of(part, "text", f"{where}.{name}") for part in parts)
    return ""


def _parts(content: object, where: str, fields: Fields) -> list[dict[str, Any]]:
    parts = blocks_of(content, where, fields, PARTS)
    return [{"type": "text", "text": text_of(part, "text", where)} for part in parts]


def _tools(
    tools: object, fields: Fields, names: dict[str, tuple[str, str]], ignored: list[str]
) -> list[dict[str, Any]] | None:
    """Functions, those of namespaces with both names in one.

    Args:
        names: gets the namespace and the name of each of the latter.
        ignored: gets tools that only other servers have.
    """
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ApiError(400, f"tools must be a list of {{type: function, name}}, got {json_kind(tools)}", "tools")
    made = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in ELSEWHERE:
            ignored.append(f"tools.{i}")
        elif kind == "namespace":
            tool = fields.of(tool, NAMESPACE, where)
            space, inner = text_of(tool, "name", where), tool.get("tools")
            for j, one in enumerate(inner if isinstance(inner, list) else [None]):
                function = _function(one, f"{where}.tools[{j}]", fields)
                name = f"{space}{BETWEEN}{function['name']}"
                names[name] = space, function["name"]
                made.append({"type": "function", "function": {**function, "name": name}})
        else:
            made.append({"type": "function", "function": _function(tool, where, fields)})
    return made


def _function(tool: object, where: str, fields: Fields) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type", "function") != "function":
        why = f"{where} is a tool of type {shown(tool['type'])}: this server knows functions, which the client calls"
        raise ApiError(400, why, "tools", "unsupported_parameter")
    tool = fields.of(tool, TOOL, where)
    text_of(tool, "name", where)
    return {name: value for name, value in tool.items() if name != "type"}


def _choice(choice: object, fields: Fields) -> object:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind != "function":
        raise wrong(
            f"tool_choice must be auto, none, required or {{type: function, name}}, got {shown(kind)}", "tool_choice"
        )
    choice = fields.of(choice, CHOICE, "tool_choice")
    name = text_of(choice, "name", "tool_choice")
    if "namespace" in choice:
        name = f"{text_of(choice, 'namespace', 'tool_choice')}{BETWEEN}{name}"
    return {"type": "function", "function": {"name": name}}
