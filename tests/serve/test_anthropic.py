"""Anthropic's own client against the server: its types parse every event and answer."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from http_server import serving
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import create_app

anthropic = pytest.importorskip("anthropic", reason="needs Anthropic's client: pip install anthropic")

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
HI = [{"role": "user", "content": "hi"}]
CALL = '<think>Hm.</think>See.<tool_call>{"name": "f", "arguments": {"a": "é", "b": [1, 2]}}</tool_call>'


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_level()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls }}]{% endfor %}"
        "{{ tools }}{# <tool_call> </tool_call> arguments <think> </think> #}"
    )
    with FakeEngine(tokenizer, answer=CALL, max_length=3000) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    with serving(create_app(engine, "m", api_key="k")) as url:
        yield anthropic.Anthropic(base_url=url, auth_token="k", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_with_a_tool(client, engine, stream):
    asked = {"model": "m", "max_tokens": 300, "messages": HI, "tools": [TOOL], "system": "s"}
    if stream:
        with client.messages.stream(**asked) as events:
            kinds = {one.type for one in events}
            answer = events.get_final_message()
        assert kinds >= {"message_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"}
    else:
        answer = client.messages.create(**asked)
    thought, text, call = answer.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "Hm.", "See.")
    assert (call.type, call.name, call.input) == ("tool_use", "f", {"a": "é", "b": [1, 2]})
    assert answer.stop_reason == "tool_use" and answer.usage.output_tokens > 10
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "ok"}]}
    history = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    client.messages.create(**{**asked, "messages": history})
    assert "[tool:ok" in engine.tokenizer.decode(engine.prompts[-1])


def test_raw_events_are_of_the_types_that_the_client_knows(client):
    stream = client.messages.create(model="m", max_tokens=300, messages=HI, tools=[TOOL], stream=True)
    for event in stream:
        type(event).model_validate(event.model_dump(), strict=True)


def test_counting(client):
    assert client.messages.count_tokens(model="m", messages=HI, tools=[TOOL]).input_tokens > 10


def test_errors(client, engine):
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'x' here"):
        client.messages.create(model="x", max_tokens=3, messages=HI)
    with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
        client.messages.create(model="m", max_tokens=0, messages=HI)
    engine.fail_at = 3
    try:
        with pytest.raises(anthropic.APIStatusError, match="told to fail"):
            list(client.messages.create(model="m", max_tokens=9, messages=HI, stream=True))
    finally:
        engine.fail_at = None


def test_a_stop_sequence(client):
    answer = client.messages.create(model="m", max_tokens=30, messages=HI, stop_sequences=["Hm"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Hm")
