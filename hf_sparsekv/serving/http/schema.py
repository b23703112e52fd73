"""The fields of requests: checks parsed bodies, and makes settings from them.

Every field is known, refused with a reason, or an error, so that no option of a client is silently ignored. ``null`` is
the same as a missing field.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..sampling import Sampling, shown
from .errors import ApiError
from .messages import messages_of
from .scan import Scan
from .values import all_whole, empty, json_kind, parsed, whole

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "stop", "ignore_eos", "exact"),
)
# User, purpose and prefix hints: accepted, and not used. Nothing is kept, whatever `store` says.
LABELS = {"user", "safety_identifier", "metadata", "prompt_cache_key", "store"}
BOTH = {"model", "max_tokens", "stream", "stream_options", "n", "logit_bias", "logprobs", "response_format"}
BOTH |= {*LABELS, *SAMPLING}
COMPLETION = BOTH | {"prompt"}
CHAT = BOTH | {"messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs"}
EFFORT = "reasoning_effort"  # a variable of some templates
CHAT |= {"chat_template_kwargs", EFFORT}
# Fields of other servers and of OpenAI's newer models, which are not known here, and what to do instead.
INSTEAD = {
    "reasoning": f"give {EFFORT}",
    "enable_thinking": 'give chat_template_kwargs, as {"enable_thinking": false}',
    "thinking": 'give chat_template_kwargs, as {"thinking": false}',
    "verbosity": "say in the prompt how long the answer should be",
}
MAX_N = 128  # answers to a prompt, as OpenAI's API
MAX_PROMPTS = 1024  # prompts of one request
MAX_TOOLS = 128  # as OpenAI's API
MAX_NAME = 64  # characters of a field's name that may be a misspelt one, or that is told to be ignored
MOST_TOLD = 16  # names of ignored fields: they are kept until the answer
COMPLETION_TOKENS = 16  # default max_tokens of /v1/completions, as OpenAI's


class Refused(NamedTuple):
    """A field of OpenAI's that changes nothing with some values, and is refused with others."""

    neutral: Callable[[Any], bool]
    why: str


def _zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _one(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 1


def _false(value: object) -> bool:
    return value is False


REFUSED = {
    "best_of": Refused(_one, "is not there: give n, and choose among the answers"),
    "echo": Refused(_false, "is not there: the answer is what follows the prompt"),
    "top_logprobs": Refused(_zero, "is of chats: give logprobs, how many"),  # of completions
    "suffix": Refused(empty, "is not there: text is continued, not filled in"),
    "functions": Refused(empty, "are not there: give tools"),
    "function_call": Refused(lambda value: value == "none", "is not there: give tools"),
    "modalities": Refused(lambda value: value == ["text"], "other than text are not there"),
    "service_tier": Refused(lambda value: value in ("auto", "default"), "is not there: requests are all alike"),
    # vLLM's, which clients of its server send as they are by themselves.
    "min_tokens": Refused(_zero, "is not there: ignore_eos and max_tokens make answers of a known length"),
    "stop_token_ids": Refused(empty, "is not there: give their texts in stop"),
    "skip_special_tokens": Refused(lambda value: value is True, "cannot be turned off: text has no special tokens"),
    "include_stop_str_in_output": Refused(_false, "is not there: the text ends before the stop string"),
    "use_beam_search": Refused(_false, "is not there: a request gives one answer"),
}
# Fields of stream_options besides include_usage: OpenAI's padding and vLLM's counts in each chunk.
STREAM_REFUSED = {
    "include_obfuscation": Refused(_false, "is not there: chunks are as long as their text"),
    "continuous_usage_stats": Refused(_false, "is not there: include_usage counts at the end"),
}


class Calls(NamedTuple):
    """Calls of tools that an answer must consist of: of one of the named tools each, one or several."""

    names: tuple[str, ...]
    several: bool


@dataclass(frozen=True)
class Asked:
    """A request of a client.

    Attributes:
        prompts: texts or token ids, one answer each; of a conversation None.
        messages: of a conversation, as chat templates take them.
        template: further arguments of the chat template.
        calls: of its tools that the answer must consist of; None: the model decides.
        sampling: its settings; ``max_tokens`` only if ``limited``.
        limited: the client has said how long the answer may be.
        n: answers to each prompt.
        ignored: names of fields that are not known, the first of them.
        stream: pieces as they come.
        include_usage: a last piece with the counts of tokens.
    """

    prompts: tuple[str | list[int], ...] | None
    messages: list[dict[str, Any]] | None
    template: dict[str, Any] = field(default_factory=dict)
    calls: Calls | None = None
    sampling: Sampling = field(default_factory=Sampling)
    limited: bool = False
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()

    def sampled(self, prompt_tokens: int, most: int, default: int | None) -> list[Sampling]:
        """Its settings for a prompt of so many tokens, for each of its answers.

        Args:
            most: tokens that prompt and answer may have together.
            default: of the answer if the client has not said; None: what is left.
        """
        sampling = self.sampling
        if not self.limited:
            left = max(1, most - prompt_tokens)
            sampling = replace(sampling, max_tokens=left if default is None else min(left, default))
        if sampling.seed is None:
            return [sampling] * self.n
        # The first answer is that of a request for one; the others are drawn by seeds of their own.
        return [replace(sampling, seed=_signed(sampling.seed + which)) for which in range(self.n)]


def _signed(seed: int) -> int:
    """In 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


def loads(body: bytes) -> dict[str, Any]:
    """A body's JSON object, without fields that are null. It has been looked at by a :class:`.Scan`.

    Raises:
        ApiError: it is none.
    """
    try:
        value = parsed(body.decode())  # never UTF-16, which json.loads() takes and a scan of bytes does not see through
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:  # no JSON, no UTF-8, an integer of thousands of digits
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {json_kind(value)}")
    return {name: one for name, one in value.items() if one is not None}


def check_model(body: Mapping[str, Any], served: str) -> None:
    """404 unless it asks for the model that is served, or for none."""
    asked = body.get("model", served)
    if not isinstance(asked, str):
        raise ApiError(400, f"model must be a string, got {json_kind(asked)}", "model")
    if asked != served:
        raise ApiError(
            404, f"there is no model {shown(asked)} here: this server has {served!r}", "model", "model_not_found"
        )


def completion(body: Mapping[str, Any], scan: Scan | None = None, ignore_unknown: bool = False) -> Asked:
    """The body of ``/v1/completions``; ``scan`` is not needed.

    Args:
        ignore_unknown: leave unknown fields out.

    Raises:
        ApiError: a field is wrong, unknown or refused.
    """
    ignored = _check_fields(body, COMPLETION, ignore_unknown)
    if "prompt" not in body:
        raise ApiError(400, "prompt is missing: give text, token ids, or a list of either", "prompt")
    prompts = _prompts(body["prompt"])
    logprobs = body.get("logprobs")
    asked = _common(body, "max_tokens", None if logprobs is False else logprobs)
    return replace(asked, prompts=prompts, ignored=ignored)


def chat(body: Mapping[str, Any], scan: Scan | None = None, ignore_unknown: bool = False) -> Asked:
    """The body of ``/v1/chat/completions``.

    Args:
        scan: of the body; arguments of tool calls, which are JSON in a string, are counted with it. None: one of them.
        ignore_unknown: leave unknown fields out.

    Raises:
        ApiError: a field is wrong, unknown or refused.
    """
    ignored = _check_fields(body, CHAT, ignore_unknown)
    if "messages" not in body:
        raise ApiError(400, "messages is missing: give a list of {role, content}", "messages")
    if "max_tokens" in body and body.get("max_completion_tokens", body["max_tokens"]) != body["max_tokens"]:
        raise ApiError(400, "max_tokens and max_completion_tokens say different things: give one", "max_tokens")
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    messages, template = messages_of(body["messages"], scan or Scan(0)), _template(body)
    logprobs, top = _flag(body, "logprobs"), body.get("top_logprobs", 0)
    if top and not logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs: true only", "top_logprobs")
    asked = replace(_common(body, limit, top if logprobs else None, "top_logprobs"), messages=messages)
    if "tools" in template and asked.sampling.json_schema is not None:
        raise ApiError(
            400,
            "response_format and tools do not go together here: leave one out, or give tool_choice none",
            "response_format",
            "unsupported_parameter",
        )
    return replace(asked, template=template, calls=_calls(body, template.get("tools", ())), ignored=ignored)


def _common(body: Mapping[str, Any], limit: str, logprobs: Any, their_name: str = "logprobs") -> Asked:
    given = {name: body[name] for name in SAMPLING if name in body}
    given |= {"logprobs": logprobs, "logit_bias": _biases(body.get("logit_bias", {}))}
    given["json_schema"] = _json_schema(body.get("response_format", {"type": "text"}))
    if given.get("top_k") == -1:
        given["top_k"] = 0  # as vLLM: all
    stop = given.get("stop", ())
    if not isinstance(stop, str | list | tuple):
        raise ApiError(400, f"stop must be strings, got {json_kind(stop)}", "stop")
    all_whole(stop, "stop")
    if limit in body:
        given["max_tokens"] = body[limit]
    try:
        sampling = Sampling(**given)
    except (ValueError, TypeError) as error:
        name = str(error).split(maxsplit=1)[0]
        field = {"max_tokens": limit, "logprobs": their_name, "json_schema": "response_format"}.get(name, name)
        raise ApiError(400, str(error).replace(name, field, 1), field) from None
    n = body.get("n", 1)
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_N:
        raise ApiError(400, f"n must be an integer from 1 to {MAX_N}, got {shown(n)}", "n")
    options = body.get("stream_options", {})
    stream = _flag(body, "stream")
    if not isinstance(options, dict) or options.keys() - {"include_usage", *STREAM_REFUSED}:
        raise ApiError(
            400, f"stream_options must be an object with include_usage, got {shown(options)}", "stream_options"
        )
    for name, refused in STREAM_REFUSED.items():
        if not refused.neutral(options.get(name) or False):
            raise ApiError(400, f"stream_options.{name} {refused.why}", "stream_options", "unsupported_parameter")
    if options and not stream:
        raise ApiError(400, "stream_options goes with stream: true only", "stream_options")
    return Asked(None, None, {}, None, sampling, limit in body, n, stream, _flag(options, "include_usage"))


def _json_schema(form: Any) -> dict[str, Any] | None:
    """The schema of ``response_format``; None: any text."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = form.get("json_schema") if kind == "json_schema" else None
    found = named.get("schema", {"type": "object"}) if isinstance(named, dict) else None
    if not isinstance(found, dict):
        what = "{type: text}, {type: json_object} or {type: json_schema, json_schema: {name, schema}}"
        raise ApiError(400, f"response_format must be {what}, got {shown(form)}", "response_format")
    all_whole(found, "response_format")
    return found


def _calls(body: Mapping[str, Any], tools: Sequence[dict[str, Any]]) -> Calls | None:
    """The calls that ``tool_choice`` asks for."""
    choice, several = body.get("tool_choice", "auto"), body.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise ApiError(
            400, f"parallel_tool_calls must be true or false, got {json_kind(several)}", "parallel_tool_calls"
        )
    if choice in ("auto", "none"):
        if not several and tools:
            message = "parallel_tool_calls cannot be turned off where the model decides: give tool_choice required"
            raise ApiError(400, message, "parallel_tool_calls", "unsupported_parameter")
        return None
    names = tuple(one["function"]["name"] for one in tools)
    if choice == "required":
        if not names:
            raise ApiError(400, "tool_choice is required, and there are no tools", "tool_choice")
        return Calls(names, several)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        what = "auto, none, required or {type: function, function: {name}}"
        raise ApiError(400, f"tool_choice must be {what}, got {shown(choice)}", "tool_choice")
    if name not in names:
        raise ApiError(400, f"tool_choice names {shown(name)}, which is not among the tools", "tool_choice")
    return Calls((name,), False)


def _biases(given: object) -> dict[int, Any]:
    """``logit_bias`` by numbers of tokens, where JSON has texts."""
    if not isinstance(given, dict):
        raise ApiError(400, f"logit_bias must be an object, got {json_kind(given)}", "logit_bias")
    found: dict[int, Any] = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 12):
            raise ApiError(400, f"logit_bias must have token ids, got {shown(token)}", "logit_bias")
        if int(token) in found:  # "1" and "01"
            raise ApiError(400, f"logit_bias has token {int(token)} twice", "logit_bias")
        found[int(token)] = bias
    return found


def _check_fields(body: Mapping[str, Any], known: set[str], ignore_unknown: bool) -> tuple[str, ...]:
    """The names of fields that are not known, if these are ignored; an error otherwise, and for refused ones."""
    ignored = []
    for name, value in body.items():
        if name in known:
            continue
        if name in REFUSED:
            if not REFUSED[name].neutral(value):
                raise ApiError(400, f"{name} {REFUSED[name].why}", name, "unsupported_parameter")
        elif ignore_unknown:
            ignored += [name[:MAX_NAME]] * (len(ignored) < MOST_TOLD)
        else:
            names = known | REFUSED.keys()
            near = difflib.get_close_matches(name, names, n=1) if len(name) <= MAX_NAME else []
            if name in INSTEAD and EFFORT in known:  # of chats
                hint = f": {INSTEAD[name]}"
            else:
                hint = f": did you mean {near[0]}?" if near else f": it has {', '.join(sorted(known))}"
            raise ApiError(400, f"{name[:80]!r} is no field of this endpoint{hint}", name[:80], "unknown_parameter")
    return tuple(ignored)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise ApiError(400, f"{name} must be true or false, got {json_kind(value)}", name)
    return bool(value)


def _prompts(prompt: object) -> tuple[str | list[int], ...]:
    wrong = ApiError(400, "prompt must be text, a list of token ids, or a list of texts or of such lists", "prompt")
    if isinstance(prompt, str):
        prompts = [prompt]
    elif not isinstance(prompt, list):
        raise wrong
    elif prompt and all(type(one) is int for one in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"prompt has {len(prompts):,} prompts: one request may have {MAX_PROMPTS:,}", "prompt")
    if not prompts or not all(one or not isinstance(one, str | list) for one in prompts):
        raise ApiError(400, "prompt is empty: an answer needs something to follow", "prompt")
    for one in prompts:
        if isinstance(one, str):
            whole(one, "prompt")
        elif not isinstance(one, list) or not all(type(token) is int for token in one):
            raise wrong
    if len({type(one) for one in prompts}) > 1:
        raise wrong
    return tuple(prompts)


def _template(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the chat template: tools, and what the template itself knows."""
    given = body.get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise ApiError(400, f"chat_template_kwargs must be an object, got {json_kind(given)}", "chat_template_kwargs")
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name, value in given.items():
        # Not another template, which would be a program, nor other ways to tokenise.
        if name in own or name == "messages" or not isinstance(value, str | int | float | bool | None):
            raise ApiError(
                400,
                f"chat_template_kwargs: {shown(name)} is no variable of a template with a plain value",
                "chat_template_kwargs",
            )
    all_whole(given, "chat_template_kwargs")
    if EFFORT in body:
        effort = body[EFFORT]
        if not isinstance(effort, str):
            raise ApiError(400, f"{EFFORT} must be text, as low, medium or high, got {json_kind(effort)}", EFFORT)
        all_whole(effort, EFFORT)
        if given.get(EFFORT, effort) != effort:
            raise ApiError(400, f"{EFFORT} and chat_template_kwargs say different things: give one", EFFORT)
        given = {**given, EFFORT: effort}
    tools = body.get("tools")
    if not tools or body.get("tool_choice") == "none":
        return given
    tools = tools if isinstance(tools, list) else [None]
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"tools has {len(tools):,}: a request may have {MAX_TOOLS}", "tools")
    functions = [one.get("function") if isinstance(one, dict) else None for one in tools]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in functions):
        raise ApiError(400, "tools must be a list of {type: function, function: {name, ...}}", "tools")
    all_whole(tools, "tools")
    return {**given, "tools": tools}
