"""Grammars of answers that consist of calls: each tool's parameters are a schema of their own."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken
from tokenizers_made import byte_level

from hf_sparsekv.serving.grammar import Grammars
from hf_sparsekv.serving.sampling import Sampling
from hf_sparsekv_serve.forms import deepseek, kimi, known
from hf_sparsekv_serve.forms.calls import Tools
from hf_sparsekv_serve.forms.message import Message
from hf_sparsekv_serve.forms.spelling import spelling_of
from hf_sparsekv_serve.http.call_grammar import grammar_of

pytest.importorskip("llguidance")

ITEM = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def obj(**more) -> dict:
    """A schema of an object with one field `i`."""
    return {"type": "object", "required": ["i"], "additionalProperties": False, **more}


TO_ITEM = {"i": {"$ref": "#/$defs/Item"}}
TREE = {"v": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}}}
TREE = {"type": "object", "properties": TREE, "required": ["v", "children"], "additionalProperties": False}
SCHEMAS = {  # parameters, arguments that follow them, arguments that do not
    "$defs": (obj(properties=TO_ITEM, **{"$defs": {"Item": ITEM}}), {"i": {"n": 1}}, {"i": {"m": 1}}),
    "definitions": (
        obj(properties={"i": {"$ref": "#/definitions/Item"}}, definitions={"Item": ITEM}),
        {"i": {"n": 1}},
        {"i": {"m": 1}},
    ),
    "$id": (
        obj(properties=TO_ITEM, **{"$id": "https://example.org/a", "$defs": {"Item": ITEM}}),
        {"i": {"n": 1}},
        {"i": 1},
    ),
    "$id in $ref": (
        obj(
            properties={"i": {"$ref": "https://example.org/a#/$defs/Item"}},
            **{"$id": "https://example.org/a", "$defs": {"Item": ITEM}},
        ),
        {"i": {"n": 1}},
        {"i": 1},
    ),
    "$anchor": (
        obj(properties={"i": {"$ref": "#here"}}, **{"$defs": {"Item": {"$anchor": "here", "type": "integer"}}}),
        {"i": 1},
        {"i": "x"},
    ),
    "anyOf": (
        obj(properties={"i": {"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]}}, **{"$defs": {"Item": ITEM}}),
        {"i": None},
        {"i": 1},
    ),
    "escapes": (
        obj(properties={"i": {"$ref": "#/$defs/a~1b%25c~0"}}, **{"$defs": {"a/b%c~": {"type": "integer"}}}),
        {"i": 1},
        {"i": "x"},
    ),
    "a property": (
        {**obj(properties={"i": {"type": "integer"}, "j": {"$ref": "#/properties/i"}}), "required": ["i", "j"]},
        {"i": 1, "j": 2},
        {"i": 1, "j": "x"},
    ),
    "the root is one": ({"$ref": "#/$defs/Item", "$defs": {"Item": ITEM}}, {"n": 1}, {"m": 1}),
    "a tree": (TREE, {"v": 1, "children": [{"v": 2, "children": []}]}, {"v": 1, "children": [{"name": "t"}]}),
    "a tree of calls": (
        TREE,
        {"v": 1, "children": []},
        {"v": 1, "children": [{"name": "t", "arguments": {"v": 2, "children": []}}]},
    ),
    "no type": ({"properties": {"i": {"type": "integer"}}, "required": ["i"]}, {"i": 1}, 3),
    "no fields": ({}, {"i": [1]}, 3),
    "none": (None, {"i": 1}, 3),
    "true": (True, {"i": 1}, 3),
}


@pytest.fixture(scope="module")
def follows():
    """Whether a text is a whole answer under a grammar."""
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    return lambda text, grammar: whole(grammars.constraint(Sampling(grammar=grammar)), tokenizer, text)


def whole(constraint, tokenizer, text: str) -> bool:
    """Whether every token may come, and the end after them."""
    import torch

    words = torch.zeros(-(-len(tokenizer) // 32), dtype=torch.int32)
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]:
        constraint.ask()
        constraint.fill(words)
        assert constraint.error is None, constraint.error
        # A text that only one continuation fits has one canonical spelling in tokens, which is the tokenizer's.
        if not words[token // 32] >> (token % 32) & 1:
            return False
        constraint.unread.append(lambda token=token: token)
    return True


def grammar(tools: list[dict], several: bool = False) -> str:
    return grammar_of(tools, several, spelling_of("hermes", ""))


def call(name: str, arguments: object) -> str:
    made = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(made, ensure_ascii=False)}\n</tool_call>"


@pytest.mark.parametrize("which", SCHEMAS)
def test_references_in_parameters_begin_at_the_parameters(follows, which):
    parameters, right, wrong = SCHEMAS[which]
    made = grammar([{"name": "t", "parameters": parameters}])
    assert follows(call("t", right), made)
    assert not follows(call("t", wrong), made)


def test_tools_may_define_different_things_by_one_name(follows):
    one = {"name": "a", "parameters": obj(properties=TO_ITEM, **{"$defs": {"Item": {"type": "integer"}}})}
    two = {"name": "b", "parameters": obj(properties=TO_ITEM, **{"$defs": {"Item": {"type": "null"}}})}
    made = grammar([one, two], several=True)
    assert follows(call("a", {"i": 1}) + "\n" + call("b", {"i": None}), made)
    assert not follows(call("a", {"i": None}), made) and not follows(call("b", {"i": 1}), made)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "é日", "a\nb", "x{y}", "</tool_call>", "a/b", "%json"])
def test_names_of_tools_are_no_part_of_the_grammar(follows, name):
    assert follows(call(name, {}), grammar([{"name": name}]))


@pytest.mark.parametrize("space", [" " * 2, "\n" + " " * 65, "\n\n", "\r", "\t"])
def test_whitespace_is_bounded_as_in_other_answers(follows, space):
    """Else an answer may be nothing else: 5,203 of 5,225 characters, of random weights."""
    made = grammar([{"name": "t", "parameters": {}}])
    text = call("t", {"a": [1, 2]})
    assert follows(text, made) and follows(text.replace("[1", "[\n  1"), made)
    for before in ("1", ", 2", "], ", "}}\n"):
        if before in text:
            assert not follows(text.replace(before, space + before, 1), made)


@pytest.mark.parametrize("more", [{"whitespace_pattern": r"\s*"}, {"lenient": True}, 3])
def test_parameters_cannot_change_how_schemas_are_read(follows, more):
    made = grammar([{"name": "t", "parameters": {"type": "object", "x-guidance": more}}])
    assert follows(call("t", {"a": 1}), made)
    assert not follows(call("t", {"a": 1}).replace("1", " " * 9 + "1"), made)


F, G = {"name": "f", "parameters": ITEM}, {"name": "g"}
TEMPLATES = {  # a form, what its template has, and an answer of a call or two
    "llama": ("", '{"name": "f", "parameters": {"n": 1}}', '; {"name": "g", "parameters": {}}', ""),
    "mistral": ("", '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}', ', {"name": "g", "arguments": {}}', "]"),
    "mistral ": ("[ARGS]", '[TOOL_CALLS]f[ARGS]{"n": 1}', "[TOOL_CALLS]g[ARGS]{}", ""),
    "deepseek": (
        "",
        f'{deepseek.OPEN}{deepseek.CALL}f{deepseek.SEPARATOR}{{"n": 1}}{deepseek.CALL_END}',
        f"{deepseek.CALL}g{deepseek.SEPARATOR}{{}}{deepseek.CALL_END}",
        deepseek.CLOSE,
    ),
    "deepseek ": (
        "```json",
        f'{deepseek.OPEN}{deepseek.CALL}function{deepseek.SEPARATOR}f\n```json\n{{"n": 1}}\n```{deepseek.CALL_END}',
        f"\n{deepseek.CALL}function{deepseek.SEPARATOR}g\n```json\n{{}}\n```{deepseek.CALL_END}",
        deepseek.CLOSE,
    ),
    "kimi": (
        "",
        f'{kimi.OPEN}{kimi.CALL}functions.f:0{kimi.ARGUMENTS}{{"n": 1}}{kimi.CALL_END}',
        f"{kimi.CALL}functions.g:1{kimi.ARGUMENTS}{{}}{kimi.CALL_END}",
        kimi.CLOSE,
    ),
    "harmony": ("", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}', None, ""),
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_of_other_forms_follow_their_grammar_and_are_read(name, special):
    """Marks are tokens, special ones or not."""
    template, one, two, last = TEMPLATES[name]
    form = known.FORMS[name.strip()]
    tokenizer = byte_level()
    marks = [mark for mark in form.marks if mark != "<|end|>"]
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in marks])
    ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in marks}
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    made = grammar_of([F, G], True, spelling_of(name.strip(), template), ids)

    def follows(text: str) -> bool:
        return whole(grammars.constraint(Sampling(grammar=made)), tokenizer, text)

    assert follows(one + last) and not follows((one + last).replace("1", "true")) and not follows("x")
    if two is not None:
        assert follows(one + two + last)
    reader = known.reader(form, Tools.of([{"function": F}, {"function": G}]), None)
    read = Message.of([*reader.feed(one + (two or "") + last), *reader.finish()])
    assert [call.name for call in read.calls] == ["f", "g"][: 1 if two is None else 2] and not read.text


def test_forms_whose_arguments_are_no_json_are_known_for_reading_only():
    assert [name for name in known.FORMS if spelling_of(name, "") is None] == [
        *("gemma", "function-gemma", "deepseek-3.2", "minimax", "glm", "qwen")
    ]
