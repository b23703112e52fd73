"""The server around the real engine: the same answers as from Python, at once, cancelled by a client that leaves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from caches import FULL, SMALL
from http_server import openai_client, serving
from models import build
from tokenizers_made import byte_level
from waiting import wait_until

from hf_sparsekv import Engine, Sampling, ServingConfig, TokenConfig
from hf_sparsekv.serving.http import create_app

PROMPTS = ["the cat", "of the cat of the " * 9, "日本 don't", "é", "the\n\nthe", "a b c d e f g"]


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_level()
    net = build("llama", "sparsekv", vocab_size=len(tokenizer))
    serving_config = ServingConfig(max_rows=3, max_length=500, chunk=64, prefill_ms=0.5)
    with Engine(net, tokenizer, TokenConfig(**{**SMALL, **FULL}), None, serving_config) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    with serving(create_app(engine, "m")) as url, openai_client(url) as client:
        yield client


def test_answers_are_the_engines(engine, client):
    expected = engine.generate_batch(PROMPTS, Sampling(max_tokens=24, temperature=0))

    def ask(prompt: str) -> str:
        options = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        if len(prompt) % 2:
            return client.completions.create(**options).choices[0].text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True))

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        assert list(threads.map(ask, PROMPTS)) == [output.text for output in expected]


def test_a_client_that_leaves_frees_its_row(engine, client):
    before = engine.stats().cancelled
    stream = client.completions.create(model="m", prompt="the", max_tokens=490, stream=True, temperature=0)
    next(iter(stream))
    stream.close()
    wait_until(lambda: engine.stats().cancelled == before + 1 and engine.stats().running == 0)


def test_what_the_engine_refuses_is_told(client):
    with pytest.raises(Exception, match="more than the 500 that max_length allows: shorten the prompt") as error:
        client.completions.create(model="m", prompt="a" * 490, max_tokens=20)
    assert error.value.status_code == 400
