"""Prompts that are told: echoes with log probabilities, tokens and texts, lengths; counts in each chunk of a stream."""

from __future__ import annotations

import json

import httpx
import pytest
from engines import SERVING, WHOLE, ids_of
from fake_engine import FakeEngine
from http_server import openai_client, serving
from models import build
from tokenizers_made import CHAT, TOOL_CHAT, byte_level, whole_words, words

from hf_sparsekv import Engine, TokenConfig
from hf_sparsekv_serve.http import create_app, fields

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served():
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT + "{# enable_thinking #}"
    with FakeEngine(tokenizer, max_length=1000) as engine, serving(create_app(engine, "m")) as url:
        yield url, engine


def posted(url: str, path: str, status: int = 200, **body) -> dict:
    answer = httpx.post(f"{url}{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


# ---------------------------------------------------------------------- echoes


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_an_echo(served, limit, logprobs):
    url, engine = served
    found = posted(
        url, "/v1/completions", prompt=["the cat", "é日"], echo=True, max_tokens=limit, logprobs=logprobs, n=2
    )
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
    for choice, prompt in zip(found["choices"], ["the cat", "the cat", "é日", "é日"]):
        ids = engine.tokenizer(prompt)["input_ids"]
        answer = engine.tokenizer.decode((ids * 3)[:limit])
        assert choice["text"] == prompt + answer and choice["finish_reason"] == "length"
        if logprobs is None:
            assert choice["logprobs"] is None
            continue
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(ids) + limit == len(told["token_logprobs"]) == len(told["text_offset"])
        assert told["token_logprobs"] == [None, *[-0.5] * (len(ids) - 1), *[-1.0] * limit]
        assert told["top_logprobs"][0] is None and "".join(told["tokens"]) == choice["text"]
        places = [choice["text"][begin:] for begin in told["text_offset"]]
        assert all(place.startswith(token) for place, token in zip(places, told["tokens"]) if "�" not in token)
    assert found["usage"]["completion_tokens"] == 4 * limit
    with openai_client(url) as client:
        same = client.completions.create(model="m", prompt="the cat", echo=True, max_tokens=limit, logprobs=1)
        assert same.choices[0].logprobs.token_logprobs[0] is None


def test_an_echo_of_ids(served):
    url, engine = served
    ids = [*engine.tokenizer("the cat")["input_ids"], engine.tokenizer.eos_token_id]
    choice = posted(url, "/v1/completions", prompt=ids, echo=True, max_tokens=0, logprobs=1)["choices"][0]
    assert choice["text"] == "the cat" and len(choice["logprobs"]["tokens"]) == len(ids)
    for wrong in ([10**9], [-1], [5, 10**30]):
        error = posted(url, "/v1/completions", 400, prompt=wrong, echo=True, max_tokens=0)["error"]
        assert error["param"] == "prompt" and "is outside the vocabulary" in error["message"]


def test_echoed_log_probabilities_are_the_models_own():
    """As lm-eval's client reads them: those of the continuation, and whether it is the greedy one."""
    torch = pytest.importorskip("torch")
    net, ids = build("llama", "sparsekv"), ids_of(150, 3)
    with torch.no_grad():
        logits = build("llama", "sdpa")(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    engine = Engine(net, whole_words(), TokenConfig(**WHOLE), None, SERVING)
    with engine, serving(create_app(engine, "m")) as url:
        body = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        for prompt in (ids, words(ids)):
            (choice,) = posted(url, "/v1/completions", prompt=prompt, **body)["choices"]
            told = choice["logprobs"]
            assert told["tokens"][1:-1] == words(ids).split()[1:]
            got = torch.tensor(told["token_logprobs"][1:-1])
            torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
            greedy = [one == max(top.values()) for one, top in zip(got.tolist(), told["top_logprobs"][1:-1])]
            assert greedy == (logits[:-1].argmax(-1) == torch.tensor(ids[1:])).tolist()
        error = posted(url, "/v1/completions", 400, prompt=ids * 3, **body)["error"]
        assert error["code"] == "context_length_exceeded"


# ---------------------------------------------------------------------- tokens


def test_tokens_of_a_prompt(served):
    url, engine = served
    ids = engine.tokenizer("the cat日")["input_ids"]
    found = posted(url, "/tokenize", model="m", prompt="the cat日")
    assert found == {"count": len(ids), "max_model_len": 1000, "tokens": ids, "token_strs": None}
    names = posted(url, "/tokenize", prompt="the", return_token_strs=True, add_special_tokens=False)["token_strs"]
    assert names == engine.tokenizer.convert_ids_to_tokens(engine.tokenizer("the")["input_ids"])
    assert posted(url, "/detokenize", model="m", tokens=ids) == {"prompt": "the cat日"}
    assert posted(url, "/detokenize", tokens=[engine.tokenizer.eos_token_id])["prompt"] == "<|end|>"
    assert posted(url, "/tokenize", prompt="")["tokens"] == [] and posted(url, "/detokenize", tokens=[])["prompt"] == ""


def test_tokens_of_a_conversation_are_those_of_its_request(served):
    url, engine = served
    for more in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        found = posted(url, "/tokenize", messages=HI, **more)
        posted(url, "/v1/chat/completions", messages=HI, max_tokens=1, **more)
        assert found["tokens"] == engine.prompts[-1] and found["count"] == len(engine.prompts[-1])
    assert engine.tokenizer.decode(engine.prompts[-1]) == "<|user|>hi"


TOKENIZED = [
    ("/tokenize", {}, "prompt", "must be text"),
    ("/tokenize", {"prompt": [1]}, "prompt", "must be text"),
    ("/tokenize", {"prompt": "a\ud800"}, "prompt", "surrogate"),
    ("/tokenize", {"prompt": "a", "messages": HI}, "prompt", "is no field"),
    ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs", "true or false"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens", "true or false"),
    ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens", "is of prompts"),
    ("/tokenize", {"messages": HI, "temperature": 1}, "temperature", "is no field"),
    ("/tokenize", {"messages": []}, "messages", "is empty"),
    ("/tokenize", {"prompt": "a " * 100_000}, "prompt", "maximum context length is 1000 tokens"),
    ("/detokenize", {}, "tokens", "must be a list of token ids"),
    ("/detokenize", {"tokens": "ab"}, "tokens", "must be a list of token ids"),
    ("/detokenize", {"tokens": [True]}, "tokens", "must be a list of token ids"),
    ("/detokenize", {"tokens": [1.0]}, "tokens", "must be a list of token ids"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "outside the vocabulary"),
    ("/detokenize", {"tokens": [10**40]}, "tokens", "outside the vocabulary"),
    ("/detokenize", {"tokens": [1] * 200_000}, None, "has more than"),
]


@pytest.mark.parametrize(("path", "body", "param", "says"), TOKENIZED, ids=lambda one: str(one)[:40])
def test_what_has_no_tokens(served, path, body, param, says):
    content, before = json.dumps(body), len(served[1].prompts)
    answer = httpx.post(f"{served[0]}{path}", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], says in error["message"]) == (400, param, True), error
    assert len(served[1].prompts) == before
    assert httpx.post(f"{served[0]}{path}", json={"model": "other"}).status_code == 404
    assert httpx.post(f"{served[0]}{path}", content=b"{}").status_code == 415
    assert httpx.get(f"{served[0]}{path}").status_code == 405


def test_the_key_is_needed_for_tokens():
    with FakeEngine(byte_level()) as engine, serving(create_app(engine, "m", api_key="k")) as url:
        posted(url, "/tokenize", 401, prompt="a")
        posted(url, "/detokenize", 401, tokens=[1])


# ---------------------------------------------------------------------- lengths, ends, counts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a" * 1200}),
        ("completions", {"prompt": "a b " * 20_000}),
        ("completions", {"prompt": "a", "max_tokens": 1000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 1200}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a b " * 20_000}]}),
    ],
)
def test_a_request_over_the_context_says_so_as_openais_does(served, path, body):
    """LiteLLM and LangChain look for the code or for these words, and fall back to another model."""
    error = posted(served[0], f"/v1/{path}", 400, **body)["error"]
    assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
    assert error["message"].startswith("This model's maximum context length is 1000 tokens. However, ")


def test_further_ends_and_least_tokens(served):
    url, engine = served
    end = engine.tokenizer("b")["input_ids"][0]
    choice = posted(url, "/v1/completions", prompt="ab", max_tokens=9, stop_token_ids=[end])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")
    choice = posted(url, "/v1/completions", prompt="ab", max_tokens=9, stop_token_ids=[end], min_tokens=3)["choices"][0]
    assert (len(choice["text"]), choice["finish_reason"]) == (2, "stop")
    assert len(posted(url, "/v1/completions", prompt="ab", max_tokens=9, min_tokens=9)["choices"][0]["text"]) == 9
    stops = [f"stop{i}" for i in range(31)] + ["b"]
    assert posted(url, "/v1/completions", prompt="ab", max_tokens=9, stop=stops)["choices"][0]["text"] == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_is_not_among_the_log_probabilities_of_a_chat(stream):
    tokenizer = byte_level()
    answers = [(50, False, ["the", " cat"]), (4, True, ["the", " cat", "<|end|>", "the"])]
    engine = FakeEngine(tokenizer, answer="the cat")
    with engine, serving(create_app(engine, "m")) as url, openai_client(url) as client:
        asked = {"model": "m", "messages": HI, "logprobs": True, "stream": stream}
        for limit, ignores, expected in answers:
            found = client.chat.completions.create(**asked, max_tokens=limit, extra_body={"ignore_eos": ignores})
            told = [choice.logprobs for one in (found if stream else [found]) for choice in one.choices]
            assert [one.token for logprobs in told if logprobs for one in logprobs.content] == expected


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("last", [True, False])
def test_counts_in_each_chunk(served, path, last):
    """guidellm and vLLM's own clients ask for them."""
    begin = {"prompt": ["ab", "cde"]} if path == "completions" else {"messages": HI}
    options = {"continuous_usage_stats": True, "include_usage": last}
    body = {**begin, "max_tokens": 5, "stream": True, "stream_options": options}
    lines = httpx.post(f"{served[0]}/v1/{path}", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [chunk for chunk in chunks if chunk["choices"]]
    assert (len(chunks) > len(choices)) == last
    by_answer: dict[int, list[int]] = {}
    for chunk in choices:
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        by_answer.setdefault(chunk["choices"][0]["index"], []).append(usage["completion_tokens"])
    for counts in by_answer.values():
        assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 5


@pytest.mark.parametrize("name", ["prompt_a", "n_predict", "ech", "stop_tokens_ids", "beam"])
def test_hints_are_fields_that_are_served(served, name):
    error = posted(served[0], "/v1/completions", 400, prompt="a", **{name: 1})["error"]
    hint = error["message"].rpartition("did you mean ")[2].rstrip("?")
    assert hint not in fields.REFUSED and (hint in fields.COMPLETION.known or "did you" not in error["message"]), error


def test_a_call_without_arguments_is_one_with_none():
    tokenizer = byte_level()
    tokenizer.chat_template = TOOL_CHAT
    with FakeEngine(tokenizer, max_length=4000) as engine, serving(create_app(engine, "m")) as url:
        for given in ("", " \n", "{}"):
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
            called = {"role": "assistant", "content": None, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "1", "content": "2"}
            posted(url, "/v1/chat/completions", messages=[*HI, called, result], max_tokens=1)
        assert engine.prompts[-1] == engine.prompts[-2] == engine.prompts[-3]
