"""Requests of all endpoints with any part of them replaced: each is served or refused, and none is a defect."""

from __future__ import annotations

import copy
import json
import random

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from test_agents import REQUESTS, SHOWS, call
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import create_app

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b", "reasoning_content": "c", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "1", "content": "d"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSES = {
    "input": [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "namespace": "s"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "c"}]},
    ],
    "instructions": "i",
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_object"}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
BODIES = [(one["path"], one["body"]) for _, one in REQUESTS]
BODIES += [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES)]
BODIES += [("/v1/messages/count_tokens", {"messages": BODIES[3][1]["messages"], "system": "s"})]
OTHERS = (None, True, 0, -1, 1.5, 10**30, "", "x", "\ud800", [], [[]], {}, {"type": []}, {"type": "text"}, ["x"])
OTHERS += ({"type": "tool"}, {"name": {}}, "function", "none", [{"type": "message"}], {"x": {"x": [None]}})


def places(value: object, way: tuple = ()) -> list[tuple]:
    """The ways to all parts of a value but itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [one for name, part in inner for one in ((*way, name), *places(part, (*way, name)))]


def mutated(body: dict, drawn: random.Random) -> dict:
    body = copy.deepcopy(body)
    for _ in range(drawn.randint(1, 3)):
        *way, last = drawn.choice(places(body))
        inner = body
        for step in way:
            inner = inner[step]
        if drawn.random() < 0.2 and isinstance(inner, dict):
            inner[drawn.choice(["x", "type", "name", "content", "id"])] = drawn.choice(OTHERS)
        else:
            inner[last] = copy.deepcopy(drawn.choice(OTHERS))
    return body


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("number", range(len(BODIES)), ids=lambda number: BODIES[number][0])
def test_any_part_may_be_anything(number, ignores):
    path, body = BODIES[number]
    drawn = random.Random(number)
    tokenizer = byte_level()
    tokenizer.chat_template = SHOWS
    refused = 0
    answer = "<think>Hm.</think>Yes." + call("Bash", command="ls")
    with (
        FakeEngine(tokenizer, max_length=50_000, answer=answer, burst=200) as engine,
        serving(create_app(engine, "m", ignore_unknown_fields=ignores)) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        for _ in range(60):
            given = mutated({**body, "model": "m"}, drawn)
            text = json.dumps(given)
            found = client.post(path, content=text, headers={"content-type": "application/json"})
            assert found.status_code in (200, 400, 404), (text, found.text)
            refused += found.status_code != 200
            if found.status_code != 200:
                error = found.json()["error"]
                assert error["message"] and "failed" not in error["message"], (text, error)
            else:
                assert "told to fail" not in found.text and "server_error" not in found.text, text
    assert refused > 5
