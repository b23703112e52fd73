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
from hf_sparsekv_serve.http import create_app

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


def test_exact_answers_are_asked_for(engine, client):
    """Those of full attention, as of this engine's budget, streamed; a server without exact mode says so."""
    with pytest.raises(Exception, match="the server with --exact") as error:
        client.completions.create(model="m", prompt="the", extra_body={"exact": True})
    assert error.value.status_code == 400 and error.value.param == "exact"
    options = {"model": "m", "prompt": PROMPTS[1] * 3, "max_tokens": 40, "temperature": 0}
    expected = client.completions.create(**options, extra_body={"exact": False}).choices[0].text
    settings = {**SMALL, "dense_below": 0, "token_budget": 16}
    exact = ServingConfig(max_rows=3, max_length=500, chunk=64, prefill_ms=0.5, exact=True)
    net = build("llama", "sparsekv", vocab_size=engine.vocabulary)
    with Engine(net, byte_level(), TokenConfig(**settings), None, exact) as other:
        with serving(create_app(other, "m")) as url, openai_client(url) as asks:
            stream = asks.completions.create(**options, stream=True)
            beside = asks.completions.create(**options, extra_body={"exact": False})
            assert "".join(chunk.choices[0].text for chunk in stream) == expected
            assert beside.usage.completion_tokens == 40
        assert other.stats().drafted > 0


def chat(client, **more):
    more = {"max_tokens": 6, "temperature": 0, **more}
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "the cat"}], **more)


def test_log_probabilities(engine, client):
    """Chats and completions, streamed or whole: the same, and the likeliest is the one that is drawn."""
    whole = chat(client, logprobs=True, top_logprobs=3).choices[0]
    assert len(whole.logprobs.content) == 6
    for one in whole.logprobs.content:
        assert len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == one.logprob <= 0
        assert bytes(one.bytes).decode(errors="replace") == one.token
        assert [best.logprob for best in one.top_logprobs] == sorted(
            (b.logprob for b in one.top_logprobs), reverse=True
        )
    chunks = [chunk.choices[0] for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)]
    streamed = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    assert streamed == whole.logprobs.content
    assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(client).choices[0].logprobs is None
    options = {"model": "m", "prompt": "the cat", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    answer = client.completions.create(**options).choices[0]
    found = answer.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 6
    assert [max(best.values()) for best in found.top_logprobs] == found.token_logprobs
    assert all(answer.text[at:].startswith(token) for at, token in zip(found.text_offset, found.tokens))
    assert found.text_offset == sorted(found.text_offset) and len(set(found.text_offset)) > 3
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**options, stream=True)]
    assert [token for part in parts if part for token in part.tokens] == found.tokens
    assert [at for part in parts if part for at in part.text_offset] == found.text_offset
    (output,) = engine.generate_batch(["the cat"], Sampling(max_tokens=6, temperature=0, logprobs=1))
    assert [one.logprob for one in output.logprobs] == pytest.approx(found.token_logprobs, abs=1e-4)
    assert [one.token_id for one in output.logprobs] == list(output.token_ids)


def test_several_answers(client):
    """Each with its own draws; the first is that of a request for one. The prompt counts once."""
    options = {"model": "m", "prompt": ["the", "the cat"], "max_tokens": 8, "seed": 11, "temperature": 2.0}
    one, three = (client.completions.create(**options, n=n) for n in (1, 3))
    assert [choice.index for choice in three.choices] == list(range(6))
    assert [three.choices[i].text for i in (0, 3)] == [choice.text for choice in one.choices]
    assert len({choice.text for choice in three.choices}) == 6
    assert three.usage.prompt_tokens == one.usage.prompt_tokens and three.usage.completion_tokens == 48
    streamed = dict.fromkeys(range(3), "")
    for chunk in chat(client, n=3, temperature=2.0, seed=5, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == [c.message.content for c in chat(client, n=3, temperature=2.0, seed=5).choices]


def test_biases_and_penalties(engine, client):
    token = engine.tokenizer(" the")["input_ids"][0]
    text = engine.tokenizer.decode([token])
    forced = chat(client, logit_bias={str(token): 100}).choices[0].message.content
    assert forced == text * 6
    barred = chat(client, logit_bias={str(token): 100}, frequency_penalty=2.0, max_tokens=60).choices[0].message.content
    assert 40 < barred.count(text) < 60  # after some fifty, 100 - 2 * 50 is none
    plain = chat(client, max_tokens=40, logprobs=True).choices[0]
    other = chat(client, max_tokens=40, presence_penalty=2.0, frequency_penalty=1.0, logprobs=True).choices[0]
    kinds = [len({one.token for one in choice.logprobs.content}) for choice in (plain, other)]
    assert kinds[1] > kinds[0]
    with pytest.raises(Exception, match="outside the vocabulary") as error:
        chat(client, logit_bias={"99999": 1})
    assert error.value.status_code == 400 and error.value.param == "logit_bias"


def test_a_special_token_in_a_stop_string(engine, client):
    token = engine.tokenizer.convert_tokens_to_ids("<|user|>")
    forced = {"logit_bias": {token: 100}, "max_tokens": 6, "temperature": 0}
    (output,) = engine.generate_batch(["the cat"], Sampling(stop="<|user|>", **forced))
    assert (output.text, output.token_ids, output.finish_reason) == ("", (token,), "stop")
    (output,) = engine.generate_batch(["the cat"], Sampling(stop="<|assistant|>", **forced))
    assert (output.text, len(output.token_ids), output.finish_reason) == ("", 6, "length")
    choice = chat(client, stop=["<|user|><|user|>"], logit_bias={str(token): 100}).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "stop")


def test_labels_are_taken(client):
    labels = {"user": "me", "metadata": {"run": "7"}, "store": True, "seed": 3}
    assert chat(client, **labels).choices[0].message.content == chat(client).choices[0].message.content
