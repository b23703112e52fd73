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


def is_text(value: object) -> bool:
    return isinstance(value, str)


def never(value: object) -> bool:
    return False


# ---------------------------------------------------------------------- the body itself

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "exact"),
)
# User, purpose and prefix hints: accepted, and not used. Nothing is kept, whatever `store` says.
LABELS = {"user", "safety_identifier", "metadata", "prompt_cache_key", "store"}
BOTH = {"model", "max_tokens", "stream", "stream_options", "n", "logit_bias", "logprobs", "response_format"}
BOTH |= {*LABELS, *SAMPLING, "structured_outputs"}
BOTH |= {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}  # vLLM's older names
EFFORT = "reasoning_effort"  # a variable of some templates
REFUSED = {
    "best_of": Refused(one, "is not there: give n, and choose among the answers"),
    "top_logprobs": Refused(zero, "is of chats: give logprobs, how many"),  # of completions
    "suffix": Refused(empty, "is not there: text is continued, not filled in"),
    "functions": Refused(empty, "are not there: give tools"),
    "function_call": Refused(lambda value: value == "none", "is not there: give tools"),
    "modalities": Refused(lambda value: value == ["text"], "other than text are not there"),
    "service_tier": Refused(lambda value: value in ("auto", "default"), "is not there: requests are all alike"),
    # vLLM's, which clients of its server send as they are by themselves.
    "guided_decoding_backend": Refused(is_text, "must be a name; llguidance follows them all here"),
    "guided_whitespace_pattern": Refused(never, "is not there: give a regex or a grammar"),
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
# SGLang's and llama.cpp's.
INSTEAD_OF_BOTH = {
    "regex": 'give structured_outputs, as {"regex": ...}',
    "choice": 'give structured_outputs, as {"choice": [...]}',
    "ebnf": 'give structured_outputs, as {"grammar": ...}',
    "grammar": 'give structured_outputs, as {"grammar": ...}',
    "json_schema": 'give response_format, or structured_outputs as {"json": ...}',
    "n_predict": "give max_tokens",
    "repeat_penalty": "give repetition_penalty",
}
COMPLETION = Kind(frozenset(BOTH | {"prompt", "echo"}), REFUSED, INSTEAD_OF_BOTH)
CHAT = Kind(
    frozenset(
        BOTH
        | {"messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs"}
        | {"chat_template_kwargs", EFFORT, "add_generation_prompt", "continue_final_message"}
    ),
    {**REFUSED, "echo": Refused(false, "is of completions: the answer is what follows the messages")},
    {**INSTEAD_OF_BOTH, **INSTEAD},
)

OF_CONVERSATIONS = {"messages", "tools", "chat_template_kwargs", EFFORT, "add_generation_prompt"}
TOKENIZED = Kind(frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"}))
TOKENIZED_CHAT = Kind(
    frozenset(OF_CONVERSATIONS | {"model", "continue_final_message", "return_token_strs"}),
    {"add_special_tokens": Refused(false, "is of prompts: the chat template has them")},
)
DETOKENIZED = Kind(frozenset({"model", "tokens"}))

# ---------------------------------------------------------------------- objects in it


def _kind(*known: str, **refused: Refused) -> Kind:
    return Kind(frozenset(known), refused)


STREAM_OPTIONS = _kind(
    "include_usage",
    "continuous_usage_stats",  # vLLM's
    include_obfuscation=Refused(false, "is not there: chunks are as long as their text"),
)
FORMATS = {  # by the type of a response_format; the schema of a json_object is llama.cpp's
    "text": _kind("type"),
    "json_object": _kind("type", "schema"),
    "json_schema": _kind("type", "json_schema"),
}
STRUCTURED = _kind(
    *("json", "regex", "choice", "grammar", "json_object"),
    structural_tag=Refused(never, "is not there: give tools, or a grammar"),
    whitespace_pattern=Refused(never, "is not there: give a regex or a grammar"),
    disable_fallback=Refused(lambda value: isinstance(value, bool), "must be true or false"),
    disable_any_whitespace=Refused(false, "is not there: give a regex or a grammar"),
    disable_additional_properties=Refused(false, 'is not there: write "additionalProperties": false into the schema'),
)
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
            elif not (name in kind.refused and kind.refused[name].neutral(given)) and not self.leaves_out(where, name):
                self._wrong(name, kind, where, field)
        return found

    def leaves_out(self, where: str, name: str) -> bool:
        """Whether a field that is unknown or refused is left out, and then notes it; ``where``: as in :meth:`of`."""
        if self._ignore_unknown and len(self.ignored) < MOST_TOLD:
            way = where.replace("[", ".").replace("]", "")  # as a header may have it
            self.ignored.append(f"{way}{'.' * bool(where)}{name[:MAX_NAME]}")
        return self._ignore_unknown

    @staticmethod
    def _wrong(name: str, kind: Kind, where: str, field: str) -> None:
        if name in kind.refused:
            message = f"{where}{'.' * bool(where)}{name} {kind.refused[name].why}"
            raise ApiError(400, message, field or name, "unsupported_parameter")
        # Fields that are refused are no hints.
        near = difflib.get_close_matches(name, kind.known, n=1) if len(name) <= MAX_NAME else []
        if name in kind.instead:
            hint = kind.instead[name]
        else:
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(kind.known))}"
        what = f"{name[:80]!r} is no field of {where or 'this endpoint'}: {hint}"
        raise ApiError(400, what, field or name[:80], "unknown_parameter")


def must_be(what: str, given: object, field: str) -> ApiError:
    """The error for a value that is none of those that a field may have."""
    return ApiError(400, f"{field} must be {what}, got {shown(given)}", field)
