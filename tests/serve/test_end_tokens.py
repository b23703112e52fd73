"""Tokens that end an answer are never text, also those that the tokenizer does not mark as special."""

from __future__ import annotations

import json

import pytest
import torch
from caches import FULL, SMALL
from http_server import openai_client, serving
from models import build
from tokenizers import AddedToken
from tokenizers_made import byte_level

from hf_sparsekv import Engine, Sampling, ServingConfig, TokenConfig
from hf_sparsekv.cli.running import _Printer
from hf_sparsekv_serve.http import create_app

END = "<|im_end|>"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
HI = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def tokenizer():
    """As of models whose end of a turn is in their generation configuration alone."""
    made = byte_level()
    made.add_tokens([AddedToken(END, special=False)])
    return made


@pytest.fixture(scope="module")
def engine(tokenizer):
    net = build("llama", "sparsekv", vocab_size=len(tokenizer) + 5)
    net.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(END)]
    with Engine(
        net, tokenizer, TokenConfig(**{**SMALL, **FULL}), None, ServingConfig(max_rows=2, max_length=500)
    ) as it:
        yield it


@pytest.fixture(scope="module")
def client(engine):
    with serving(create_app(engine, "m")) as url, openai_client(url) as client:
        yield client


@pytest.fixture(scope="module")
def end(tokenizer) -> int:
    return tokenizer.convert_tokens_to_ids(END)


def test_an_answer_that_ends_at_once_is_empty(engine, end):
    asked = Sampling(max_tokens=20, temperature=0, logit_bias={end: 100})
    output = engine.submit("hello", asked).result()
    assert (output.text, output.finish_reason, output.token_ids) == ("", "stop", (end,))
    assert "".join(piece.text for piece in engine.stream("hello", asked)) == ""
    # Also where a stop string may be in it, and where answers go on after it.
    assert engine.submit("hello", Sampling(max_tokens=9, logit_bias={end: 100}, stop="im_e")).result().text == ""
    beyond = Sampling(max_tokens=9, temperature=0, logit_bias={end: 100}, ignore_eos=True)
    assert engine.submit("hello", beyond).result().text == ""


def test_a_structured_answer_is_json(engine, end):
    pytest.importorskip("llguidance")
    asked = Sampling(max_tokens=300, temperature=1.0, seed=4, json_schema=SCHEMA, logit_bias={end: 20})
    output = engine.submit("hello", asked).result()
    assert output.finish_reason == "stop" and json.loads(output.text)["a"] in (1, 2)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_the_server(client, end, stream):
    options = {"model": "m", "max_tokens": 9, "temperature": 0, "logit_bias": {str(end): 100}, "stream": stream}
    chat = client.chat.completions.create(messages=HI, **options)
    text = client.completions.create(prompt="a", logprobs=0, **options)
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == ""
        assert "".join(chunk.choices[0].text for chunk in text) == ""
    else:
        assert chat.choices[0].message.content == "" and text.choices[0].text == ""


def test_log_probabilities_count_no_characters_of_it(client, end):
    """The token is named; what follows it begins where it does."""
    options = {"max_tokens": 3, "temperature": 0, "logit_bias": {str(end): 100}, "logprobs": 0}
    found = client.completions.create(model="m", prompt="a", extra_body={"ignore_eos": True}, **options).choices[0]
    assert found.logprobs.tokens == [END] * 3 and found.logprobs.text_offset == [0, 0, 0]


def test_what_the_command_line_prints(tokenizer, end, capsys):
    class Status:
        def stop(self) -> None: ...

    printer = _Printer(tokenizer, Status(), {end})
    printer.put(torch.tensor([[end, 3]]))  # the prompt
    for token in (*tokenizer("the cat")["input_ids"], end):
        printer.put(torch.tensor([token]))
    printer.end()
    assert capsys.readouterr().out == "the cat\n"
