"""Parts of JSON, counted before it is parsed."""

from __future__ import annotations

import json
import random

import pytest

from hf_sparsekv_serve.http import schema
from hf_sparsekv_serve.http.errors import ApiError
from hf_sparsekv_serve.http.scan import PIECE, Scan

CONTEXT = 131_072


def looked_at(body: bytes, context: int = CONTEXT, pieces: int = PIECE) -> Scan:
    scan = Scan(context)
    for at in range(0, len(body), pieces):
        scan.feed(body[at : at + pieces])
    return scan


HONEST = {
    "a million characters": {"prompt": "the cat of " * 90_910},
    "16 MB": {"prompt": "the cat of " * 1_500_000},
    "quotes and line ends": {"prompt": 'he said: "no, [it] {is}: 1.5e3"\n' * 40_000},
    "token ids": {"prompt": list(range(CONTEXT))},
    "lists of ids": {"prompt": [list(range(100))] * 256},
    "texts": {"prompt": ["the cat"] * 1024},
    "messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 1000},
    "tools": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {str(i): {} for i in range(50)}}}] * 128
    },
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("ascii", [False, True])
def test_large_honest_bodies_pass(name, ascii):
    body = json.dumps(HONEST[name], ensure_ascii=ascii).encode()
    looked_at(body)
    assert schema.loads(body).keys() == HONEST[name].keys()


def test_chinese_text_passes_escaped_or_not():
    for ascii in (False, True):
        looked_at(json.dumps({"prompt": "日本" * 200_000}, ensure_ascii=ascii).encode())


def counted(value: object) -> dict[str, float]:
    """The same counts of a value, taken one by one."""
    counts = dict.fromkeys(("lists and objects", "fields", "values", "texts", "numbers with a fraction"), 0)
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict | list):
            counts["lists and objects"] += 1
            counts["values"] += max(0, len(one) - 1)
            todo += [*one.keys(), *one.values()] if isinstance(one, dict) else one
            counts["fields"] += len(one) if isinstance(one, dict) else 0
        elif isinstance(one, str):
            counts["texts"] += 1
        elif isinstance(one, bool | float):
            counts["numbers with a fraction"] += len([c for c in json.dumps(one) if c in ".e"])
    return counts


def made(rng: random.Random, depth: int) -> object:
    """Any JSON, with all that may be mistaken for something else in its strings."""
    text = lambda: "".join(rng.choices('"\\[]{},:.eE0n/\n é日\b', k=rng.randrange(9)))  # noqa: E731
    kind = rng.randrange(6) if depth else rng.randrange(2, 6)
    if kind == 0:
        return [made(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 1:
        return {text() + str(i): made(rng, depth - 1) for i in range(rng.randrange(4))}
    return [text(), rng.randrange(-(10**9), 10**9), rng.random() - 0.5, rng.choice([True, False, None])][kind - 2]


@pytest.mark.few(seed=range(8))
@pytest.mark.parametrize("seed", range(40))
def test_counts_are_right_wherever_a_body_is_cut(seed):
    rng = random.Random(seed)
    value = {"a": [made(rng, 5) for _ in range(20)]}
    body = json.dumps(value, ensure_ascii=bool(seed % 2), indent=rng.choice([None, 1])).encode()
    expected = counted(value) | {"escapes": body.count(b"\\\\") + len(body.replace(b"\\\\", b"").split(b"\\")) - 1}
    for pieces in (1, 2, 3, 7, 64, len(body)):
        counts = looked_at(body, pieces=pieces)._counts
        assert {name: counts[name] for name in expected if name != "escapes"} == {
            name: expected[name] for name in expected if name != "escapes"
        }, pieces
        assert counts["escapes"] >= expected["escapes"]  # a pair of backslashes is two


LIMITS = [  # what a body is made of, so many of it are allowed, what is said of one more
    (lambda n: b"[" * n, 64, "nested too deeply: 64 levels"),
    (lambda n: b'{"a":' * n, 64, "nested too deeply"),
    (lambda n: b"[" + b"[]," * (n - 1), 20_000, "20,000 lists and objects"),
    (lambda n: b"[" + b"{}," * (n - 1), 20_000, "20,000 lists and objects"),
    (lambda n: b"{" + b'"a":0,' * n, 50_000, "50,000 fields"),
    (lambda n: b"[" + b"0," * n, 100_000 + CONTEXT, "231,072 values"),
    (lambda n: b'"' * (2 * n), 200_000, "200,000 texts"),
    (lambda n: b'"' + b"\\n" * n, 500_000, "500,000 escapes"),
    (lambda n: b"[" + b"1.5," * n, 10_000, "10,000 numbers with a fraction"),
    (lambda n: b"[" + b"1e5," * n, 10_000, "10,000 numbers with a fraction"),
    (lambda n: b"[" + b"9" * n, 100, "a number of more than 100 digits"),
    (lambda n: b"[-" + b"9" * n, 100, "a number of more than 100 digits"),
    (lambda n: b"]" * n, 0, "a bracket is closed that was not opened"),
]


@pytest.mark.few
@pytest.mark.parametrize(("made_of", "most", "says"), LIMITS, ids=[repr(made_of(1))[2:] for made_of, *_ in LIMITS])
@pytest.mark.parametrize("pieces", [33, PIECE])
def test_more_than_a_request_needs_is_refused(made_of, most, says, pieces):
    looked_at(made_of(most), pieces=pieces)
    with pytest.raises(ApiError, match=says) as error:
        looked_at(made_of(most + 1), pieces=pieces)
    assert error.value.status == 400


def test_digits_on_both_sides_of_a_text_are_two_numbers():
    looked_at(b'["' + b"9" * 500 + b'",' + b"9" * 60 + b',"a",' + b"9" * 60 + b"]", pieces=50)


def test_arguments_of_tool_calls_are_counted_together():
    """Each of them is JSON in a string, which the scan of the body has not looked into."""

    def body(calls: int, arguments: str) -> dict:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "tool_calls": [call] * calls}]}

    half = "[" + "[]," * 11_000 + "1]"
    assert schema.chat(body(1, half), Scan(1000)).messages
    for calls, arguments, says in ((2, half, "20,000 lists and objects"), (1, "[" * 70, "nested too deeply")):
        with pytest.raises(ApiError, match=says):
            schema.chat(body(calls, arguments), Scan(1000))
