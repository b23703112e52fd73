"""What answers have to follow: a schema, an expression, a choice or a grammar, under the names of OpenAI and vLLM.

:mod:`.schema` has the other fields. :mod:`hf_sparsekv.serving.grammar` compiles and follows what this makes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_sparsekv.serving.grammar import WHITESPACE
from hf_sparsekv.serving.sampling import shown

from ..forms.thinking import Marks
from . import fields as fields_of
from .errors import ApiError
from .fields import Fields, must_be
from .values import all_whole, json_kind, parsed, whole

MAX_CHOICES = 1024
JSON_OBJECT = {"type": "object"}
IS_LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:)", re.MULTILINE)  # otherwise it is GBNF


@dataclass(frozen=True)
class Form:
    """What an answer has to follow.

    Attributes:
        field: the field that asks for it.
        json_schema, grammar: one of them, as :class:`.Sampling` takes it.
        rule: ``answer: ...`` in llguidance's dialect of Lark; None: it can only be followed alone.
    """

    field: str
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    rule: str | None = None


def form_of(body: Mapping[str, Any], fields: Fields) -> Form | None:
    """What a body's fields ask for; None: any text.

    Raises:
        ApiError: a field is wrong, or several ask for something.
    """
    found = [_response_format(body["response_format"], fields)] if "response_format" in body else []
    if "structured_outputs" in body:
        found.append(_structured(body["structured_outputs"], fields))
    found += [make(body[name], name) for name, make in GUIDED.items() if name in body]
    asked = [form for form in found if form is not None]
    if len(asked) > 1:
        raise ApiError(400, f"{asked[0].field} and {asked[1].field} are both given: give one", asked[1].field)
    return asked[0] if asked else None


def _response_format(form: Any, fields: Fields) -> Form | None:
    field = "response_format"
    wrong = must_be(
        "{type: text}, {type: json_object} or {type: json_schema, json_schema: {name, schema}}", form, field
    )
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(kind, str) or kind not in fields_of.FORMATS:
        raise wrong
    form = fields.of(form, fields_of.FORMATS[kind], field)
    if kind == "text":
        return None
    if kind == "json_object":
        found = form.get("schema", JSON_OBJECT)
    elif not isinstance(form.get("json_schema"), dict):
        raise wrong
    else:
        found = fields.of(form["json_schema"], fields_of.JSON_SCHEMA, f"{field}.json_schema").get("schema")
    if not isinstance(found, dict):
        raise wrong
    return _json(found, field)


def _structured(given: Any, fields: Fields) -> Form | None:
    """vLLM's ``structured_outputs``."""
    field = "structured_outputs"
    given = fields.of(given, fields_of.STRUCTURED, field)
    if not isinstance(given.get("json_object", False), bool):
        raise ApiError(400, f"{field}.json_object must be true or false", field)
    asked = [name for name, value in given.items() if value is not False]
    if len(asked) != 1:
        names = ", ".join(sorted(fields_of.STRUCTURED.known))
        raise ApiError(400, f"{field} must have one of {names}, got {shown(asked)}", field)
    (name,) = asked
    if name == "json_object":
        return _json(JSON_OBJECT, field)
    return GUIDED[f"guided_{name}"](given[name], field)


def _json(given: Any, field: str) -> Form:
    """``given``: a JSON schema, or one as text."""
    if isinstance(given, str):
        try:
            given = parsed(given)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{field} is not JSON: give a schema", field) from None
    if not isinstance(given, dict):
        raise ApiError(400, f"{field} must be a JSON schema, an object, got {json_kind(given)}", field)
    all_whole(given, field)
    return Form(field, json_schema=given, rule=f"answer: %json {json.dumps({**given, 'x-guidance': WHITESPACE})}\n")


def _text(given: Any, field: str) -> str:
    if not isinstance(given, str) or not given.strip():
        raise ApiError(400, f"{field} must be text that is not empty, got {shown(given)}", field)
    whole(given, field)
    return given


def _regex(given: Any, field: str) -> Form:
    """A regular expression of the whole answer, as Lark has it between slashes."""

    def escaped(found: re.Match) -> str:
        text = found[0]
        return {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}.get(text, text)

    text = re.sub(r"\\.|/|[\n\r]", escaped, _text(given, field), flags=re.DOTALL)
    rule = f"answer: /{text}/\n"
    return Form(field, grammar=f"start: answer\n{rule}", rule=rule)


def _choice(given: Any, field: str) -> Form:
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_CHOICES:
        got = f"{len(given):,} of them" if isinstance(given, list) else json_kind(given)
        raise ApiError(400, f"{field} must be a list of 1 to {MAX_CHOICES:,} texts, got {got}", field)
    rule = f"answer: {' | '.join(json.dumps(_text(one, field), ensure_ascii=False) for one in given)}\n"
    return Form(field, grammar=f"start: answer\n{rule}", rule=rule)


def _grammar(given: Any, field: str) -> Form:
    """In llguidance's dialect of Lark, which can be nested in another, or in GBNF."""
    text = _text(given, field)
    return Form(field, grammar=text, rule=f"answer: %lark {{\n{text}\n}}\n" if IS_LARK.search(text) else None)


GUIDED: dict[str, Callable[[Any, str], Form]] = {
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}


# ---------------------------------------------------------------------- what may come before, or instead


def composed(form: Form | None, calls: str | None, thought: str | None) -> str:
    """A grammar of reasoning, and then calls of tools or an answer.

    Args:
        form: of the answer; None: the answer is calls.
        calls: the grammar of these, from its ``start: `` on; None: none may come.
        thought: of :func:`thought_of`.

    Raises:
        ApiError: the form can only be followed alone.
    """
    if form is not None and form.rule is None:
        why = "is GBNF, which is followed alone: give it in Lark, or turn reasoning and tools off"
        raise ApiError(400, f"{form.field} {why}", form.field, "unsupported_parameter")
    either = [name for name, there in (("calls", calls), ("answer", form)) if there is not None]
    rules = [] if calls is None else [f"calls: {calls.removeprefix('start: ')}"]
    rules += [] if form is None or form.rule is None else [form.rule]
    first = "" if thought is None else "thought "
    return "".join((f"start: {first}({' | '.join(either)})\n", thought or "", *rules))


def thought_of(marks: Marks, begun: bool, special: Mapping[str, int]) -> str | None:
    """The rule of reasoning between marks, which may be left out unless the template has begun it.

    Args:
        special: ids of tokens that are no text to a grammar.

    Returns:
        None: the marks are special tokens and text together.
    """
    ids = {one: special.get(one) for one in marks}
    if any(id is None and any(token in one for token in special) for one, id in ids.items()):
        return None
    open, close = (json.dumps(one) if ids[one] is None else f"<[{ids[one]}]>" for one in marks)
    inner = "/(?s:.*)/ " + close if ids[marks.close] is not None else "inner"
    rule = f"thought: {inner} /\\s*/\n" if begun else f"thought: (/\\s*/ {open} {inner} /\\s*/)?\n"
    return rule if inner != "inner" else f"{rule}inner[suffix={close}]: /(?s:.*)/\n"
