"""Grammars, expressions, echoes and tokens that are hostile, under the names that vLLM has for them.

:mod:`.attacks` sends them. Some are quadratic in llguidance's converter, or grow with a number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable


def _structured(**asked: object) -> dict:
    return {"structured_outputs": asked, "max_tokens": 20}


def _rules(size: int) -> str:
    some = min(2000, max(10, size // 40))
    rules = "".join(f'a{i} ::= "x" a{i + 1} | [a-z]\n' for i in range(some))
    return f'root ::= a0\n{rules}a{some} ::= "{random.randint(1000, 9999)}"\n'


def _nested(begin: str, end: str, inner: str = '"a"') -> Callable[[int], dict]:
    return lambda size: _structured(grammar="start: " + begin * min(size, 9000) + inner + end * min(size, 9000))


SAID = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FIELDS: dict[str, Callable[[int], dict]] = {
    "many rules": lambda size: _structured(grammar=_rules(size)),
    "many lines": lambda size: _structured(grammar="\n" * 60_000 + 'root ::= "a"'),
    "many brackets": _nested("(", ")"),
    "grammars in grammars": _nested("%lark { start: ", "}"),
    "brackets that end it": _nested("%lark { start: ", "", '"a" } start: "b"'),
    "a rule without an end": lambda size: _structured(grammar="start: start start"),
    "repeats": lambda size: _structured(grammar="root ::= " + " ".join('"a"{1,9999}' for _ in range(4000))),
    "an expression that repeats": lambda size: _structured(regex="(a{1,999}b{1,999}){1,999}" * 9),
    "an expression of any text": lambda size: _structured(regex="(.*a.*b.*)*c" * 200),
    "an expression that looks around": lambda size: _structured(regex="(?=a)" * 500),
    "slashes": lambda size: _structured(regex="/\\" * 20_000),
    "a long expression": lambda size: _structured(regex="a" * size),
    "many choices": lambda size: _structured(choice=["a" * 60 + str(i) for i in range(1024)]),
    "too many choices": lambda size: _structured(choice=["a"] * min(90_000, size // 4)),
    "choices that look like rules": lambda size: _structured(choice=['" | start', "\n%json {", "{}", "\\"]),
    "a schema as text": lambda size: _structured(json="[" * 60_000),
    "a schema and tools": lambda size: {**_structured(json={"multipleOf": 1e-9}), "tools": [TOOL]},
    "expressions and tools": lambda size: {**_structured(regex="x{1,9999}" * 9), "tools": [TOOL]},
    "all at once": lambda size: {**_structured(regex="a"), "guided_json": {}, "guided_choice": ["a"]},
    "ends": lambda size: {"stop_token_ids": [*range(128)], "min_tokens": 3, "max_tokens": 4},
    "many ends": lambda size: {"stop_token_ids": [7] * min(90_000, size // 3)},
    "no end": lambda size: {"min_tokens": 10**30},
}
_OF_PATHS: dict[tuple[str, str], Callable[[int], dict]] = {
    ("/v1/completions", "an echo"): lambda size: {"prompt": "the cat", "echo": True, "logprobs": 20, "max_tokens": 0},
    ("/v1/completions", "many echoes"): lambda size: {"prompt": ["the"] * 200, "echo": True, "logprobs": 20, "n": 2},
    ("/v1/completions", "an echo of ids"): lambda size: {"prompt": [-1, 10**30], "echo": True, "max_tokens": 0},
    ("/tokenize", "a long text"): lambda size: {"prompt": "the cat of " * (size // 11)},
    ("/tokenize", "one long word"): lambda size: {"prompt": "a" * (size // 4)},
    ("/tokenize", "a template"): lambda size: {"messages": [{"role": "user", "content": "{{" * 1000}]},
    ("/tokenize", "many messages"): lambda size: {
        "messages": [{"role": "user", "content": "a"}] * max(5000, size // 40)
    },
    ("/detokenize", "many ids"): lambda size: {"tokens": [7] * min(90_000, size // 3)},
    ("/detokenize", "ids that are none"): lambda size: {"tokens": [-1, 10**40]},
}


def _encoded(make: Callable[[int], dict]) -> Callable[[int], bytes]:
    """As bytes of JSON."""
    return lambda size: json.dumps(make(size)).encode()


# By endpoint and name.
BODIES = {key: _encoded(make) for key, make in _OF_PATHS.items()}
