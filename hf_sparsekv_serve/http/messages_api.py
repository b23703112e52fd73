"""Bodies of Anthropic's ``/v1/messages``, as bodies of chat completions.

Field by field: https://docs.anthropic.com/en/api/messages, and the types of its SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_sparsekv.serving.sampling import shown

from . import schema
from .errors import ApiError
from .fields import EFFORT, Fields, Kind, Refused, false
from .scan import Scan
from .translated import Hint, asked_of, blocks_of, few, flag, one_of, text_of, thinks, wrong
from .values import empty, json_kind

NAMES = {"stop": "stop_sequences", "response_format": "output_config", "parallel_tool_calls": "tool_choice"}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
LABELS = {"metadata", "cache_control"}  # nothing is kept, and prompts are cached by themselves
_TOOLS = "messages", "model", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control"
_REFUSED = {
    "container": Refused(empty, "is not there: this server runs no code"),
    "inference_geo": Refused(empty, "is not there: this server is where it is"),
    "mcp_servers": Refused(empty, "are not there: the client calls tools"),
    "service_tier": Refused(lambda value: value in ("auto", "standard_only"), "is not there: requests are all alike"),
    "speed": Refused(lambda value: value == "standard", "is not there: requests are all alike"),
}
COUNTED = Kind(frozenset({*_TOOLS, "context_management"}), _REFUSED)
MESSAGES = Kind(
    COUNTED.known | LABELS | {"max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k"},
    _REFUSED,
)
MESSAGE = Kind(frozenset({"role", "content"}))
_NEUTRAL = {"citations": Refused(empty, "are not there: give text")}
_LABELLED = frozenset({"type", "cache_control"})
_DIRECT = Refused(lambda value: value == {"type": "direct"}, "is not there: the model itself calls tools")
TEXT = Kind(_LABELLED | {"text"}, _NEUTRAL)
THINKING = Kind(frozenset({"type", "thinking", "signature"}))
TOOL_USE = Kind(_LABELLED | {"id", "name", "input"}, {"caller": _DIRECT})
TOOL_RESULT = Kind(_LABELLED | {"tool_use_id", "content", "is_error"})
OF_USER = {"text": TEXT, "tool_result": TOOL_RESULT}
OF_ASSISTANT = {"text": TEXT, "thinking": THINKING, "tool_use": TOOL_USE}
TOOL = Kind(
    _LABELLED | {"name", "description", "input_schema", "strict", "eager_input_streaming"},
    {
        "allowed_callers": Refused(lambda value: value == ["direct"], "is not there: the model itself calls tools"),
        "defer_loading": Refused(false, "is not there: the model is shown all tools"),
        "input_examples": Refused(empty, "are not there: say them in the description"),
    },
)
CHOICE = Kind(frozenset({"type", "name", "disable_parallel_tool_use"}))
CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}
THOUGHT = Kind(frozenset({"type", "budget_tokens", "display"}))
OUTPUT = Kind(frozenset({"effort", "format"}))
FORMAT = Kind(frozenset({"type", "schema"}))
SYSTEM = {"text": TEXT}
# What the system says in a conversation, as Claude Code shows it where it may not: most templates know it first only.
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
FAILED = "Error: "  # before what a tool said that has failed: chat templates have no field for that


def messages(body: Mapping[str, Any], scan: Scan | None = None, ignore_unknown: bool = False) -> schema.Asked:
    """The body of ``/v1/messages``; see :func:`.schema.chat`."""
    return _asked(body, MESSAGES, scan, ignore_unknown)


def counted(body: Mapping[str, Any], scan: Scan | None = None, ignore_unknown: bool = False) -> schema.Asked:
    """The body of ``/v1/messages/count_tokens``."""
    return _asked(body, COUNTED, scan, ignore_unknown)


def _asked(body: Mapping[str, Any], kind: Kind, scan: Scan | None, ignore_unknown: bool) -> schema.Asked:
    fields = Fields(ignore_unknown)
    body = fields.of(body, kind)
    if "messages" not in body:
        raise ApiError(400, "messages is missing: give a list of {role, content}", "messages")
    same = ("max_tokens", "stream", "temperature", "top_p", "top_k")
    chat: dict[str, Any] = {name: body[name] for name in same if name in body}
    chat |= {"stop": body.get("stop_sequences"), "messages": _messages(body, fields)}
    if isinstance(chat["messages"], list) and chat["messages"] and chat["messages"][-1]["role"] == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat["tools"] = _tools(body.get("tools"), fields)
    chat |= _choice(body.get("tool_choice"), fields)
    hints, ignored = [], ["context_management"] * ("context_management" in body)
    if "thinking" in body:
        thought = fields.of(body["thinking"], THOUGHT, "thinking")
        how = one_of(thought.get("type"), ("enabled", "disabled", "adaptive"), "thinking.type")
        hints.append(Hint("thinking", thinks(how != "disabled")))
        ignored += ["thinking.budget_tokens"] * ("budget_tokens" in thought)
    output = fields.of(body.get("output_config", {}), OUTPUT, "output_config")
    if "effort" in output:
        effort = EFFORTS[one_of(output["effort"], EFFORTS, "output_config.effort")]
        hints.append(Hint("output_config.effort", {EFFORT: effort}))
    if "format" in output:
        form = fields.of(output["format"], FORMAT, "output_config.format")
        one_of(form.get("type"), ("json_schema",), "output_config.format.type")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return replace(asked_of(chat, NAMES, scan, fields, hints, ignored), fits=True)


def _messages(body: Mapping[str, Any], fields: Fields) -> object:
    given = body["messages"]
    if not isinstance(given, list) or not given:
        return given  # which is an error there
    made = []
    if "system" in body:
        made.append({"role": "system", "content": _texts(body["system"], "system", fields)})
    for i, message in enumerate(few(given, "messages")):
        where = f"messages[{i}]"
        message = fields.of(message, MESSAGE, where)
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{where}.role must be one of user, assistant, got {shown(role)}", where)
        content = message.get("content")
        if role == "system" and not made:
            made.append({"role": role, "content": _texts(content, f"{where}.content", fields)})
        elif role == "system":
            said = "\n".join(one["text"] for one in _texts(content, f"{where}.content", fields))
            _add(made, [{"role": "user", "content": [{"type": "text", "text": REMINDER.format(said)}]}])
        elif role == "user":
            _add(made, _of_user(content, f"{where}.content", fields))
        else:
            made.append(_of_assistant(content, f"{where}.content", fields))
    if made[-1]["role"] == "assistant" and made[-1].keys() & {"tool_calls", "reasoning_content"}:
        why = "messages ends with a call or thinking of the assistant, which an answer cannot continue: end with text"
        raise ApiError(400, why, "messages")
    return made


def _add(made: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    """Add messages. One of the user after another of hers goes on with it."""
    if made and made[-1]["role"] == messages[0]["role"] == "user":
        made[-1]["content"] += messages.pop(0)["content"]
    made += messages


def _texts(content: object, where: str, fields: Fields) -> list[dict[str, Any]]:
    parts = blocks_of(content, where, fields, SYSTEM)
    return [{"type": "text", "text": text_of(part, "text", where)} for part in parts]


def _of_user(content: object, where: str, fields: Fields) -> list[dict[str, Any]]:
    """Text, and results of tools, which are messages of their own."""
    made: list[dict[str, Any]] = []
    for part in blocks_of(content, where, fields, OF_USER):
        if part["type"] == "tool_result":
            found = _texts(part.get("content", ""), f"{where}.content", fields)
            if flag(part, "is_error", f"{where}."):
                found[:0] = [{"type": "text", "text": FAILED.strip()}]
            made.append({"role": "tool", "tool_call_id": text_of(part, "tool_use_id", where), "content": found})
            continue
        if not made or made[-1]["role"] != "user":
            made.append({"role": "user", "content": []})
        made[-1]["content"].append({"type": "text", "text": text_of(part, "text", where)})
    return made or [{"role": "user", "content": []}]


def _of_assistant(content: object, where: str, fields: Fields) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for part in blocks_of(content, where, fields, OF_ASSISTANT):
        if part["type"] == "text":
            texts.append({"type": "text", "text": text_of(part, "text", where)})
        elif part["type"] == "thinking":
            thoughts.append(text_of(part, "thinking", where))
        else:
            given = part.get("input", {})
            if not isinstance(given, dict):
                raise wrong(f"{where}: input of a tool_use must be an object, got {json_kind(given)}", where)
            function = {"name": text_of(part, "name", where), "arguments": given}
            calls.append({"id": text_of(part, "id", where), "type": "function", "function": function})
    made: dict[str, Any] = {"role": "assistant", "content": texts}
    made |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return made | ({"tool_calls": calls} if calls else {})


def _tools(tools: object, fields: Fields) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ApiError(400, f"tools must be a list of {{name, input_schema}}, got {json_kind(tools)}", "tools")
    made = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            why = (
                f"{where} is a tool of type {shown(kind)}, which this server does not run: it knows {{name, ...}} only"
            )
            raise ApiError(400, why, "tools", "unsupported_parameter")
        tool = fields.of(tool, TOOL, where)
        flag(tool, "eager_input_streaming", f"{where}.")  # arguments always come as they are written
        function = {"name": text_of(tool, "name", where), "parameters": tool.get("input_schema")}
        function |= {name: tool[name] for name in ("description", "strict") if name in tool}
        made.append({"type": "function", "function": function})
    return made


def _choice(choice: object, fields: Fields) -> dict[str, Any]:
    if choice is None:
        return {}
    choice = fields.of(choice, CHOICE, "tool_choice")
    kind = CHOICES[one_of(choice.get("type"), CHOICES, "tool_choice.type")]
    made: dict[str, Any] = {}
    if kind == "tool":
        name = text_of(choice, "name", "tool_choice")
        made["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        made["tool_choice"] = kind
    if flag(choice, "disable_parallel_tool_use", "tool_choice."):
        made["parallel_tool_calls"] = False
    return made
