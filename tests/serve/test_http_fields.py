"""Unknown and misplaced fields of every object in a body: followed, or refused by name, or left out and named."""

from __future__ import annotations

import copy
import json

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from tokenizers_made import TOOL_CHAT, byte_level

from hf_sparsekv_serve.http import create_app

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWER = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "2"}
# A body that has every object that a body may have.
WHOLE = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWER, RESULT, *HI],
    "tools": [TOOL, {"type": "function", "function": {"name": "g", "return": {"type": "integer"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 1,
}
FORMATTED = {
    "messages": HI,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "x", "description": "", "strict": True, "schema": SCHEMA},
    },
    "max_tokens": 1,
}
OBJECTS = [  # the body, the way to the object, the field that errors name
    (WHOLE, ("tools", 0), "tools"),
    (WHOLE, ("tools", 1, "function"), "tools"),
    (WHOLE, ("tool_choice",), "tool_choice"),
    (WHOLE, ("tool_choice", "function"), "tool_choice"),
    (WHOLE, ("stream_options",), "stream_options"),
    (WHOLE, ("messages", 0), "messages"),
    (WHOLE, ("messages", 0, "content", 0), "messages"),
    (WHOLE, ("messages", 1, "tool_calls", 0), "messages"),
    (WHOLE, ("messages", 1, "tool_calls", 0, "function"), "messages"),
    (FORMATTED, ("response_format",), "response_format"),
    (FORMATTED, ("response_format", "json_schema"), "response_format"),
]


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_level()
    tokenizer.chat_template = TOOL_CHAT
    with FakeEngine(tokenizer, max_length=3000) as engine:
        yield engine


@pytest.fixture(scope="module")
def asked(engine):
    with serving(create_app(engine, "m")) as url, httpx.Client(base_url=url) as client:
        yield lambda body: client.post("/v1/chat/completions", json=body)


@pytest.fixture(scope="module")
def asked_leniently(engine):
    with serving(create_app(engine, "m", ignore_unknown_fields=True)) as url, httpx.Client(base_url=url) as client:
        yield lambda body: client.post("/v1/chat/completions", json=body)


def with_field(body: dict, way: tuple, name: str, value: object) -> dict:
    body = copy.deepcopy(body)
    inner = body
    for step in way:
        inner = inner[step]
    inner[name] = value
    return body


def test_the_bodies_themselves_are_served(asked):
    assert asked(WHOLE).status_code == 200, asked(WHOLE).text
    assert asked(FORMATTED).status_code == 200, asked(FORMATTED).text


@pytest.mark.parametrize(("body", "way", "param"), OBJECTS, ids=lambda one: ".".join(map(str, one)) if one else "")
def test_an_unknown_field_of_any_object_is_refused_by_name(asked, body, way, param):
    response = asked(with_field(body, way, "shema", SCHEMA))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and "'shema'" in error["message"], error
    assert asked(with_field(body, way, "shema", None)).status_code == 200  # as if it were not there


@pytest.mark.parametrize(("body", "way"), [(body, way) for body, way, _ in OBJECTS])
def test_with_the_option_it_is_left_out_and_named(engine, asked_leniently, body, way):
    before = len(engine.prompts)
    response = asked_leniently(with_field(body, way, "shema", SCHEMA))
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == ".".join(map(str, (*way, "shema")))
    asked_leniently(body)
    assert engine.prompts[before] == engine.prompts[before + 1]
    assert engine.samplings[-2] == engine.samplings[-1]


FORMATS = [  # a response_format, and the schema that answers follow, or what the error says
    ({"type": "text"}, None),
    ({"type": "json_object"}, {"type": "object"}),
    ({"type": "json_object", "schema": SCHEMA}, SCHEMA),  # llama.cpp's
    ({"type": "json_object", "schema": None}, {"type": "object"}),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, SCHEMA),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": None}}, SCHEMA),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, {}),
    ({"type": "json_schema", "json_schema": SCHEMA}, "'type' is no field of response_format.json_schema: it has"),
    ({"type": "json_schema", "json_schema": {"name": "x", "shema": SCHEMA}}, "'shema' is no field of response_format."),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format must be"),
    ({"type": "json_schema", "json_schema": {}}, "response_format must be"),
    ({"type": "json_schema", "json_schema": json.dumps(SCHEMA)}, "response_format must be"),
    ({"type": "json_schema", "schema": SCHEMA}, "'schema' is no field of response_format: did you mean json_schema?"),
    ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, "'json_schema' is no field of response_format"),
    ({"type": "json_object", "schema": [1]}, "response_format must be"),
    ({"type": "text", "schema": SCHEMA}, "'schema' is no field of response_format: it has type"),
    ({"type": ["json_object"]}, "response_format must be"),
    ({"schema": SCHEMA}, "response_format must be"),
]


@pytest.mark.parametrize(("form", "expected"), FORMATS, ids=lambda one: str(one)[:60])
def test_schemas_of_a_response_format(engine, asked, form, expected):
    response = asked({"messages": HI, "max_tokens": 1, "response_format": form})
    if isinstance(expected, str):
        assert response.status_code == 400 and expected in response.json()["error"]["message"], response.text
    else:
        assert response.status_code == 200, response.text
        found = engine.samplings[-1].json_schema
        assert (found if found is None else json.loads(found)) == expected


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ({"type": "web_search", "function": FUNCTION}, "tools[0].type must be function, got 'web_search'"),
        ({"type": "function", "name": "f", "parameters": SCHEMA}, "tools must be a list of {type: function"),
        ({**TOOL, "name": "f"}, "'name' is no field of tools[0]"),
        (
            {"function": {"name": "f", "paramters": SCHEMA}},
            "'paramters' is no field of tools[0].function: did you ",
        ),
        ({"function": {"name": "f", "parameters": [SCHEMA]}}, "tools[0].function.parameters must be a JSON schema, an"),
        ({"function": {"name": "f", "parameters": False}}, "tools[0].function.parameters must be a JSON schema, an"),
    ],
)
def test_tools(asked, tool, says):
    response = asked({"messages": HI, "max_tokens": 1, "tools": [tool]})
    assert response.status_code == 400 and says in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("parameters", [SCHEMA, {}, None, True])
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_parameters_of_tools(asked, parameters, choice):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    response = asked({"messages": HI, "max_tokens": 1, "tools": [tool], "tool_choice": choice})
    assert response.status_code == 200, response.text


def test_tool_choice(asked):
    for choice, says in (
        ({"type": "function", "name": "f"}, "'name' is no field of tool_choice"),
        ({"type": "function"}, "tool_choice must be auto, none, required or"),
        ({"type": "function", "function": {"name": 3}}, "tool_choice must be auto, none, required or"),
        ({"type": "allowed_tools", "tools": []}, "tool_choice must be auto, none, required or"),
    ):
        response = asked({"messages": HI, "max_tokens": 1, "tools": [TOOL], "tool_choice": choice})
        assert response.status_code == 400 and says in response.json()["error"]["message"], response.text


def test_calls_of_tools_as_answers_have_them(asked):
    """Bodies that clients send back: empty fields, and the place in a stream."""
    call = {**CALL, "index": 0, "extra": {}, "custom": None}
    response = asked({"messages": [*HI, {**ANSWER, "tool_calls": [call]}, RESULT], "max_tokens": 1})
    assert response.status_code == 200, response.text


def test_variables_that_the_template_does_not_know(engine, asked, asked_leniently):
    body = {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {"enable_thinkin": False}}
    response = asked(body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "chat_template_kwargs"
    assert "'enable_thinkin' is not known to this model's chat template" in response.json()["error"]["message"]
    response = asked_leniently(body)
    assert response.headers["x-ignored-fields"] == "chat_template_kwargs.enable_thinkin"
    assert asked({**body, "chat_template_kwargs": {}}).status_code == 200
