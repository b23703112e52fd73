"""The values of requests: checks parsed bodies, and makes settings from them.

Every field is known, refused with a reason, or an error (:mod:`.fields`), so that no option of a client is silently
ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_sparsekv.serving.sampling import Sampling, shown

from . import fields as fields_of
from .errors import ApiError
from .fields import EFFORT, SAMPLING, Fields, must_be
from .formats import Form, form_of
from .messages import messages_of
from .scan import Scan
from .values import all_whole, json_kind, parsed, whole

MAX_N = 128  # answers to a prompt, as OpenAI's API
MAX_PROMPTS = 1024  # prompts of one request
MAX_TOOLS = 128  # as OpenAI's API
UNLIMITED = 1 << 62  # tokens, until the prompt is known
COMPLETION_TOKENS = 16  # default max_tokens of /v1/completions, as OpenAI's


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
        fits: an answer that may be longer than the context has room for is cut there. False: it is refused.
        names: namespace and name of tools whose names are made of both.
        told: what the answer repeats of the request.
        hints: variables of the chat template that it is given if it knows them: the client's field, and variables.
        first_only: only the first call of a tool is told.
        sampling: its settings; ``max_tokens`` only if ``limited``.
        limited: the client has said how long the answer may be.
        n: answers to each prompt.
        ignored: names of fields that are not known, the first of them.
        stream: pieces as they come.
        include_usage: a last piece with the counts of tokens.
        counts_each: each piece has the counts so far.
        form: what answers have to follow; None: they are free, or calls.
        echo: answers begin with their prompts.
        echoed: text and first token of each prompt, once they are known.
        answers_nothing: of an echo; only the prompt is told.
        whole_message: an answer begins a message of its own. False: it goes on with the last one, as it is.
        generation_prompt: the template begins the answer.
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
    first_only: bool = False
    fits: bool = False
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    hints: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    counts_each: bool = False
    form: Form | None = None
    echo: bool = False
    echoed: tuple[tuple[str, int], ...] = ()
    answers_nothing: bool = False
    whole_message: bool = True
    generation_prompt: bool = True

    def sampled(self, prompt_tokens: int, most: int, default: int | None) -> list[Sampling]:
        """Its settings for a prompt of so many tokens, for each of its answers.

        Args:
            most: tokens that prompt and answer may have together.
            default: of the answer if the client has not said; None: what is left.
        """
        sampling = self.sampling
        left = max(1, most - prompt_tokens)
        if self.fits and sampling.max_tokens > left:
            sampling = replace(sampling, max_tokens=left)
        if not self.limited:
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
    fields = Fields(ignore_unknown)
    body = fields.of(body, fields_of.COMPLETION)
    if "prompt" not in body:
        raise ApiError(400, "prompt is missing: give text, token ids, or a list of either", "prompt")
    prompts = _prompts(body["prompt"])
    logprobs = body.get("logprobs")
    logprobs = None if logprobs is False else logprobs
    echo = flag(body, "echo")
    nothing = echo and type(body.get("max_tokens")) is int and body["max_tokens"] == 0
    asked = _common({**body, "max_tokens": 1} if nothing else body, fields, "max_tokens", logprobs)
    if echo and asked.stream:
        raise ApiError(400, "echo goes without stream: the prompt is known", "echo", "unsupported_parameter")
    sampling = replace(asked.sampling, prompt_logprobs=logprobs) if echo else asked.sampling
    asked = replace(asked, prompts=prompts, sampling=sampling, echo=echo, answers_nothing=nothing)
    return replace(asked, ignored=tuple(fields.ignored))


def chat(body: Mapping[str, Any], scan: Scan | None = None, ignore_unknown: bool = False) -> Asked:
    """The body of ``/v1/chat/completions``.

    Args:
        scan: of the body; arguments of tool calls, which are JSON in a string, are counted with it. None: one of them.
        ignore_unknown: leave unknown fields out.

    Raises:
        ApiError: a field is wrong, unknown or refused.
    """
    fields = Fields(ignore_unknown)
    body = fields.of(body, fields_of.CHAT)
    if "messages" not in body:
        raise ApiError(400, "messages is missing: give a list of {role, content}", "messages")
    if "max_tokens" in body and body.get("max_completion_tokens", body["max_tokens"]) != body["max_tokens"]:
        raise ApiError(400, "max_tokens and max_completion_tokens say different things: give one", "max_tokens")
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    messages, template = messages_of(body["messages"], scan or Scan(0), fields), _template(body, fields)
    logprobs, top = flag(body, "logprobs"), body.get("top_logprobs", 0)
    if top and not logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs: true only", "top_logprobs")
    asked = replace(_common(body, fields, limit, top if logprobs else None, "top_logprobs"), messages=messages)
    begins, goes_on = flag(body, "add_generation_prompt", True), flag(body, "continue_final_message")
    if goes_on:
        if body.get("add_generation_prompt"):
            why = "continue_final_message goes without add_generation_prompt: the answer goes on with the last message"
            raise ApiError(400, why, "continue_final_message")
        begins = False
    calls = _calls(body, template.get("tools", ()), fields)
    first_only = calls is None and body.get("parallel_tool_calls") is False
    made = replace(asked, template=template, calls=calls, first_only=first_only, ignored=tuple(fields.ignored))
    return replace(made, generation_prompt=begins, whole_message=not goes_on)


def _common(body: Mapping[str, Any], fields: Fields, limit: str, logprobs: Any, their_name: str = "logprobs") -> Asked:
    given = {name: body[name] for name in SAMPLING if name in body}
    given |= {"logprobs": logprobs, "logit_bias": _biases(body.get("logit_bias", {}))}
    form = form_of(body, fields)
    if form is not None:
        given |= {"json_schema": form.json_schema, "grammar": form.grammar}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # as vLLM: all
    stop = given.get("stop", ())
    if not isinstance(stop, str | list | tuple):
        raise ApiError(400, f"stop must be strings, got {json_kind(stop)}", "stop")
    all_whole(stop, "stop")
    given["max_tokens"] = body.get(limit, UNLIMITED)
    try:
        sampling = Sampling(**given)
    except (ValueError, TypeError) as error:
        name = str(error).split(maxsplit=1)[0]
        names = {"max_tokens": limit, "logprobs": their_name}
        if form is not None:
            names |= dict.fromkeys(("json_schema", "grammar"), form.field)
        field = names.get(name, name)
        raise ApiError(400, str(error).replace(name, field, 1), field) from None
    n = body.get("n", 1)
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_N:
        raise ApiError(400, f"n must be an integer from 1 to {MAX_N}, got {shown(n)}", "n")
    options = fields.of(body.get("stream_options", {}), fields_of.STREAM_OPTIONS, "stream_options")
    stream = flag(body, "stream")
    if options and not stream:
        raise ApiError(400, "stream_options goes with stream: true only", "stream_options")
    asked = Asked(None, None, {}, None, sampling, limit in body, n, stream, flag(options, "include_usage"))
    return replace(asked, counts_each=flag(options, "continuous_usage_stats"), form=form)


def _calls(body: Mapping[str, Any], tools: Sequence[dict[str, Any]], fields: Fields) -> Calls | None:
    """The calls that ``tool_choice`` asks for."""
    choice, several = body.get("tool_choice", "auto"), body.get("parallel_tool_calls", True)
    if not isinstance(several, bool):
        raise ApiError(
            400, f"parallel_tool_calls must be true or false, got {json_kind(several)}", "parallel_tool_calls"
        )
    if choice in ("auto", "none"):
        return None
    names = tuple(one["function"]["name"] for one in tools)
    if choice == "required":
        if not names:
            raise ApiError(400, "tool_choice is required, and there are no tools", "tool_choice")
        return Calls(names, several)
    wrong = must_be("auto, none, required or {type: function, function: {name}}", choice, "tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise wrong
    choice = fields.of(choice, fields_of.TOOL_CHOICE, "tool_choice")
    if not isinstance(choice.get("function"), dict):
        raise wrong
    name = fields.of(choice["function"], fields_of.CHOSEN, "tool_choice.function").get("name")
    if not isinstance(name, str):
        raise wrong
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


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false, got {json_kind(value)}", name)
    return value


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


def _template(body: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
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
    tools = [_tool(tool, f"tools[{i}]", fields) for i, tool in enumerate(tools)]
    all_whole(tools, "tools")
    return {**given, "tools": tools}


def _tool(tool: object, where: str, fields: Fields) -> dict[str, Any]:
    named = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        raise must_be("a list of {type: function, function: {name, ...}}", tool, "tools")
    tool = fields.of(tool, fields_of.TOOL, where)
    if tool.get("type", "function") != "function":
        raise ApiError(400, f"{where}.type must be function, got {shown(tool['type'])}", "tools")
    function = fields.of(named, fields_of.FUNCTION, f"{where}.function")
    parameters = function.get("parameters", True)
    if not isinstance(parameters, dict) and parameters is not True:
        why = f"{where}.function.parameters must be a JSON schema, an object, got {json_kind(parameters)}"
        raise ApiError(400, why, "tools")
    return {**tool, "function": function}
