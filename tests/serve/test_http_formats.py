"""What answers have to follow, by all its names; reasoning before it, and calls of tools in its place."""

from __future__ import annotations

import json

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from test_tool_grammar import whole
from tokenizers_made import TOOL_CHAT, byte_level

from hf_sparsekv.serving.grammar import Grammars
from hf_sparsekv.serving.sampling import Sampling
from hf_sparsekv_serve.http import create_app

pytest.importorskip("llguidance")

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LARK = 'start: "a" {b}\nb: /[{]?/ "}"'.replace("{b}", "b")
GBNF = 'root ::= "yes" | other\nother ::= [0-9]+\n'
MUST_FOLLOW = [  # fields, answers that follow them, answers that do not
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, ['{"a": 1}'], ['{"b": 1}', "{}"]),
    ({"guided_json": SCHEMA}, ['{"a": 1}', '{"a":1}'], ["{}"]),
    ({"guided_json": json.dumps(SCHEMA)}, ['{"a": 1}'], ["{}"]),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 1}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}", '{"b": []}'], ["[]"]),
    ({"structured_outputs": {"regex": r"\d{3}-[a/b\n]+"}}, ["123-a/b", "000-\n"], ["12-a", "123-", "123-c"]),
    ({"guided_regex": "^(yes|no)$"}, ["yes", "no"], ["ye", "yess"]),
    ({"guided_regex": "a/b\nc"}, ["a/b\nc"], ["a/bc"]),
    ({"guided_regex": r"a\/b"}, ["a/b"], ["a\\/b"]),
    ({"structured_outputs": {"choice": ["yes", 'n"o\\\n', "日本"]}}, ["yes", 'n"o\\\n', "日本"], ["y", "no"]),
    ({"guided_choice": ["a", "ab"]}, ["a", "ab"], ["b"]),
    ({"guided_grammar": LARK}, ["a{}", "a}"], ["a", "a{"]),
    ({"structured_outputs": {"grammar": GBNF}}, ["yes", "12"], ["no"]),
]


@pytest.fixture(scope="module")
def follows():
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    yield lambda text, sampling: whole(grammars.constraint(sampling), tokenizer, text)
    grammars.close()


@pytest.fixture(scope="module", params=[TOOL_CHAT, TOOL_CHAT + "{% if think %}<think>\n</think>{% endif %}"])
def served(request):
    """A model without reasoning, and one that may reason first."""
    tokenizer = byte_level()
    tokenizer.chat_template = request.param
    with FakeEngine(tokenizer, max_length=4000) as engine, serving(create_app(engine, "m")) as url:
        yield url, engine, "</think>" in request.param


def settings_of(served, **fields) -> Sampling:
    url, engine, _ = served
    path, begin = ("completions", {"prompt": "a"}) if fields.pop("plain", False) else ("chat/completions", {})
    body = {"max_tokens": 1, **(begin or {"messages": HI}), **fields}
    answer = httpx.post(f"{url}/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return engine.samplings[-1]


@pytest.mark.parametrize("plain", [True, False], ids=["completion", "chat"])
@pytest.mark.parametrize(("fields", "right", "wrong"), MUST_FOLLOW, ids=lambda one: str(one)[:50])
def test_answers_follow(served, follows, plain, fields, right, wrong):
    sampling = settings_of(served, plain=plain, **fields)
    assert [text for text in right if not follows(text, sampling)] == []
    assert [text for text in wrong if follows(text, sampling)] == []
    reasons = served[2] and not plain and sampling.grammar != GBNF
    for text in (f"<think>\nI see {{}} </think>\n\n{right[0]}", f"<think></think>{right[0]}"):
        assert follows(text, sampling) == reasons
    assert not follows(f"<think>{right[0]}", sampling) and not follows(f"<think>a</think>{wrong[0]}", sampling)


@pytest.mark.parametrize("form", MUST_FOLLOW[:3] + MUST_FOLLOW[5:12], ids=lambda one: str(one)[:40])
@pytest.mark.parametrize("one", [True, False], ids=["one", "several"])
def test_tools_and_a_form_are_calls_or_an_answer(served, follows, form, one):
    fields, right, wrong = form
    sampling = settings_of(served, tools=[TOOL], parallel_tool_calls=not one, **fields)
    assert all(follows(text, sampling) for text in right) and follows(CALL, sampling)
    assert not any(follows(text, sampling) for text in wrong)
    assert follows(f"{CALL}\n{CALL}", sampling) != one
    assert not follows(CALL + right[0], sampling) and not follows(CALL.replace('"a"', '"b"'), sampling)
    assert not follows(CALL.replace('"f"', '"g"'), sampling) and not follows("text", sampling)
    for text in (CALL, right[0]):
        assert follows(f"<think>I call</think>\n{text}", sampling) == served[2]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"])
def test_answers_that_must_be_calls_are_no_answers_that_follow(served, follows, choice):
    sampling = settings_of(served, tools=[TOOL], tool_choice=choice, guided_choice=["yes"])
    assert follows(CALL, sampling) and not follows("yes", sampling)
    assert follows(f"<think>a</think>\n{CALL}", sampling) == served[2]
    none = settings_of(served, tools=[TOOL], tool_choice="none", guided_choice=["yes"])
    assert follows("yes", none) and not follows(CALL, none)


def thinking(tokens: list[str], template: str):
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template
    return FakeEngine(tokenizer, max_length=4000), tokenizer


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("begins", ["<think>\n", "<think>\n\n</think>\n\n", ""], ids=["open", "off", "free"])
def test_where_the_template_begins_or_ends_the_reasoning(special, begins):
    marks = ["<think>", "</think>"] if special else []
    unused = "{# <think></think> #}"
    engine, tokenizer = thinking(marks, TOOL_CHAT + unused + begins.replace("\n", "{{ '\\n' }}"))
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    with engine, serving(create_app(engine, "m")) as url:
        sampling = settings_of((url, engine, True), guided_choice=["yes"])

        def follows(text: str) -> bool:
            return whole(grammars.constraint(sampling), tokenizer, text)

        assert follows("yes") == (begins != "<think>\n")
        assert follows("I see\n</think>\n\nyes") == (begins == "<think>\n")
        # Reasoning that has begun may be any text, its own mark included, if that is one.
        may = begins == "" or (begins == "<think>\n" and not special)
        assert follows("<think>\nI see\n</think>\n\nyes") == may
        assert not follows("I see") and not follows("<think>yes")
    grammars.close()


WRONG = [
    ({"guided_regex": ""}, "guided_regex", "must be text that is not empty"),
    ({"guided_regex": 3}, "guided_regex", "must be text that is not empty"),
    ({"guided_regex": "a\ud800"}, "guided_regex", "surrogate"),
    ({"guided_choice": []}, "guided_choice", "a list of 1 to 1,024 texts, got 0"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice", "got 1,025"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "must be text that is not empty"),
    ({"guided_choice": "yes"}, "guided_choice", "got a string"),
    ({"guided_json": [1]}, "guided_json", "must be a JSON schema, an object, got a list"),
    ({"guided_json": "{"}, "guided_json", "is not JSON"),
    ({"guided_json": '{"a": 1, "a": 2}'}, "guided_json", "is not JSON"),
    ({"guided_json": "[" * 100_000}, "guided_json", "is not JSON"),
    ({"guided_grammar": " "}, "guided_grammar", "must be text"),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "65,536 characters at most"),
    ({"guided_json": {"a": "b" * 70_000}}, "guided_json", "65,536 characters at most"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "are both given: give one"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "are both given"),
    ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "must have one of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must have one of"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "json_object must be true or false"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "structural_tag is not there"),
    ({"structured_outputs": {"xml": 1}}, "structured_outputs", "'xml' is no field of structured_outputs"),
    ({"structured_outputs": 3}, "structured_outputs", "must be an object"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "is not there"),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "goes without grammar"),
    ({"guided_choice": ["a"], "min_tokens": 1}, "min_tokens", "goes without grammar"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG, ids=lambda one: str(one)[:40])
@pytest.mark.parametrize("what", ["chat/completions", "completions"])
def test_wrong_values_are_refused_by_name(served, what, fields, param, says):
    body = {**({"prompt": "a"} if what == "completions" else {"messages": HI}), "max_tokens": 8, **fields}
    content = json.dumps(body)
    answer = httpx.post(f"{served[0]}/v1/{what}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], says in error["message"]) == (param, True), error


def test_a_grammar_that_is_followed_alone(served):
    body = {"messages": HI, "max_tokens": 8, "guided_grammar": GBNF, "tools": [TOOL]}
    error = httpx.post(f"{served[0]}/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "guided_grammar" and "is GBNF, which is followed alone" in error["message"]


HOSTILE = {
    "rules": "root ::= a0\n" + "".join(f'a{i} ::= "x" a{i + 1} | [a-z]\n' for i in range(2000)) + 'a2000 ::= "y"\n',
    "lines": "\n" * 60_000 + 'root ::= "a"',
    "brackets": "root ::= " + "(" * 16_000 + '"a"' + ")" * 16_000,
    "repeats": "root ::= " + " ".join('"a"{1,9999}' for _ in range(4000)),
    "nested": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    "json": 'start: %json {"multipleOf": 1e-300}',
    "lark in lark": "start: " + "%lark { start: " * 2000 + '"a"' + "}" * 2000,
}


@pytest.mark.parametrize("which", HOSTILE)
def test_hostile_grammars_end_with_their_process(which):
    tokenizer = byte_level()
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    try:
        with pytest.raises(ValueError, match="grammar cannot be followed"):
            grammars.constraint(Sampling(grammar=HOSTILE[which]))
        assert grammars.constraint(Sampling(grammar='start: "a"')) is not None
    finally:
        grammars.close()
