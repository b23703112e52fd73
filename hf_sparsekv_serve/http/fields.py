"""The objects of a body and the fields that each may have: known, refused with a reason, or an error by name.

:mod:`.schema` makes settings of the other fields. ``null`` is the same as a missing field.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_sparsekv.serving.sampling import shown

from .errors import ApiError
from .values import empty, json_kind

MAX_NAME = 64  # characters of a field's name that may be a misspelt one, or that a header names
MOST_TOLD = 16  # names of ignored fields: they are kept until the answer


class Refused(NamedTuple):
    """A field that changes nothing with some values, and is refused with others."""

    neutral: Callable[[Any], bool]
    why: str


@dataclass(frozen=True)
class Kind:
    """A kind of object in a body.

    Attributes:
        known: fields whose values are looked at, or that mean nothing here whatever they are.
        refused: fields that are refused unless their value changes nothing.
        instead: fields of other servers, and what to do instead.
    """

    known: frozenset[str]
    refused: Mapping[str, Refused] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)


def zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def one(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 1


def false(value: object) -> bool:
    return value is False


# ---------------------------------------------------------------------- the body itself

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "stop", "ignore_eos", "exact"),
)
# User, purpose and prefix hints: accepted, and not used. Nothing is kept, whatever `store` says.
LABELS = {"user", "safety_identifier", "metadata", "prompt_cache_key", "store"}
BOTH = {"model", "max_tokens", "stream", "stream_options", "n", "logit_bias", "logprobs", "response_format"}
BOTH |= {*LABELS, *SAMPLING}
EFFORT = "reasoning_effort"  # a variable of some templates
REFUSED = {
    "best_of": Refused(one, "is not there: give n, and choose among the answers"),
    "echo": Refused(false, "is not there: the answer is what follows the prompt"),
    "top_logprobs": Refused(zero, "is of chats: give logprobs, how many"),  # of completions
    "suffix": Refused(empty, "is not there: text is continued, not filled in"),
    "functions": Refused(empty, "are not there: give tools"),
    "function_call": Refused(lambda value: value == "none", "is not there: give tools"),
    "modalities": Refused(lambda value: value == ["text"], "other than text are not there"),
    "service_tier": Refused(lambda value: value in ("auto", "default"), "is not there: requests are all alike"),
    # vLLM's, which clients of its server send as they are by themselves.
    "min_tokens": Refused(zero, "is not there: ignore_eos and max_tokens make answers of a known length"),
    "stop_token_ids": Refused(empty, "is not there: give their texts in stop"),
    "skip_special_tokens": Refused(lambda value: value is True, "cannot be turned off: text has no special tokens"),
    "include_stop_str_in_output": Refused(false, "is not there: the text ends before the stop string"),
    "use_beam_search": Refused(false, "is not there: a request gives one answer"),
}
# Fields of other servers and of OpenAI's newer models, which are not known here, and what to do instead.
INSTEAD = {
    "reasoning": f"give {EFFORT}",
    "enable_thinking": 'give chat_template_kwargs, as {"enable_thinking": false}',
    "thinking": 'give chat_template_kwargs, as {"thinking": false}',
    "verbosity": "say in the prompt how long the answer should be",
}
COMPLETION = Kind(frozenset(BOTH | {"prompt"}), REFUSED)
CHAT = Kind(
    frozenset(
        BOTH
        | {"messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs"}
        | {"chat_template_kwargs", EFFORT}
    ),
    REFUSED,
    INSTEAD,
)

# ---------------------------------------------------------------------- objects in it


def _kind(*known: str, **refused: Refused) -> Kind:
    return Kind(frozenset(known), refused)


STREAM_OPTIONS = _kind(
    "include_usage",
    # OpenAI's padding, and vLLM's counts in each chunk.
    include_obfuscation=Refused(false, "is not there: chunks are as long as their text"),
    continuous_usage_stats=Refused(false, "is not there: include_usage counts at the end"),
)
FORMATS = {  # by the type of a response_format; the schema of a json_object is llama.cpp's
    "text": _kind("type"),
    "json_object": _kind("type", "schema"),
    "json_schema": _kind("type", "json_schema"),
}
JSON_SCHEMA = _kind("name", "description", "schema", "strict")
TOOL = _kind("type", "function")
# Templates get these; `return` is of transformers' own get_json_schema(). Arguments follow their schema, strict or not.
FUNCTION = _kind("name", "description", "parameters", "strict", "return")
TOOL_CHOICE = _kind("type", "function")
CHOSEN = _kind("name")
# Tool calls of an answer, which clients send back; streamed ones have an `index`.
TOOL_CALL = _kind("id", "type", "function", "index")
CALLED = _kind("name", "arguments")


class Fields:
    """Checks the objects of one body.

    Args:
        ignore_unknown: leave unknown fields out. False: refuse them.

    Attributes:
        ignored: fields that were left out, as ``tools.0.function.examples``: the first ``MOST_TOLD`` of them.
    """

    def __init__(self, ignore_unknown: bool = False) -> None:
        self._ignore_unknown = ignore_unknown
        self.ignored: list[str] = []

    def of(self, value: object, kind: Kind, where: str = "", empty_too: bool = False) -> dict[str, Any]:
        """An object's known fields that are not null.

        Args:
            where: the way to the object, as ``tools[0].function``; empty: it is the body.
            empty_too: unknown fields whose values are empty are left out without a word.

        Raises:
            ApiError: it is no object; a field is unknown or refused.
        """
        field = where.partition(".")[0].partition("[")[0]  # which clients are told
        if not isinstance(value, dict):
            message = f"{where} must be an object with {', '.join(sorted(kind.known))}, got {json_kind(value)}"
            raise ApiError(400, message, field)
        found = {}
        for name, given in value.items():
            if given is None or (empty_too and name not in kind.known and empty(given)):
                continue
            if name in kind.known:
                found[name] = given
            elif name in kind.refused:
                if not kind.refused[name].neutral(given):
                    message = f"{where}{'.' * bool(where)}{name} {kind.refused[name].why}"
                    raise ApiError(400, message, field or name, "unsupported_parameter")
            elif self._ignore_unknown:
                if len(self.ignored) == MOST_TOLD:
                    continue
                way = where.replace("[", ".").replace("]", "")  # as a header may have it
                self.ignored.append(f"{way}{'.' * bool(where)}{name[:MAX_NAME]}")
            else:
                self._unknown(name, kind, where, field)
        return found

    @staticmethod
    def _unknown(name: str, kind: Kind, where: str, field: str) -> None:
        near = difflib.get_close_matches(name, kind.known | kind.refused.keys(), n=1) if len(name) <= MAX_NAME else []
        if name in kind.instead:
            hint = kind.instead[name]
        else:
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(kind.known))}"
        what = f"{name[:80]!r} is no field of {where or 'this endpoint'}: {hint}"
        raise ApiError(400, what, field or name[:80], "unknown_parameter")


def must_be(what: str, given: object, field: str) -> ApiError:
    """The error for a value that is none of those that a field may have."""
    return ApiError(400, f"{field} must be {what}, got {shown(given)}", field)
