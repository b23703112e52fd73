"""The server through OpenAI's own client: answers, streams, usage, limits; an engine that echoes in its place."""

from __future__ import annotations

import json
import time

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from http_server import openai_client, serving
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers_made import TOOL_CHAT, byte_level

from hf_sparsekv.serving.sampling import Sampling
from hf_sparsekv_serve.http import create_app

HI = [{"role": "user", "content": "hi the cat"}]
RENDERED = "<|user|>hi the cat<|assistant|>"  # the first and last are special tokens, which have no text


@pytest.fixture(scope="module")
def url(engine):
    with serving(create_app(engine, "fake/model")) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai_client(url) as client:
        yield client


def ids(text: str) -> list[int]:
    return byte_level()(text)["input_ids"]


def test_chat(client, engine):
    answer = client.chat.completions.create(model="fake/model", messages=HI, max_tokens=7)
    assert engine.prompts[-1] == ids(RENDERED)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hi the cat", "length")
    assert answer.object == "chat.completion" and answer.model == "fake/model" and answer.id.startswith("chatcmpl-")
    assert abs(answer.created - time.time()) < 60
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 7, 14)
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream_has_the_same_text_and_usage_at_the_end(client):
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 20}
    chunks = list(client.chat.completions.create(model="fake/model", messages=HI, **options))
    whole = client.chat.completions.create(model="fake/model", messages=HI, max_tokens=20)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks[:-1])
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


def test_the_bytes_of_a_stream(url):
    body = {"messages": HI, "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache" and "content-length" not in response.headers
        events = [part for part in response.read().decode().split("\n\n") if part]
    comment, *events = events
    assert comment == ": begun"
    assert all(event.startswith("data: ") and "\n" not in event for event in events) and events[-1] == "data: [DONE]"
    assert not any("usage" in json.loads(event[6:]) for event in events[:-1])


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("the cat ", ["the cat the cat"]),
        (ids("the cat "), ["the cat the cat"]),
        (["ab", "日本c"], ["ababa", "日本c日本"]),
        ([ids("ab"), ids("xyz")], ["ababa", "xyzxy"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_text_and_ids_and_lists_of_them(client, prompt, texts, stream):
    answer = client.completions.create(model="fake/model", prompt=prompt, max_tokens=5, stream=stream)
    if not stream:
        found = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))
        assert answer.usage.completion_tokens == 5 * len(texts) and answer.id.startswith("cmpl-")
    else:
        found, ends = [""] * len(texts), []
        for chunk in answer:
            choice = chunk.choices[0]
            found[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason == "length" else []
        assert sorted(ends) == list(range(len(texts)))
    assert found == texts


def test_settings_reach_the_engine_and_defaults_are_openais(client, engine):
    client.completions.create(model="fake/model", prompt="ab")
    assert engine.samplings[-1] == Sampling(max_tokens=16)
    client.chat.completions.create(model="fake/model", messages=HI, max_completion_tokens=3, stop="x")
    assert engine.samplings[-1] == Sampling(max_tokens=3, stop=("x",))
    extra = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "ignore_eos": True, "exact": False}
    named = {"temperature": 0, "top_p": 0.5, "seed": -4, "stop": ["q", "w"], "max_tokens": 2, "user": "me"}
    client.completions.create(model="fake/model", prompt="ab", extra_body=extra, **named)
    named.pop("user")
    assert engine.samplings[-1] == Sampling(**named, **extra)
    client.completions.create(model="fake/model", prompt="ab", extra_body={"top_k": -1})
    assert engine.samplings[-1].top_k == 0


def test_an_answer_may_take_what_is_left_of_the_context_or_the_servers_limit(engine, monkeypatch):
    with serving(create_app(engine, "m", max_answer=None)) as url:
        body = {"messages": [{"role": "user", "content": "a" * 990}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
        assert answer["usage"]["total_tokens"] == engine.max_length and answer["usage"]["completion_tokens"] == 8
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 995}).json()
        assert answer["usage"]["completion_tokens"] == 5
    with serving(create_app(engine, "m")) as url, monkeypatch.context() as patch:
        for share, kind, expected in (
            *((600, "total", 600), (5000, "total", engine.max_length)),
            *((4, "completion", 2), (1, "completion", 1)),
        ):
            patch.setattr(engine, "tokens_per_row", share)
            answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI}).json()
            assert answer["usage"][f"{kind}_tokens"] == expected
    with serving(create_app(engine, "m", max_answer=4)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI}).json()
        assert answer["usage"]["completion_tokens"] == 4


def test_fields_that_change_nothing_are_taken(url):
    neutral = {
        "n": 1, "best_of": 1, "echo": False, "suffix": "", "logprobs": None, "logit_bias": {}, "presence_penalty": 0.0,
        "frequency_penalty": 0, "stop": None, "seed": None, "stream": False, "stream_options": None, "nothing": None,
        "store": True, "top_logprobs": 0, "service_tier": "auto", "metadata": {"run": "7"}, "user": "me",
        "safety_identifier": "me",
        "prompt_cache_key": "mine", "min_tokens": 0, "stop_token_ids": [], "skip_special_tokens": True,
        "include_stop_str_in_output": False, "use_beam_search": False,
    }  # fmt: skip
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", **neutral})
    assert response.status_code == 200, response.text
    neutral = {"logprobs": False, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI, "max_tokens": 2, **neutral})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_logprobs", 5),  # of chats
        ("service_tier", "flex"),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("use_beam_search", True),
    ],
)
def test_fields_of_openais_and_vllms_that_would_change_something_are_refused(client, field, value):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fake/model", prompt="ab", extra_body={field: value})
    assert refused.value.param == field and refused.value.code == "unsupported_parameter"


def test_options_of_a_stream(client):
    options = {"model": "fake/model", "messages": HI, "max_tokens": 3, "stream": True}
    for neutral in ({"include_obfuscation": False}, {"continuous_usage_stats": False}, {"include_usage": None}):
        chunks = list(client.chat.completions.create(**options, stream_options=neutral))
        assert chunks[-1].choices and all(chunk.usage is None for chunk in chunks)
    with pytest.raises(openai.BadRequestError, match=r"stream_options\.include_obfuscation is not there"):
        client.chat.completions.create(**options, stream_options={"include_obfuscation": True})
    chunks = list(
        client.completions.create(
            model="fake/model", prompt=["ab", "c"], max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 6, 9)


def test_answers_have_the_fields_that_openai_documents(client, url):
    """OpenAI's client takes whatever comes; its types, which are the documentation, are checked here."""
    body = {"messages": HI, "max_tokens": 3}
    ChatCompletion.model_validate(httpx.post(f"{url}/v1/chat/completions", json=body).json(), strict=True)
    Completion.model_validate(httpx.post(f"{url}/v1/completions", json={"prompt": "ab"}).json(), strict=True)
    Model.model_validate(httpx.get(f"{url}/v1/models/fake/model").json(), strict=True)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = httpx.post(f"{url}/v1/chat/completions", json=body).text.split("\n\n")
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    chunks = [ChatCompletionChunk.model_validate(one, strict=True) for one in data]
    assert len(chunks) >= 4 and all("usage" in one for one in data)  # null in all but the last
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "length"]
    with client.chat.completions.stream(model="fake/model", messages=HI, max_tokens=50, stop="cat") as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model="fake/model", messages=HI, max_tokens=50, stop="cat")
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("hi the ", "stop")


def test_a_stop_string_ends_an_answer_and_is_not_shown(client):
    for stream in (False, True):
        options = {"prompt": "one two three ", "max_tokens": 200, "stop": ["thr", "never"], "stream": stream}
        answer = client.completions.create(model="fake/model", **options)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == "one two "
        assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "text"), [("<|user|>", "ab"), ("b<|user|>c", "a"), (["x", "<|end|>"], "abc")])
def test_a_special_token_that_a_stop_string_names_ends_an_answer(client, stop, text, stream):
    """The end token, too, where it does not end answers by itself."""
    prompt = ids("ab<|user|>c<|end|>d")
    body = {"ignore_eos": True}
    answer = client.completions.create(
        model="fake/model", prompt=prompt, max_tokens=50, stop=stop, stream=stream, extra_body=body
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == text and choices[-1].finish_reason == "stop"
    messages = [{"role": "user", "content": "cat"}]  # the fake engine answers with the prompt
    answer = client.chat.completions.create(model="fake/model", messages=messages, stop="<|assistant|>", stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    texts = [choice.delta.content or "" for choice in choices] if stream else [choices[0].message.content]
    assert "".join(texts) == "cat" and choices[-1].finish_reason == "stop"


def test_conversations_as_templates_take_them(client, engine):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "é", "refusal": None, "annotations": None},
    ]
    client.chat.completions.create(model="fake/model", messages=messages, max_tokens=1)
    assert byte_level().decode(engine.prompts[-1]) == "<|system|>be brief<|user|>a\nb<|assistant|>é<|assistant|>"


def test_models(client, engine):
    listed = client.models.list().data
    assert [model.id for model in listed] == ["fake/model"] and listed[0].max_model_len == engine.max_length
    assert client.models.retrieve("fake/model") == listed[0]
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4' here"):
        client.models.retrieve("gpt-4")


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALLS = 'See.<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.fixture(scope="module")
def tool_client():
    tokenizer = byte_level()
    tokenizer.chat_template = TOOL_CHAT
    with (
        FakeEngine(tokenizer, answer=CALLS) as engine,
        serving(create_app(engine, "m")) as url,
        openai_client(url) as client,
    ):
        client.engine = engine
        yield client


@pytest.mark.parametrize("stop", [None, ["zz"]])
def test_tool_calls_are_read(tool_client, stop):
    answer = tool_client.chat.completions.create(model="m", messages=HI, tools=TOOLS, stop=stop)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "See."
    call = choice.message.tool_calls[0]
    assert call.id.startswith("call_") and call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    again = [*HI, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    tool_client.chat.completions.create(model="m", messages=again, tools=TOOLS)
    assert '{"city": "Köln"}See.<|im_start|>tool\n' in byte_level().decode(tool_client.engine.prompts[-1])


def test_tool_calls_of_a_stream_come_as_they_are_written(tool_client):
    chunks = list(tool_client.chat.completions.create(model="m", messages=HI, tools=TOOLS, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True), strict=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "See."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls[:1]] == [(0, "weather")] and len(calls) > 5
    assert calls[0].id.startswith("call_") and all(call.index == 0 and call.id is None for call in calls[1:])
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Köln"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_first_call_if_calls_may_not_be_parallel(tool_client, stream):
    engine = tool_client.engine
    before, engine.answer = engine.answer, ids(CALLS * 2 + "<|end|>")
    asked = {"model": "m", "messages": HI, "tools": TOOLS, "parallel_tool_calls": False, "stream": stream}
    try:
        answer = tool_client.chat.completions.create(**asked)
        messages = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
        calls = [call for one in messages for call in one.tool_calls or []]
        assert len({call.id for call in calls if call.id}) == 1
        assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Köln"}
    finally:
        engine.answer = before


def test_an_answer_that_is_no_call_is_text(tool_client):
    engine = tool_client.engine
    before, engine.answer = engine.answer, ids("no call<tool_call>{broken</tool_call><|end|>")
    try:
        choice = tool_client.chat.completions.create(model="m", messages=HI, tools=TOOLS).choices[0]
        assert choice.message.content == "no call<tool_call>{broken</tool_call>" and choice.finish_reason == "stop"
        engine.answer = ids("just text<|end|>")
        choice = tool_client.chat.completions.create(model="m", messages=HI, tools=TOOLS).choices[0]
        assert choice.message.content == "just text" and choice.message.tool_calls is None
    finally:
        engine.answer = before
    without = tool_client.chat.completions.create(model="m", messages=HI).choices[0]
    assert without.message.content == CALLS and without.finish_reason == "stop"


def test_variables_of_the_template(engine):
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ 'thinking' if enable_thinking else 'not' }}"
    with FakeEngine(tokenizer) as engine, serving(create_app(engine, "m")) as url:
        for value, text in ((True, "thinking"), (False, "not")):
            body = {"messages": HI, "chat_template_kwargs": {"enable_thinking": value}, "max_tokens": 1}
            assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
            assert tokenizer.decode(engine.prompts[-1]) == text


def test_reasoning_effort_is_a_variable_of_the_template(engine):
    """As vLLM has it. A template that does not know it would leave it out: that is refused, or the client is told."""
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ 'effort ' ~ reasoning_effort }}"
    with FakeEngine(tokenizer) as engine, serving(create_app(engine, "m", ignore_unknown_fields=True)) as url:
        body = {"messages": HI, "max_tokens": 1, "reasoning_effort": "low"}
        asked = [httpx.post(f"{url}/v1/chat/completions", json={**body, **more}) for more in ({}, {"stream": True})]
        assert [tokenizer.decode(prompt) for prompt in engine.prompts] == ["effort low"] * 2
        assert not any("x-ignored-fields" in one.headers for one in asked)
        tokenizer.chat_template = "{{ messages[0].content }}"
        left_out = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert left_out.headers["x-ignored-fields"] == "reasoning_effort"
        assert tokenizer.decode(engine.prompts[-1]) == "hi the cat"
