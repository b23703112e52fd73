"""The server through LangChain's own client: answers, streams, counts, tools; an engine that echoes in its place."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from http_server import serving
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import create_app

REASON = "needs LangChain's client: pip install langchain-openai"
langchain_openai = pytest.importorskip("langchain_openai", reason=REASON)
CHAT = """{{ tools | tojson if tools }}{% if not messages %}<tool_call>{"arguments": 1}</tool_call>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = 'See.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(params=["See the cat", CALL], ids=["text", "call"])
def chat(request):
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT
    with FakeEngine(tokenizer, answer=request.param) as engine, serving(create_app(engine, "m")) as url:
        options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "max_tokens": 90}
        yield langchain_openai.ChatOpenAI(model="m", **options), engine, request.param


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def test_answers_streams_and_tools(chat):
    client, engine, text = chat
    plain = client.invoke("hi")
    assert plain.content == text and plain.usage_metadata["input_tokens"] > 0
    pieces = list(client.stream("hi"))
    assert "".join(piece.content for piece in pieces) == text and len(pieces) > 2
    tooled = client.bind_tools([weather])
    answer = tooled.invoke("hi")
    assert answer.content == text.partition("<")[0]
    if text != CALL:
        assert not answer.tool_calls
        return
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    first, *others = tooled.stream("hi")
    whole = sum(others, start=first)
    assert [one["args"] for one in whole.tool_calls] == [{"city": "Oslo"}]
    messages = [("user", "hi"), answer, {"role": "tool", "tool_call_id": call["id"], "content": weather("Oslo")}]
    tooled.invoke(messages)
    prompt = byte_level().decode(engine.prompts[-1])
    assert '{"city": "Oslo"}' in prompt and prompt.endswith("rain in Oslo<|im_start|>assistant\n")


def test_what_the_server_refuses_is_told(chat):
    client, _, _ = chat
    with pytest.raises(Exception, match="'reasoning_effort' is no field of this endpoint"):
        client.bind(reasoning_effort="low").invoke("hi")
