"""Bodies that other programs' clients really send: each request is answered, or refused with the field's name.

Recorded from Open WebUI 0.12.4's backend, which ran against this server (docs/measured/serving.md says how to
run it again). Read in the sources of vLLM (``vllm bench serve``, 02cfb53) and of llama.cpp's web page (08ee0d7).
"""

from __future__ import annotations

import json

import httpx
import pytest
from fake_engine import FakeEngine
from http_server import serving
from test_http_front import HI
from tokenizers_made import byte_level

from hf_sparsekv_serve.http import create_app

CHAT = """{{ tools | tojson if tools }}{% if not messages %}<tool_call>{"arguments": 1}</tool_call>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
USAGE = {"stream_options": {"include_usage": True}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
IMAGE = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]}
]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"index": 0, **CALL}]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "stop": ["\n\n"]}
PENALTIES = {"frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"5": -100}}

# Chats unless there is a prompt. Each with the field that is refused, and whether --ignore-unknown-fields helps.
ANSWERED = {
    "Open WebUI: a chat": {"stream": True, "messages": HI},
    "Open WebUI: with usage": {"stream": True, "messages": HI, **USAGE},
    "Open WebUI: settings of a model": {"stream": True, "messages": HI, "max_tokens": 32, **SAMPLING, **PENALTIES},
    "Open WebUI: its own tools": {"stream": True, "messages": HI, **USAGE, "tools": [TOOL]},
    "Open WebUI: a tool's result": {"stream": True, "messages": [*HI, CALLED, RESULT], **USAGE, "tools": [TOOL]},
    "Open WebUI: an answer goes on": {"stream": True, "messages": [*HI, {"role": "assistant", "content": "Os"}]},
    "Open WebUI: a title": {"stream": False, "messages": HI, "max_tokens": 900},
    "Open WebUI: tags, further questions, searches": {"stream": False, "messages": HI},
    "Open WebUI: an emoji": {"stream": False, "messages": HI, "max_tokens": 4},
    "vLLM: bench serve, completions": {
        **{"prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, "stream": True},
        **{**USAGE, "ignore_eos": True, "temperature": 0.0},
    },
    "vLLM: with token ids and log probabilities": {
        **{"prompt": [65, 66], "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": 5, "stream": True, **USAGE},
    },
    "Open WebUI: llama.cpp continues": {
        "stream": False,
        "messages": [*HI, {"role": "assistant", "content": "Os"}],
        "continue_final_message": True,
    },
    "vLLM: at least so many tokens": {"prompt": "a", "min_tokens": 4, "stream": True},
    "vLLM: stop ids": {"prompt": "a", "stop_token_ids": [1], "stream": True},
    "vLLM: a schema": {"messages": HI, "guided_json": {}, "stream": False},
    "vLLM: bench serve, chats": {
        **{"messages": PARTS, "max_completion_tokens": 8, "stream": True, **USAGE, "ignore_eos": True},
    },
}
REFUSED = {
    "Open WebUI: an image": ({"messages": IMAGE}, "messages", False),
    "Open WebUI: Ollama's penalty": ({"messages": HI, "repeat_penalty": 1.1}, "repeat_penalty", True),
    "Open WebUI: reasoning": ({"messages": HI, "reasoning_effort": "low"}, "reasoning_effort", True),
    "vLLM: beams": ({"prompt": "a", "use_beam_search": True}, "use_beam_search", True),
    "vLLM: tags": ({"messages": HI, "structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", False),
    "llama.cpp: progress": ({"messages": HI, "stream": True, "return_progress": True}, "return_progress", True),
    "llama.cpp: reasoning": ({"messages": HI, "reasoning_format": "auto"}, "reasoning_format", True),
    "llama.cpp: samplers": ({"messages": HI, "samplers": ["top_k"]}, "samplers", True),
    "llama.cpp: DRY": ({"messages": HI, "dry_multiplier": 0.5}, "dry_multiplier", True),
    "llama.cpp: XTC": ({"messages": HI, "xtc_probability": 0.1}, "xtc_probability", True),
    "llama.cpp: its cache": ({"prompt": "a", "cache_prompt": True}, "cache_prompt", True),
    "llama.cpp: no end": ({"messages": HI, "max_tokens": -1}, "max_tokens", False),
    "llama.cpp: its own name of max_tokens": ({"prompt": "a", "n_predict": 8}, "n_predict", True),
}


@pytest.fixture(scope="module")
def clients():
    """The server as it is, and with ``--ignore-unknown-fields``."""
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT
    with FakeEngine(tokenizer, answer="See the cat", max_length=1000) as engine:
        strict, lenient = (create_app(engine, "m", ignore_unknown_fields=ignore) for ignore in (False, True))
        with serving(strict) as one, serving(lenient) as two:
            yield httpx.Client(base_url=one), httpx.Client(base_url=two)


def asked(client: httpx.Client, fields: dict) -> httpx.Response:
    path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
    return client.post(path, json={"model": "m", **fields}, headers={"Authorization": "Bearer none"})


@pytest.mark.parametrize("name", ANSWERED)
def test_requests_that_are_answered(clients, name):
    fields = ANSWERED[name]
    answer = asked(clients[0], fields)
    assert answer.status_code == 200, answer.text
    if not fields["stream"]:
        assert "See the cat".startswith(answer.json()["choices"][0]["message"]["content"])
        return
    *lines, done = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines]
    assert done == "[DONE]" and not any("error" in chunk for chunk in chunks)
    pieces = [one.get("text") or one.get("delta", {}).get("content") for chunk in chunks for one in chunk["choices"]]
    assert "".join(filter(None, pieces))
    if "stream_options" in fields:
        last = chunks[-1]
        assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0 and last["usage"]["prompt_tokens"] > 0
    if fields.get("ignore_eos"):
        assert last["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("name", REFUSED)
def test_requests_that_are_refused(clients, name):
    fields, param, left_out = REFUSED[name]
    answer = asked(clients[0], fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and len(error["message"]) > 20
    other = asked(clients[1], fields)
    assert other.status_code == (200 if left_out else 400), other.text
    assert not left_out or other.headers["x-ignored-fields"] == param
