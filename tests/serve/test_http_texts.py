"""Texts that are far too long, wherever a body has them: in no field do they cost memory, or stay in it."""

from __future__ import annotations

import gc
import json
import socket
import tracemalloc
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from tokenizers_made import byte_level
from waiting import wait_until

from hf_sparsekv_serve.http import create_app, prompts, schema
from hf_sparsekv_serve.http.errors import ApiError
from hf_sparsekv_serve.http.scan import Scan

HI = [{"role": "user", "content": "hi"}]
TEXT = "ab " * 200_000
TAGS = '{# <|im_start|> <tool_call> </tool_call> "arguments" tools tool_calls mood reasoning_effort #}'
SHOWS_ALL = (
    TAGS + "{{ reasoning_effort }}{{ mood }}{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
)
SHOWS_CONTENT = TAGS + "{% for m in messages %}{{ m.content }}{% endfor %}"


def calls(name="f", arguments="{}", **more) -> dict:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}
    return {"messages": [{"role": "assistant", "content": "a", "tool_calls": [call]}]}


def tool(**more) -> dict:
    return {"tools": [{"type": "function", "function": {"name": "f", **more}}]}


def said(role="user", **more) -> dict:
    return {"messages": [{"role": role, "content": "a", **more}]}


SHOWN = {
    "content": said(content=TEXT),
    "a part": said(content=[{"type": "text", "text": TEXT}]),
    "many parts": said(content=[{"type": "text", "text": TEXT[:600]}] * 1000),
    "many messages": {"messages": [{"role": "user", "content": TEXT[:600]}] * 1000},
    "the speaker's name": said(name=TEXT),
    "reasoning": said("assistant", reasoning_content=TEXT),
    "a refusal": said("assistant", refusal=TEXT),
    "the id of a call": said("tool", tool_call_id=TEXT),
    "a call's name": calls(name=TEXT),
    "a call's arguments": calls(arguments=json.dumps({"a": TEXT})),
    "a call's arguments as an object": calls(arguments={"a": TEXT}),
    "a key of a call's arguments": calls(arguments={TEXT: 1}),
    "beside a call": calls(index=TEXT),
    "a tool's name": tool(name=TEXT),
    "a tool's description": tool(description=TEXT),
    "a tool's parameters": tool(parameters={"type": "object", "properties": {"a": {"description": TEXT}}}),
    "a key of a tool's parameters": tool(parameters={"type": "object", "properties": {TEXT: {}}}),
    "values of a tool's parameters": tool(parameters={"enum": [TEXT[:30]] * 10_000}),
    "many tools": {"tools": [tool(description=TEXT[:10_000])["tools"][0]] * 100},
    "a tool that must be called": {**tool(description=TEXT), "tool_choice": "required"},
    "a variable of the template": {"chat_template_kwargs": {"mood": TEXT}},
    "the effort": {"reasoning_effort": TEXT},
    "few characters of many bytes": said(content="\U00010348" * 150_000),
}


class Watched:
    """A tokenizer that notes the longest text which it is given, in bytes."""

    def __init__(self, template: str) -> None:
        self._tokenizer = byte_level()
        self._tokenizer.chat_template = template
        self.longest = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text, **options):
        self.longest = max(self.longest, len(text.encode()))
        return self._tokenizer(text, **options)

    def apply_chat_template(self, messages, **options):
        assert not options["tokenize"], "it would be tokenised whole"
        return self._tokenizer.apply_chat_template(messages, **options)


def submitted(template: str, fields: dict, parse=schema.chat, context: int = 1000) -> tuple[int, str]:
    """The longest text that was tokenised for a body, and what was said to it."""
    tokenizer = Watched(template)
    with FakeEngine(tokenizer._tokenizer, max_length=context) as engine:
        engine.tokenizer = tokenizer
        body = {"messages": HI, **fields} if parse is schema.chat else fields
        try:
            prompts.Prompts(engine, "m", 8).submit(json.dumps(body).encode(), Scan(context), parse, [])
        except ApiError as error:
            return tokenizer.longest, str(error)
    return tokenizer.longest, "served"


@pytest.mark.parametrize("name", SHOWN)
def test_a_text_that_the_template_shows_is_tokenised_in_pieces(name):
    longest, told = submitted(SHOWS_ALL, SHOWN[name])
    assert "has more tokens than max_length=1000: shorten it" in told
    assert 0 < longest <= 4 * prompts.COUNTED


@pytest.mark.parametrize("name", [name for name in SHOWN if "tool" in name])
def test_tools_count_whatever_the_template_shows_of_them(name):
    """They are kept until the answer is read."""
    longest, told = submitted(SHOWS_CONTENT, SHOWN[name])
    assert "has more tokens than max_length=1000" in told and longest <= 4 * prompts.COUNTED


@pytest.mark.parametrize(
    "prompt", [TEXT, [TEXT], ["a", TEXT], "\U00010348" * 150_000], ids=["one", "list", "of two", "bytes"]
)
def test_prompts_of_completions(prompt):
    longest, told = submitted(SHOWS_ALL, {"prompt": prompt}, schema.completion)
    assert "has more tokens than max_length=1000" in told and longest <= 4 * prompts.COUNTED


def test_a_text_is_measured_in_bytes():
    """Some tokenizers make a token of each byte: characters of four bytes would be four times as many tokens."""
    text = "\U00010348" * 100_000
    longest, told = submitted(SHOWS_CONTENT, said(content=text), context=20_000)
    assert longest < len(text.encode()) and "100,000 characters has more tokens" in told


def test_what_a_template_leaves_out_does_not_count():
    for fields in (
        said("assistant", reasoning_content=TEXT),
        said(name=TEXT),
        {"chat_template_kwargs": {"mood": TEXT}},
    ):
        assert submitted(SHOWS_CONTENT, fields) == (1 if "messages" in fields else 2, "served")


def test_prompts_are_those_of_the_template():
    tokenizer = byte_level()
    messages = [{"role": "user", "content": "the <|end|> cat\n"}, {"role": "assistant", "content": "日本"}]
    with FakeEngine(tokenizer) as engine, serving(create_app(engine, "m")) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).status_code == 200
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert engine.prompts == [expected]


# ---------------------------------------------------------------------- while requests wait

UNUSED = {
    "user": {"user": TEXT},
    "metadata": {"metadata": {"a": TEXT}},
    "a key of metadata": {"metadata": {TEXT: "a"}},
    "reasoning": said("assistant", reasoning_content=TEXT),
    "the speaker's name": said(name=TEXT),
    "a call's arguments": calls(arguments=json.dumps({"a": TEXT})),
    "a part's label": said(content=[{"type": "text", "text": "a", "cache_control": TEXT}]),
    "a variable of the template": {"chat_template_kwargs": {"mood": TEXT}},
    "a schema's name": {"response_format": {"type": "json_schema", "json_schema": {"name": TEXT, "schema": {}}}},
    "an unknown field": {TEXT: 1},
    "many unknown fields": {f"x{i}": 1 for i in range(40_000)},
    "many unknown variables": {"chat_template_kwargs": {f"x{i}": 1 for i in range(40_000)}},
}


@contextmanager
def asked(url: str, body: bytes, count: int):
    """So many requests that wait for their answers."""
    where = urlsplit(url)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connections = []
    try:
        for _ in range(count):
            connections.append(socket.create_connection((where.hostname, where.port), timeout=20))
            connections[-1].sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.few
@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_keeps_no_text_that_nobody_needs(name, stream):
    count, tokenizer = 8, byte_level()
    tokenizer.chat_template = SHOWS_CONTENT
    body = json.dumps({"messages": HI, "stream": stream, **UNUSED[name]}).encode()
    app = create_app(engine := FakeEngine(tokenizer, max_rows=0), "m", ignore_unknown_fields=True)
    with engine, serving(app) as url:
        with asked(url, json.dumps({"messages": HI}).encode(), 1):
            wait_until(lambda: engine.busy == 1)
        wait_until(lambda: not engine.busy)
        tracemalloc.start()
        try:
            with asked(url, body, count):
                wait_until(lambda: engine.busy == count, 30)
                wait_until(lambda: gc.collect() >= 0 and tracemalloc.get_traced_memory()[0] < 2 * len(TEXT), 5)
        finally:
            tracemalloc.stop()
