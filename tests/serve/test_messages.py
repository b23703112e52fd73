"""Anthropic's ``/v1/messages``: what its clients send, and the events that they expect."""

from __future__ import annotations

import json

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import create_app

SHOWS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ '|' ~ m.reasoning_content if m.reasoning_content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}]"
    "{% endfor %}{{ tools | tojson if tools }}{{ enable_thinking }}{{ reasoning_effort }}"
    "{# <tool_call> </tool_call> <think> </think> #}"
)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_level()
    tokenizer.chat_template = SHOWS
    with FakeEngine(tokenizer, max_length=4000) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    with serving(create_app(engine, "m")) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture
def says(engine):
    """Sets what the engine answers."""

    def set_to(text: str) -> None:
        engine.answer = [*byte_level()(text)["input_ids"], engine.tokenizer.eos_token_id]

    yield set_to
    engine.answer = None


def asked(client, status: int = 200, path: str = "/v1/messages", **fields) -> dict:
    body = {"model": "m", "max_tokens": 200, "messages": HI, **fields}
    text = json.dumps({name: value for name, value in body.items() if value is not None})
    answer = client.post(path, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    return answer.json()


def streamed(client, **fields) -> list[dict]:
    """Events, whose names are those of their data."""
    body = {"model": "m", "max_tokens": 200, "messages": HI, "stream": True, **fields}
    answer = client.post("/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        if not block.startswith(":"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def prompt(engine) -> str:
    return engine.tokenizer.decode(engine.prompts[-1])


def test_a_message(client, engine, says):
    says("the cat")
    answer = asked(client, system="be brief")
    assert answer.pop("id").startswith("msg_")
    tokens = len(engine.prompts[-1])
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "the cat"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }
    assert prompt(engine) == "[system:be brief][user:hi]"


def test_why_it_ended(client, says):
    says("the cat says")
    assert asked(client, max_tokens=2)["stop_reason"] == "max_tokens"
    answer = asked(client, stop_sequences=["zz", " says"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " says")
    assert answer["content"] == [{"type": "text", "text": "the cat"}]
    says("")
    assert asked(client)["content"] == []


def test_blocks_of_an_answer(client, says):
    says(f"<think>Hm.</think>\n\nSee.\n{CALL}")
    answer = asked(client, tools=[TOOL])
    thought, text, call = answer["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "See."}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "tool_use", "name": "f", "input": {"a": "é"}}
    assert answer["stop_reason"] == "tool_use"


def test_events_of_a_stream(client, engine, says):
    says(f"<think>Hm.</think>See.{CALL}")
    events = streamed(client, tools=[TOOL])
    kinds = [one["type"] for one in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    start = events[0]["message"]
    assert start["content"] == [] and start["usage"]["input_tokens"] == len(engine.prompts[-1])
    blocks: list[dict] = []
    open_at = None
    for one in events[2:-2]:
        if one["type"] == "content_block_start":
            assert open_at is None and one["index"] == len(blocks)
            blocks.append({**one["content_block"], "deltas": []})
            open_at = one["index"]
        elif one["type"] == "content_block_delta":
            assert one["index"] == open_at
            blocks[-1]["deltas"].append(one["delta"])
        elif one["type"] == "content_block_stop":
            assert one["index"] == open_at
            open_at = None
    assert open_at is None and [one["type"] for one in blocks] == ["thinking", "text", "tool_use"]
    assert "".join(one["thinking"] for one in blocks[0]["deltas"]) == "Hm."
    assert "".join(one["text"] for one in blocks[1]["deltas"]) == "See."
    pieces = [one["partial_json"] for one in blocks[2]["deltas"]]
    assert json.loads("".join(pieces)) == {"a": "é"} and len(pieces) > 3 and blocks[2]["input"] == {}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 20


def test_a_call_that_is_cut_off_or_none(client, says):
    says(CALL)
    events = streamed(client, tools=[TOOL], max_tokens=40)
    assert [one["type"] for one in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    says(CALL.replace('"é"', "é"))
    events = streamed(client, tools=[TOOL])
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    text = "".join(one["delta"].get("text", "") for one in events if "delta" in one)
    assert text == CALL.replace('"é"', "é")
    (block,) = asked(client, tools=[TOOL])["content"]
    assert block["text"] == text


def test_conversations_as_templates_take_them(client, engine):
    history = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "why", "signature": ""},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "x"}},
                {"type": "tool_use", "id": "2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "ok"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": "no", "is_error": True},
                {"type": "text", "text": "c"},
                {"type": "text", "text": "d"},
            ],
        },
    ]
    asked(client, messages=history, system=[{"type": "text", "text": "s"}], tools=[TOOL], max_tokens=1)
    tool = {"type": "function", "function": {"name": "f", "parameters": TOOL["input_schema"], "description": "d"}}
    assert prompt(engine) == (
        '[system:s][user:a][assistant:b|why(f {"a": "x"})(f {})][tool:ok][tool:Error:\nno][user:c\nd]'
        + json.dumps([tool])
    )


def test_an_answer_goes_on_with_a_last_message_of_the_assistant(client, engine):
    asked(client, messages=[*HI, {"role": "assistant", "content": "It is"}], max_tokens=1)
    assert prompt(engine) == "[user:hi][assistant:It is"


def test_what_the_system_says_later_is_shown_as_the_users(client, engine):
    """Most chat templates have one system message, at the beginning."""
    history = [*HI, {"role": "system", "content": "note"}, {"role": "user", "content": "go"}]
    asked(client, messages=history, system="s", max_tokens=1)
    assert prompt(engine) == "[system:s][user:hi\n<system-reminder>\nnote\n</system-reminder>\ngo]"
    asked(client, messages=[{"role": "system", "content": "s"}, *HI], max_tokens=1)
    assert prompt(engine) == "[system:s][user:hi]"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_where_the_context_does(engine, client, says, stream, monkeypatch):
    monkeypatch.setattr(engine, "burst", 500)
    says("the cat " * 4000)
    if stream:
        events = streamed(client, max_tokens=32_000)
        reason, count = events[-2]["delta"]["stop_reason"], events[-2]["usage"]["output_tokens"]
    else:
        answer = asked(client, max_tokens=32_000)
        reason, count = answer["stop_reason"], answer["usage"]["output_tokens"]
    assert reason == "model_context_window_exceeded" and count == engine.max_length - len(engine.prompts[-1])
    assert "has more tokens" in asked(client, 400, system="a b" * 40_000)["error"]["message"]


def test_tokens_are_counted_as_the_prompt_has_them(client, engine):
    fields = {"system": "s", "tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 2000}}
    counted = asked(client, path="/v1/messages/count_tokens", max_tokens=None, **fields)
    answer = asked(client, **fields, max_tokens=1)
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
    error = asked(client, 400, "/v1/messages/count_tokens", max_tokens=1)
    assert "'max_tokens' is no field of this endpoint" in error["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "shown", "ignored"),
    [
        ({"thinking": {"type": "disabled"}}, "False", None),
        ({"thinking": {"type": "adaptive"}}, "True", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True", "thinking.budget_tokens"),
        ({"output_config": {"effort": "xhigh"}}, "high", None),
        ({"context_management": {"edits": []}}, "", "context_management"),
    ],
)
def test_wishes_that_templates_may_know(client, engine, fields, shown, ignored):
    answer = client.post("/v1/messages", json={"model": "m", "max_tokens": 1, "messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    assert prompt(engine) == f"[user:hi]{shown}" and answer.headers.get("x-ignored-fields") == ignored


def test_a_wish_that_the_template_does_not_know_is_told():
    tokenizer = byte_level()
    with FakeEngine(tokenizer) as engine, serving(create_app(engine, "m")) as url:
        body = {"messages": HI, "max_tokens": 1, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
        answer = httpx.post(f"{url}/v1/messages", json=body)
        assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "thinking, output_config.effort"


def test_settings(client, engine):
    asked(client, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a"], max_tokens=9)
    found = engine.samplings[-1]
    assert (found.temperature, found.top_p, found.top_k, found.stop, found.max_tokens) == (0.5, 0.9, 7, ("a",), 9)
    form = {"type": "json_schema", "schema": {"type": "object"}}
    asked(client, output_config={"format": form}, max_tokens=1)
    assert 'answer: %json {"type": "object"' in engine.samplings[-1].grammar  # after reasoning


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "f"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
    ],
)
def test_choices_of_tools(client, engine, choice, grammar):
    asked(client, tools=[TOOL], tool_choice=choice, max_tokens=1)
    assert (engine.samplings[-1].grammar is not None) == grammar


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": ["hi"]}, "messages[0] must be an object"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role must be one of user, assistant"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content must be text or a list of parts"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "a part of type 'image': this server reads text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content.text must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, "half a surrogate"),
        ({"messages": [{"role": "user", "content": "a", "name": "x"}]}, "'name' is no field of messages[0]"),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}]},
            "which an answer cannot continue",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "is_error": 1}]}]},
            "is_error must be true or false",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 1}]}
                ]
            },
            "input of a tool_use must be an object",
        ),
        ({"system": 3}, "system must be text or a list of parts"),
        ({"system": [{"type": "text", "text": "a", "shema": 1}]}, "'shema' is no field of system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "which this server does not run"),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "parameters must be a JSON schema"),
        ({"tools": [{"name": 3}]}, "tools[0].name must be a string"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading is not there"),
        ({"tools": {}}, "tools must be a list"),
        ({"tool_choice": {"type": "auto", "x": 1}}, "'x' is no field of tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type must be one of auto, any, none, tool"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "which is not among the tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is required, and there are no tools"),
        ({"thinking": {"type": "on"}}, "thinking.type must be one of"),
        ({"thinking": True}, "thinking must be an object"),
        ({"output_config": {"effort": "most"}}, "output_config.effort must be one of"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be one of json_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config must be"),
        ({"stop_sequences": [""]}, "stop_sequences must not have an empty string"),
        ({"stop_sequences": 3}, "stop_sequences must be strings"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"max_tokens": "3"}, "max_tokens must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"service_tier": "priority"}, "service_tier is not there"),
        ({"container": "x"}, "container is not there"),
        ({"n": 2}, "'n' is no field of this endpoint"),
        ({"messages": [*HI] * 5000}, "a request may have 4,096"),
    ],
)
def test_what_is_wrong_is_told_as_anthropics_api_does(client, fields, says):
    error = asked(client, 400, **fields)
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert says in error["error"]["message"], error


def test_errors_of_other_kinds(engine, client):
    assert asked(client, 404, model="other")["error"]["type"] == "not_found_error"
    answer = client.post("/v1/messages", content="{", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/messages/batches").json()["error"]["type"] == "not_found_error"
    with serving(create_app(engine, "m", api_key="k")) as url:
        answer = httpx.post(f"{url}/v1/messages", json={"messages": HI})
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(("fail_at", "before"), [(0, ""), (2, "hi")])
def test_an_error_of_a_stream_is_its_last_event(fail_at, before):
    with (
        FakeEngine(byte_level(), fail_at=fail_at, answer="hi the cat") as engine,
        serving(create_app(engine, "m")) as url,
        httpx.Client(base_url=url) as client,
    ):
        *events, error = streamed(client)
    assert error["error"]["type"] == "api_error" and "told to fail" in error["error"]["message"]
    assert "".join(one["delta"]["text"] for one in events if "delta" in one) == before


def test_unknown_fields_may_be_left_out(engine):
    with serving(create_app(engine, "m", ignore_unknown_fields=True)) as url:
        body = {"messages": [{**HI[0], "x": 1}], "max_tokens": 1, "betas": [], "beta": 1, "tools": [{**TOOL, "y": 1}]}
        answer = httpx.post(f"{url}/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == "betas, beta, messages.0.x, tools.0.y"


def test_silent_times_have_pings(monkeypatch):
    from hf_sparsekv_serve.http import answers

    monkeypatch.setattr(answers, "TICK_S", 0.02)
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 0.05)
    with (
        FakeEngine(byte_level(), step_s=0.3, answer="the") as engine,
        serving(create_app(engine, "m")) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        events = [one["type"] for one in streamed(client)]
    assert events.count("ping") > 2
