"""OpenAI's ``/v1/responses``: its own client's types parse every event, and nothing is stored."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from http_server import openai_client, serving
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import create_app

SHOWS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ '|' ~ m.reasoning_content if m.reasoning_content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}]"
    "{% endfor %}{{ tools | tojson if tools }}{{ enable_thinking }}{{ reasoning_effort }}"
    "{# <tool_call> </tool_call> <think> </think> #}"
)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
SPACE = {"type": "namespace", "name": "s", "tools": [{**TOOL, "name": "g"}]}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
ANSWER = f"<think>Hm.</think>\n\nSee.\n{CALL}"


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_level()
    tokenizer.chat_template = SHOWS
    with FakeEngine(tokenizer, max_length=4000) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    with serving(create_app(engine, "m")) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai_client(url) as client:
        yield client


@pytest.fixture
def says(engine):
    """Sets what the engine answers."""

    def set_to(text: str) -> None:
        engine.answer = [*byte_level()(text)["input_ids"], engine.tokenizer.eos_token_id]

    yield set_to
    engine.answer = None


def asked(url: str, status: int = 200, **fields) -> dict:
    text = json.dumps({"model": "m", "input": "hi", **fields})
    answer = httpx.post(f"{url}/v1/responses", content=text, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    return answer.json()


def streamed(url: str, **fields) -> list[dict]:
    """Events, whose names are those of their data, numbered, each of a type that the client knows."""
    answer = httpx.post(f"{url}/v1/responses", json={"model": "m", "input": "hi", "stream": True, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        if not block.startswith(":"):
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}" and found[-1]["sequence_number"] == len(found) - 1
            known = TypeAdapter(ResponseStreamEvent).validate_python(found[-1])
            assert known.type == found[-1]["type"] and "Unknown" not in type(known).__name__
    return found


def prompt(engine) -> str:
    return engine.tokenizer.decode(engine.prompts[-1])


def test_a_response(client, engine, says):
    says("the cat")
    answer = client.responses.create(model="m", input="hi", instructions="be brief", store=True, metadata={"a": "b"})
    Response.model_validate(answer.model_dump(), strict=False)
    assert (answer.output_text, answer.status, answer.object, answer.metadata) == (
        "the cat",
        "completed",
        "response",
        {"a": "b"},
    )
    assert answer.model_dump()["store"] is False and answer.id.startswith("resp_")
    assert answer.usage.input_tokens == len(engine.prompts[-1]) and answer.usage.output_tokens == 3
    assert answer.usage.total_tokens == answer.usage.input_tokens + 3
    assert prompt(engine) == "[system:be brief][user:hi]"


def test_items_of_an_answer(client, says):
    says(ANSWER)
    answer = client.responses.create(model="m", input="hi", tools=[TOOL])
    thought, message, call = answer.output
    assert thought.type == "reasoning" and [one.text for one in thought.content] == ["Hm."]
    assert message.content[0].text == "See." and message.status == "completed"
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "f", {"a": "é"})
    assert call.call_id.startswith("call_") and answer.usage.output_tokens_details.reasoning_tokens == 3


def test_an_answer_that_is_cut(client, says):
    says("the cat says")
    answer = client.responses.create(model="m", input="hi", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete" and answer.output_text == "the cat"
    says("")
    assert client.responses.create(model="m", input="hi").output[0].content[0].text == ""


def test_events_of_a_stream(url, says):
    says(ANSWER)
    events = streamed(url, tools=[TOOL])
    kinds = [one["type"].removeprefix("response.") for one in events]
    shown = [kind for i, kind in enumerate(kinds) if not i or kind != kinds[i - 1]]
    assert shown == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done and [one["type"] for one in done] == [
        "reasoning",
        "message",
        "function_call",
    ]
    texts = {}
    for one in events:
        if one["type"].endswith(".delta"):
            texts[one["item_id"]] = texts.get(one["item_id"], "") + one["delta"]
    assert list(texts.values()) == ["Hm.", "See.", '{"a": "é"}']
    assert [one["id"] for one in done] == list(texts)


def test_the_clients_own_stream(client, says):
    says(ANSWER)
    with client.responses.stream(model="m", input="hi", tools=[TOOL]) as stream:
        kinds = [one.type for one in stream]
        answer = stream.get_final_response()
    assert kinds.count("response.output_item.done") == 3 and answer.output_text == "See."
    with client.responses.create(model="m", input="hi", stream=True, max_output_tokens=2) as stream:
        assert [one.type for one in stream][-1] == "response.incomplete"


def test_a_call_that_is_cut_off_or_none(url, says):
    says(CALL)
    last = streamed(url, tools=[TOOL], max_output_tokens=40)[-1]
    assert last["type"] == "response.incomplete" and last["response"]["output"][0]["status"] == "incomplete"
    says(CALL.replace('"é"', "é"))
    response = streamed(url, tools=[TOOL])[-1]["response"]
    assert [one["status"] for one in response["output"]] == ["incomplete", "completed"]
    assert response["output"][1]["content"][0]["text"] == CALL.replace('"é"', "é")
    (item,) = asked(url, tools=[TOOL])["output"]
    assert item["content"][0]["text"] == CALL.replace('"é"', "é")


def test_turns_as_the_client_sends_them_back(client, engine, says):
    says(ANSWER)
    first = client.responses.create(model="m", input="hi", tools=[TOOL])
    call = first.output[-1]
    again = [{"role": "user", "content": "hi"}, *first.output]
    again += [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"}]
    again += [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
    client.responses.create(model="m", input=again, tools=[TOOL])
    tool = {"type": "function", "function": {name: TOOL[name] for name in ("name", "parameters")}}
    assert prompt(engine) == '[user:hi][assistant:See.|Hm.(f {"a": "é"})][tool:ok][user:a\nb]' + json.dumps([tool])


def test_what_developers_say_first_is_one_message(url, engine):
    said = [{"role": "developer", "content": "b"}, {"role": "system", "content": "c"}, {"role": "user", "content": "d"}]
    asked(url, instructions="a", input=[*said, {"role": "developer", "content": "e"}], max_output_tokens=1)
    assert prompt(engine) == "[system:a\n\nb\n\nc][user:d][system:e]"


def test_tools_of_a_namespace_have_both_names(url, engine, says):
    says(CALL.replace('"f"', '"s__g"'))
    answer = asked(url, tools=[TOOL, SPACE])
    call = answer["output"][0]
    assert (call["namespace"], call["name"]) == ("s", "g")
    item = next(one["item"] for one in streamed(url, tools=[SPACE]) if one["type"] == "response.output_item.added")
    assert (item["namespace"], item["name"]) == ("s", "g")
    output = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": [{"type": "input_text", "text": "x"}],
    }
    asked(url, input=[{"role": "user", "content": "hi"}, call, output], tools=[SPACE], max_output_tokens=1)
    assert '(s__g {"a": "é"})][tool:x]' in prompt(engine)
    asked(url, tools=[SPACE], tool_choice={"type": "function", "name": "g", "namespace": "s"}, max_output_tokens=1)
    assert '"s__g"' in engine.samplings[-1].grammar.replace("\\", "")


@pytest.mark.parametrize(
    ("fields", "shown", "ignored"),
    [
        ({"reasoning": {"effort": "none"}}, "False", None),
        ({"reasoning": {"effort": "minimal", "summary": "auto"}}, "low", None),
        ({"text": {"verbosity": "low"}}, "", "text.verbosity"),
        ({"tools": [{"type": "web_search", "external_web_access": False}]}, "", "tools.0"),
        ({"include": ["reasoning.encrypted_content"], "client_metadata": {"a": "b"}}, "", None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "True", None),
    ],
)
def test_wishes(url, engine, fields, shown, ignored):
    answer = httpx.post(f"{url}/v1/responses", json={"input": "hi", "max_output_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    assert prompt(engine) == f"[user:hi]{shown}" and answer.headers.get("x-ignored-fields") == ignored


def test_settings(url, engine):
    asked(url, temperature=0.5, top_p=0.9, max_output_tokens=9, seed=3, stop=["a"])
    found = engine.samplings[-1]
    assert (found.temperature, found.top_p, found.max_tokens, found.seed, found.stop) == (0.5, 0.9, 9, 3, ("a",))
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    asked(url, text={"format": form}, max_output_tokens=1)
    assert 'answer: %json {"type": "object"' in engine.samplings[-1].grammar  # after reasoning
    asked(url, text={"format": {"type": "text"}}, max_output_tokens=1)
    assert engine.samplings[-1].json_schema is None


CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}
THOUGHT = {"type": "reasoning", "summary": [], "encrypted_content": "x"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not there: this server stores no responses"),
        ({"conversation": "c"}, "conversation is not there: this server stores no responses"),
        (
            {"input": [{"type": "item_reference", "id": "1"}]},
            "is a reference, which is not there: this server stores no",
        ),
        ({"background": True}, "background is not there"),
        ({"input": []}, "input must be text or a list of items"),
        ({"input": None}, "input must be text or a list of items"),
        ({"input": [3]}, "input[0] is an item of type"),
        ({"input": [{"type": "computer_call"}]}, "input[0] is an item of type 'computer_call'"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role must be one of"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "a part of type 'input_image'"),
        ({"input": [{"role": "user", "content": "\ud800"}]}, "half a surrogate"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "'x' is no field of input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output must be text"),
        ({"input": [CALLED]}, "arguments of 'f' are not JSON"),
        ({"input": [{**CALLED, "arguments": {}}]}, "input[0].arguments must be a string"),
        ({"input": [THOUGHT]}, "input[0].encrypted_content is another server's"),
        ({"tools": [{"type": "file_search"}]}, "tools[0] is a tool of type 'file_search'"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0] is a tool of type 'custom'"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0].tools[0] must be an object"),
        ({"tools": [{"type": "function"}]}, "tools[0].name must be a string"),
        ({"tools": [{**TOOL, "paramters": {}}]}, "'paramters' is no field of tools[0]: did you mean parameters?"),
        ({"tools": "f"}, "tools must be a list"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "which is not among the tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice must be auto, none, required"),
        ({"tool_choice": 3}, "tool_choice must be"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort must be one of none, minimal"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type must be one of text, json_object, json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text must be"),
        ({"include": ["web_search_call.action.sources"]}, "include has 'web_search_call.action.sources'"),
        ({"include": "x"}, "include must be a list"),
        ({"metadata": {"a": 1}}, "metadata must have texts"),
        ({"metadata": {"a": "b" * 513}}, "metadata must have texts"),
        ({"metadata": []}, "metadata must be an object"),
        ({"truncation": "auto"}, "truncation is not there"),
        ({"top_logprobs": 3}, "top_logprobs is not there"),
        ({"max_output_tokens": 0}, "max_output_tokens must be"),
        ({"temperature": 1000}, "temperature must be"),
        ({"store": "yes"}, "store must be true or false"),
        ({"stream": 1}, "stream must be true or false"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false"),
        ({"messages": []}, "'messages' is no field of this endpoint"),
        ({"n": 2}, "'n' is no field of this endpoint"),
        ({"instructions": 3}, "instructions must be text"),
        ({"input": [{"role": "user", "content": "a"}] * 5000}, "a request may have 4,096"),
    ],
)
def test_what_is_wrong_is_told(url, fields, says):
    error = asked(url, 400, **fields)["error"]
    assert says in error["message"] and error["type"] == "invalid_request_error", error


def test_nothing_is_stored(client):
    with pytest.raises(openai.NotFoundError, match="this server stores no responses"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError, match="Send the whole conversation as input"):
        client.responses.create(model="m", input="hi", previous_response_id="resp_1")


@pytest.mark.parametrize(("fail_at", "before"), [(0, ""), (2, "hi")])
def test_an_error_of_a_stream_is_its_last_event(fail_at, before):
    with (
        FakeEngine(byte_level(), fail_at=fail_at, answer="hi the cat") as engine,
        serving(create_app(engine, "m")) as url,
    ):
        *events, failed = streamed(url)
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert "told to fail" in failed["response"]["error"]["message"]
    assert "".join(one.get("delta", "") for one in events) == before


def test_unknown_fields_may_be_left_out(engine):
    with serving(create_app(engine, "m", ignore_unknown_fields=True)) as url:
        body = {"input": [{"role": "user", "content": "a", "x": 1}], "y": 1, "max_output_tokens": 1}
        answer = httpx.post(f"{url}/v1/responses", json=body)
        assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "y, input.0.x"
