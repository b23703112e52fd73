"""Reasoning, and calls that are written with special tokens, over HTTP."""

from __future__ import annotations

import json

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from tokenizers import AddedToken
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import create_app

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
SHOWS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ tools }}"
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": "b"}'
)


def asked(url: str, stream: bool, **fields) -> tuple[dict, str]:
    """A message and its finish reason, of a stream put together."""
    body = {"messages": HI, "stream": stream, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        choice = answer.json()["choices"][0]
        return choice["message"], choice["finish_reason"]
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    for line in answer.text.split("\n"):
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            for name in ("content", "reasoning_content"):
                message[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(call)
                else:
                    message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message, choice["finish_reason"]


def special(*tokens: str):
    made = byte_level()
    made.add_special_tokens({"additional_special_tokens": [AddedToken(one, special=True) for one in tokens]})
    return made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_is_split_with_and_without_tools(stream, tools, begun):
    tokenizer = byte_level()
    tokenizer.chat_template = SHOWS + "{# <tool_call> </tool_call> arguments <think> </think> #}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}" if begun else ""
    answer = "<think>\n" * (not begun) + "Hm,  yes.\n</think>\n\nThe cat."
    with FakeEngine(tokenizer, answer=answer) as engine, serving(create_app(engine, "m")) as url:
        message, reason = asked(url, stream, **({} if tools is None else {"tools": tools}))
        assert (message["reasoning_content"], message["content"], reason) == ("Hm,  yes.", "The cat.", "stop")
        message, reason = asked(url, stream, max_tokens=8)
        assert not message["content"] and message["reasoning_content"] and reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_after_a_schema_is_no_reasoning(stream):
    """The template has begun the reasoning and ended it, so that the schema bars it."""
    tokenizer = byte_level()
    tokenizer.chat_template = SHOWS + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}"
    with FakeEngine(tokenizer, answer='{"a": 1}') as engine, serving(create_app(engine, "m")) as url:
        message, _ = asked(url, stream, response_format={"type": "json_object"})
        assert message["content"] == '{"a": 1}' and not message.get("reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_begins_after_the_reasoning(stream):
    tokenizer = byte_level()
    tokenizer.chat_template = SHOWS + "{# </think> #}{% if add_generation_prompt %}<think>\n{% endif %}"
    answer = 'Hm.\n</think>\n\n{"a": 1}'
    with FakeEngine(tokenizer, answer=answer) as engine, serving(create_app(engine, "m")) as url:
        message, _ = asked(url, stream, response_format={"type": "json_object"})
        assert (message["content"], message["reasoning_content"]) == ('{"a": 1}', "Hm.")


@pytest.mark.parametrize("stream", [False, True])
def test_channels_are_special_tokens(stream):
    tokenizer = special("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|call|>", "<|return|>")
    tokenizer.eos_token = "<|return|>"
    tokenizer.chat_template = SHOWS + "{# <|channel|><|message|> #}"
    with FakeEngine(tokenizer, answer=HARMONY) as engine, serving(create_app(engine, "m")) as url:
        engine.eos = frozenset({*engine.eos, tokenizer.convert_tokens_to_ids("<|call|>")})
        message, reason = asked(url, stream, tools=TOOLS)
        assert message["reasoning_content"] == "Hm." and not message["content"] and reason == "tool_calls"
        assert [one["function"] for one in message["tool_calls"]] == [{"name": "f", "arguments": '{"a": "b"}'}]
        shown = {tokenizer.convert_ids_to_tokens(one) for one in engine.samplings[-1].text_tokens}
        assert shown == {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>"}


def test_other_special_tokens_stay_out_of_the_text():
    tokenizer = special("[TOOL_CALLS]", "[ARGS]", "<|other|>")
    tokenizer.chat_template = SHOWS + "{# [TOOL_CALLS] #}"
    answer = "<|other|>See.[TOOL_CALLS]f[ARGS]{}"
    with FakeEngine(tokenizer, answer=answer) as engine, serving(create_app(engine, "m")) as url:
        assert asked(url, False)[0]["content"] == "See.f{}"
        message, _ = asked(url, False, tools=TOOLS)
        assert message["content"] == "See." and message["tool_calls"][0]["function"]["name"] == "f"
        assert len(message["tool_calls"][0]["id"]) == 9


def test_log_probabilities_of_a_stream_are_all_told():
    """They go with the next chunk, where tokens are part of a mark."""
    from hf_sparsekv.serving.request import Logprob, Output
    from hf_sparsekv.serving.sampling import Sampling
    from hf_sparsekv_serve.http.logprobs import TokenTexts
    from hf_sparsekv_serve.http.schema import Asked
    from hf_sparsekv_serve.http.shapes import Chat
    from hf_sparsekv_serve.http.tools import Reading, Style

    tokenizer = byte_level()
    reading = Reading(tokenizer, Style("hermes", None), TOOLS, [])
    shape = Chat("m", Asked(None, [], sampling=Sampling(logprobs=0)), reading, TokenTexts(tokenizer))
    text = 'a<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    chunks = [chunk for i, one in enumerate(text) for chunk in shape.text(0, one, [Logprob(i, -1.0, ())])]
    chunks += shape.last(0, Output(text, tuple(range(len(text))), "stop", 1))
    told = [one["choices"][0]["logprobs"] for one in chunks]
    assert sum(len(one["content"]) for one in told if one) == len(text)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ m.reasoning_content }}", "[why]"),
        ("{% set message = m %}{% if 'thinking' in message %}{{ message.thinking }}{% endif %}", "[why]"),
        ("{% set message = m %}{{ message['reasoning'] }}", "[why]"),
        ("{{ m.content }}", "[yes]"),
    ],
)
def test_reasoning_of_the_history_goes_into_templates_that_know_it(template, shown):
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}[" + template + "]{% endfor %}"
    history = [*HI, {"role": "assistant", "content": "yes", "reasoning_content": "why"}]
    with FakeEngine(tokenizer) as engine, serving(create_app(engine, "m")) as url:
        body = {"messages": [*history, *HI], "max_tokens": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        assert shown in tokenizer.decode(engine.prompts[-1])


def test_arguments_of_the_history_for_templates_that_add_them_to_texts():
    tokenizer = byte_level()
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '(' + c.function.arguments + ')' }}{% endfor %}"
        "{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  "é"}'}}
    history = [*HI, {"role": "assistant", "tool_calls": [call]}]
    with FakeEngine(tokenizer) as engine, serving(create_app(engine, "m")) as url:
        body = {"messages": history, "max_tokens": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        assert tokenizer.decode(engine.prompts[-1]) == '({"a": "é"})'


def test_a_form_that_is_named():
    tokenizer = byte_level()
    tokenizer.chat_template = SHOWS
    answer = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    with FakeEngine(tokenizer, answer=answer) as engine:
        with serving(create_app(engine, "m", tool_format="qwen")) as url:
            assert asked(url, False, tools=TOOLS)[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
        with serving(create_app(engine, "m")) as url:
            refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI, "tools": TOOLS})
            assert refused.status_code == 400 and "name the form by --tool-format" in refused.text
        with pytest.raises(ValueError, match=r"tool_format must be one of harmony, .*, template, got 'xml'"):
            create_app(engine, "m", tool_format="xml")
