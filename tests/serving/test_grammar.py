"""Answers that follow a schema or a grammar, over the engine and by OpenAI's client."""

from __future__ import annotations

import json
import random
import sys

import pytest
from caches import FULL, SMALL
from http_server import openai_client, serving
from models import build
from tokenizers_made import MADE, TOOL_CHAT, byte_level, slow, word_pieces

from hf_sparsekv import Engine, Sampling, ServingConfig, TokenConfig
from hf_sparsekv.serving.token_bytes import token_bytes
from hf_sparsekv_serve.http import create_app

try:
    import llguidance
except ImportError:
    llguidance = None
needs_llguidance = pytest.mark.skipif(llguidance is None, reason="needs llguidance (the extra `structured`)")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
        "likes": {"type": "array", "items": {"enum": ["the", "cat"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]
HI = [{"role": "user", "content": "the cat"}]


def made(device: str = "cpu") -> Engine:
    tokenizer = byte_level()
    tokenizer.chat_template = TOOL_CHAT
    net = build("llama", "sparsekv", vocab_size=len(tokenizer) + 5).to(device)  # as models have more than there are
    serving_config = ServingConfig(max_rows=3, max_length=1000, chunk=64, prefill_ms=0.5)
    return Engine(net, tokenizer, TokenConfig(**{**SMALL, **FULL}), None, serving_config)


@pytest.fixture(scope="module")
def engine():
    with made() as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    with serving(create_app(engine, "m")) as url, openai_client(url) as client:
        yield client


def is_person(text: str) -> bool:
    found = json.loads(text)
    assert list(found) == ["name", "age", "likes"] and len(found["name"]) <= 6 and 0 <= found["age"] <= 199
    assert len(found["likes"]) <= 2 and set(found["likes"]) <= {"the", "cat"}
    return True


@needs_llguidance
@pytest.mark.parametrize("device", DEVICES)
def test_every_answer_follows_its_schema_beside_others_that_follow_none(device):
    """A random model draws what it may, also with captured steps; the other rows' tokens are as without."""
    free = Sampling(max_tokens=40, temperature=0)
    with made(device) as engine:
        (alone,) = engine.generate_batch(["the cat of"], free)
        asked = [Sampling(max_tokens=300, temperature=2.0, seed=seed, json_schema=PERSON) for seed in range(8)]
        asked.insert(3, free)
        prompts = ["the " * n for n in range(1, 9)]
        prompts.insert(3, "the cat of")
        outputs = engine.generate_batch(prompts, asked)
    assert outputs.pop(3).token_ids == alone.token_ids
    assert all(is_person(output.text) and output.finish_reason == "stop" for output in outputs)
    assert len({output.text for output in outputs}) == len(outputs)


@needs_llguidance
def test_penalties_and_stops_go_with_a_schema(engine):
    more = {"top_k": 20, "repetition_penalty": 1.5, "frequency_penalty": 1.0, "logprobs": 1, "top_p": 0.9}
    asked = Sampling(max_tokens=300, temperature=1.0, seed=1, json_schema=json.dumps(PERSON), **more)
    (output,) = engine.generate_batch(["a"], asked)
    assert is_person(output.text) and len(output.logprobs) == len(output.token_ids)
    (cut,) = engine.generate_batch(["a"], Sampling(max_tokens=300, temperature=0, json_schema=PERSON, stop="age"))
    assert cut.text.endswith('"') and cut.finish_reason == "stop"
    (short,) = engine.generate_batch(["a"], Sampling(max_tokens=3, temperature=0, json_schema=PERSON))
    assert short.finish_reason == "length" and short.text.startswith("{")


@needs_llguidance
def test_a_grammar_of_one_s_own(engine):
    asked = Sampling(max_tokens=50, temperature=3.0, grammar='start: ("the" | " cat"){2,5} "."')
    for output in engine.generate_batch(["a"] * 6, asked):
        left = output.text.replace("the", "").replace(" cat", "")
        assert left == "." and output.finish_reason == "stop"


@needs_llguidance
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"json_schema": {"type": "foo"}}, "json_schema cannot be followed: Invalid type: foo"),
        ({"json_schema": {"not": {}}}, "json_schema cannot be followed: Unimplemented keys"),
        ({"json_schema": {"$ref": "http://127.0.0.1/x"}}, "json_schema cannot be followed"),
        ({"grammar": "start: nothing"}, "grammar cannot be followed"),
    ],
)
def test_what_cannot_be_followed_is_refused(engine, settings, says):
    with pytest.raises(ValueError, match=says):
        engine.submit("a", Sampling(**settings))


@needs_llguidance
def test_a_grammar_that_grows_too_large_fails_its_answer_and_no_other(engine, client):
    """Where an answer ends in the middle, it is not given as if it were whole."""
    kinds = ({"a": {"type": "string", "pattern": f"^(x|y)*z{{{i}}}$"}, "b": {"const": i}} for i in range(300))
    large = {"anyOf": [{"type": "object", "properties": one} for one in kinds]}
    asked = [Sampling(max_tokens=200, temperature=0, json_schema=one) for one in (large, PERSON)]
    handles = [engine.submit("a", one) for one in asked]
    with pytest.raises(ValueError, match=r"the grammar is too large for a step: .*max is 2000"):
        handles[0].result()
    assert is_person(handles[1].result().text)
    form = {"type": "json_schema", "json_schema": {"name": "large", "schema": large}}
    with pytest.raises(Exception, match="too large for a step") as error:
        client.chat.completions.create(model="m", messages=HI, max_tokens=200, response_format=form)
    assert error.value.status_code == 400 and error.value.param == "response_format"
    deep: dict = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match="json_schema cannot be followed: recursion limit"):
        engine.submit("a", Sampling(json_schema=deep))


@needs_llguidance
def test_response_format(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    options = {"model": "m", "messages": HI, "temperature": 1.5, "seed": 4, "max_tokens": 300}
    whole = client.chat.completions.create(**options, response_format=form, n=2).choices
    assert all(is_person(choice.message.content) for choice in whole)
    stream = client.chat.completions.create(**options, response_format=form, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole[0].message.content
    loose = client.chat.completions.create(**options, response_format={"type": "json_object"}).choices[0]
    assert loose.message.content.startswith("{")
    text = client.completions.create(model="m", prompt="a", max_tokens=300, extra_body={"response_format": form})
    assert is_person(text.choices[0].text)
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}
    with pytest.raises(Exception, match="response_format cannot be followed: Invalid type: foo") as error:
        client.chat.completions.create(**options, response_format=bad)
    assert error.value.status_code == 400 and error.value.param == "response_format"


@needs_llguidance
@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice(client, stream):
    def calls(choice, seed: int, **more) -> list[tuple[str, dict]]:
        options = {"messages": HI, "tools": TOOLS, "temperature": 2.0, "seed": seed, "max_tokens": 600, **more}
        answer = client.chat.completions.create(model="m", **options, tool_choice=choice, stream=stream)
        if stream:
            found = []
            for piece in (call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()):
                if piece.index == len(found):
                    found.append(piece)
                else:
                    found[piece.index].function.arguments += piece.function.arguments
        else:
            assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
            found = answer.choices[0].message.tool_calls
        return [(call.function.name, json.loads(call.function.arguments)) for call in found]

    may = [("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"}), ("stop", {})]
    required = calls("required", 0)
    assert required and all(call in may for call in required)
    assert len(calls("required", 1, parallel_tool_calls=False)) == 1
    assert calls({"type": "function", "function": {"name": "stop"}}, 0) == [("stop", {})]


def test_without_llguidance_it_is_said_what_to_install(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for more, field in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(Exception, match=f"{field} needs llguidance: install the extra `structured`") as error:
            client.chat.completions.create(model="m", messages=HI, max_tokens=9, **more)
        assert error.value.status_code == 400 and error.value.param == field


def test_settings_that_exclude_each_other():
    for settings, says in (
        ({"json_schema": PERSON, "grammar": "start: x"}, "are both given"),
        ({"json_schema": PERSON, "ignore_eos": True}, "ignore_eos goes without grammar"),
        ({"json_schema": "{"}, "json_schema must be JSON"),
        ({"json_schema": 3}, "json_schema must be a JSON object, got 3"),
        ({"json_schema": {"a": {1}}}, "json_schema must be JSON"),
        ({"grammar": 3}, "grammar must be text or None, got 3"),
        ({"grammar": "x" * 70_000}, "grammar may have 65,536 characters at most, got 70,000"),
        ({"json_schema": {"const": "x" * 70_000}}, "json_schema may have 65,536 characters at most, got 70,0"),
    ):
        with pytest.raises(ValueError, match=says):
            Sampling(**settings)
    assert Sampling(json_schema=PERSON) == Sampling(json_schema=json.dumps(PERSON))
    assert hash(Sampling(json_schema=PERSON)) is not None


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like"])
def test_bytes_of_tokens(name):
    """Joined they are the text's, whatever is cut where; special tokens have none of their own."""
    tokenizer = MADE[name]()
    tokens, special = token_bytes(tokenizer, len(tokenizer) + 7)
    assert len(tokens) == len(tokenizer) + 7 and tokens[-1] == b""
    assert set(special) == set(tokenizer.all_special_ids) | {
        id for id, one in tokenizer.added_tokens_decoder.items() if one.special
    }
    rng = random.Random(3)
    for _ in range(50):
        text = "".join(rng.choice(("the", " cat", "é", "日本", "\n", "<tool>", "x", "🙂", "\x00")) for _ in range(9))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(tokens[one] for one in ids).decode().lstrip() == text.lstrip()


@pytest.mark.parametrize("tokenizer", [word_pieces, slow])
def test_tokenizers_whose_bytes_are_not_known(tokenizer):
    with pytest.raises(ValueError, match="need a tokenizer of bytes, or as sentencepiece's: this one is neither"):
        token_bytes(tokenizer(), 300)
