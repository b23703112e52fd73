"""Events of a stream, their times and order; and the end of an answer that has calls."""

from __future__ import annotations

import json

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from openai.types.chat import ChatCompletionChunk
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import answers, create_app

HI = [{"role": "user", "content": "hi the cat"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TAGGED = '{# <|im_start|> <tool_call> </tool_call> "arguments" #}{{ tools }}{{ "<|im_start|>assistant\\n" }}'


def tokenizer():
    made = byte_level()
    made.chat_template += TAGGED
    return made


def events(lines) -> list[str]:
    return [line for line in lines if line]


def data(lines) -> list[dict]:
    """Its chunks, each checked against OpenAI's types."""
    found = [json.loads(line[6:]) for line in events(lines) if line.startswith("data: {")]
    for one in found:
        if "error" not in one:
            ChatCompletionChunk.model_validate(one, strict=True)
    return found


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"tools": TOOLS}, {"stop": "zz"}], ids=str)
def test_no_chunk_comes_before_the_prompt_is_read(fields, monkeypatch):
    """Clients that measure take the first chunk for the first token."""
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(answers, "TICK_S", 0.02)
    body = {"messages": HI, "max_tokens": 3, "stream": True, **fields}
    with (
        FakeEngine(tokenizer(), max_rows=0) as engine,
        serving(create_app(engine, "m")) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        early = events(next(lines) for _ in range(8))
        assert early[0] == ": begun" and set(early) <= {": begun", ": waiting"}
        engine.max_rows = 8
        rest = events(lines)
    assert rest[-1] == "data: [DONE]"
    chunks = data(rest)
    for which in range(fields.get("n", 1)):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == which]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["length"]
        assert not any("role" in one["delta"] for one in mine[1:])


@pytest.mark.parametrize(
    ("answer", "fields", "text", "reason"),
    [
        ("", {}, "", "stop"),  # the first token is the end token
        ("the cat", {"max_tokens": 1}, "the", "length"),
        ("é", {"max_tokens": 1}, "é", "length"),
        ("🎉", {"max_tokens": 1}, "\ufffd", "length"),  # a byte of four
        ("the cat", {"stop": "the"}, "", "stop"),
        ("<|user|>" * 5, {"max_tokens": 3}, "", "length"),  # tokens without text
        ("", {"tools": TOOLS}, "", "stop"),
        ("the cat", {"tools": TOOLS}, "the cat", "stop"),
        ("", {"n": 2}, "", "stop"),
    ],
)
def test_an_answer_has_its_role_once_and_first(answer, fields, text, reason):
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}, **fields}
    with FakeEngine(tokenizer(), answer=answer) as engine, serving(create_app(engine, "m")) as url:
        lines = events(httpx.post(f"{url}/v1/chat/completions", json=body).text.split("\n"))
        whole = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": False, "stream_options": None}).json()
    assert lines[0] == ": begun" and lines[-1] == "data: [DONE]"
    *chunks, last = data(lines)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    for which in range(fields.get("n", 1)):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == which]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"].get("content", "") for one in mine) == text
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [reason]
        choice = whole["choices"][which]
        assert (choice["message"]["content"] or "", choice["finish_reason"]) == (text, reason)


@pytest.mark.parametrize(("fail_at", "before"), [(0, ""), (2, "hi")])
def test_what_came_before_an_error_is_told_first(fail_at, before):
    body = {"messages": HI, "stream": True, "n": 2}
    with (
        FakeEngine(tokenizer(), fail_at=fail_at, answer="hi the cat") as engine,
        serving(create_app(engine, "m")) as url,
    ):
        lines = events(httpx.post(f"{url}/v1/chat/completions", json=body).text.split("\n"))
    *chunks, error = data(lines)
    assert "told to fail" in error["error"]["message"] and "[DONE]" not in lines[-1]
    mine = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == 0]
    assert [one for one in mine if "role" in one] == mine[:1] * bool(before)
    assert "".join(one["content"] for one in mine) == before


TWO = f"{CALL}\n{CALL}"


def ends(engine, url: str, stream: bool, **fields) -> list[tuple[int, str]]:
    """The number of calls of each choice, and why it has ended."""
    body = {"messages": HI, "tools": TOOLS, "stream": stream, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        choices = answer.json()["choices"]
        return [(len(one["message"].get("tool_calls", ())), one["finish_reason"]) for one in choices]
    found: dict[int, list] = {}
    for chunk in data(answer.text.split("\n")):
        choice = chunk["choices"][0]
        mine = found.setdefault(choice["index"], [{}, None])
        for call in choice["delta"].get("tool_calls", ()):
            mine[0][call["index"]] = mine[0].get(call["index"], "") + call["function"]["arguments"]
        mine[1] = choice["finish_reason"]
    return [(sum(map(is_json, found[which][0].values())), found[which][1]) for which in sorted(found)]


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.few
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"n": 2},
        {"stop": "zz"},
    ],
    ids=str,
)
def test_an_answer_that_max_tokens_cuts_says_length(fields, stream):
    """Also after whole calls: others may be missing."""
    made = tokenizer()
    one, two = (len(made(text)["input_ids"]) for text in (CALL, TWO))
    with FakeEngine(made, answer=TWO) as engine, serving(create_app(engine, "m")) as url:
        for limit, expected in (
            (one - 15, (0, "length")),  # in the middle of a call: it is text, or in a stream as far as it came
            (one - 1, (1, "length")),  # in the middle of a tag
            (one, (1, "length")),
            (one + 4, (1, "length")),
            (two - 15, (1, "length")),
            (two - 1, (2, "length")),
            (two, (2, "length")),  # the end token was not drawn
            (two + 1, (2, "tool_calls")),
            (two + 50, (2, "tool_calls")),
        ):
            assert ends(engine, url, stream, max_tokens=limit, **fields) == [expected] * fields.get("n", 1), limit


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_before_a_stop_string_is_a_call(stream):
    with FakeEngine(tokenizer(), answer=f"{CALL}zz") as engine, serving(create_app(engine, "m")) as url:
        assert ends(engine, url, stream, stop="zz") == [(1, "tool_calls")]
