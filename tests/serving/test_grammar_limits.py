"""Grammars that take much time or memory: their own request ends, within bounds, and nothing else.

llguidance 1.9.1 alone, with 150,000 tokens, by keyword: CPU and memory of compiling, then the slowest mask.

| schema | compile | mask |
|---|---|---|
| integer, multipleOf 9,973; 99,991; 999,983 | 0.04 s; 0.6 s, 25 MB; 7 s, 340 MB | 10 ms |
| integer, multipleOf 997 and 991; nine primes to 23 | 2.5 s, 200 MB; out of memory at 3 GB | |
| 300 or 1,000 integers of multipleOf near 9,000 | over a minute | |
| number, multipleOf; minimum, maximum, exclusive ones to 90 digits | 0.01 s | 2 ms |
| minLength, maxLength to 10^9; minItems, maxItems to 10^12; minProperties | 0.01 s | 8 ms |
| pattern a{1000}; a{100000}; a{1000000}; (a{1000}){1000} | 0.01 s | 4 ms; 160; 270; 760 |
| pattern of 30,000 times `a?`; 8,000 times `(a|bc)*` | 0.14 s | 7.6 s; 1 s |
| pattern of 10,000 times `(.*x)*` | 1.4 s | |
| 30 patterns in allOf | out of memory at 3 GB | |
| 5,000 values of enum; a const of 60,000 characters | 0.02 s | 2 ms; 80 ms |
| 2,500 properties; 4,000 and additionalProperties; 200 patternProperties | 0.5 s; 1.1 s; 0.5 s | 67 ms |
| allOf of ten anyOf of two objects; of 14 | 0.3 s, 48 MB; refused | |
| 60 levels, 1,000 references in a row, 18 that double, recursion, formats, prefixItems | 0.1 s | 2 ms |
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from caches import FULL, SMALL
from engines import inside
from http_server import openai_client, serving
from inside import compiled_by, compiles_by, compiling, no_words, program_of
from models import build
from test_grammar import PERSON, is_person
from tokenizers_made import byte_level

from hf_sparsekv import Engine, Sampling, ServingConfig, TokenConfig
from hf_sparsekv.serving import grammar as grammar_module
from hf_sparsekv.serving import grammar_worker
from hf_sparsekv.serving.grammar import Constraint, Grammars
from hf_sparsekv.serving.request import Busy, Closed, NotFollowed
from hf_sparsekv.serving.sampling import MAX_GRAMMAR
from hf_sparsekv_serve.http import create_app
from hf_sparsekv_serve.http.prompts import LARGE

pytest.importorskip("llguidance")


def pattern(text: str) -> dict:
    return {"type": "string", "pattern": f"^{text}$"}


def multiple(of: int) -> dict:
    return {"type": "integer", "multipleOf": of}


TOO_LARGE = {  # for compiling or for the first mask
    "multipleOf": multiple(999_983),
    "multipleOf that ends a process": multiple(9_999_991),
    "multipleOf of two": {"allOf": [multiple(997), multiple(991)]},
    "multipleOf of nine": {"allOf": [multiple(of) for of in (2, 3, 5, 7, 11, 13, 17, 19, 23)]},
    "many multipleOf": {"anyOf": [multiple(9001 + 2 * i) for i in range(300)]},
    "multipleOf in a field": {"type": "object", "properties": {"a": {"items": multiple(999_983)}}},
    "patterns together": {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(30)]},
    "quantifiers in quantifiers": pattern("(((((a{10}){10}){10}){10}){10}){10}"),
    "a pattern of stars": pattern("(.*x)*" * 9000),
    "a pattern of options": pattern("a?" * 30_000),
}
LATER = pattern("a?" * 30_000)  # its mask takes seconds, once the answer comes to it
HONEST = {
    "numbers": {"type": "number", "minimum": -1e9, "exclusiveMaximum": 10**18, "multipleOf": 0.001},
    "multipleOf": multiple(997),
    "lengths": {"type": "string", "minLength": 10**5, "maxLength": 10**9},
    "items": {"type": "array", "minItems": 10**6, "maxItems": 10**9},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}},
    "enum": {"enum": [f"item {i}" for i in range(3000)]},
    "a pattern": pattern(r"(\w{1,30} ){1,300}"),
    "a tree": {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
}


@pytest.fixture(scope="module")
def grammars():
    tokenizer = byte_level()
    made = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine():
    tokenizer = byte_level()
    net = build("llama", "sparsekv", vocab_size=len(tokenizer) + 5)
    options = ServingConfig(max_rows=4, max_length=1000, chunk=64)
    with Engine(net, tokenizer, TokenConfig(**{**SMALL, **FULL}), None, options) as engine:
        yield engine


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def processes(session: int, ended: bool = False) -> set[int]:
    """Those of one :class:`Grammars`, by the process that it has started; others may have theirs at the same time.

    Args:
        ended: those that have ended, and for which no process has waited.
    """
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                state, _, _, of = file.read().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        found |= {int(pid)} if int(of) == session and (state == "Z") == ended else set()
    return found


def until(true, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def walk(constraint: Constraint, tokenizer, rng: random.Random, steps: int) -> None:
    """Draw allowed tokens until the end, an error, or so many."""
    words = no_words(constraint)
    for _ in range(steps):
        constraint.ask()
        constraint.fill(words)
        bits = [i for i in range(32 * len(words)) if words[i // 32] >> (i % 32) & 1]
        token = rng.choice(bits or [tokenizer.eos_token_id])
        if constraint.error is not None or token == tokenizer.eos_token_id:
            return
        constraint.unread.append(lambda token=token: token)


@pytest.mark.parametrize("which", TOO_LARGE)
def test_a_grammar_that_takes_much_is_refused(grammars, which):
    """It takes this process no time and no memory, and the next request is as any."""
    grammars.constraint(Sampling(json_schema={"type": "object"}))  # the tokenizer is there
    before, cpu = resident(), time.process_time()
    with pytest.raises(ValueError, match=r"json_schema cannot be followed: llguidance takes more than 0\.5 s"):
        grammars.constraint(Sampling(json_schema=TOO_LARGE[which]))
    assert time.process_time() - cpu < 0.3 and resident() - before < 20 << 20
    assert grammars.constraint(Sampling(json_schema=PERSON)) is not None


@pytest.mark.parametrize("which", HONEST)
def test_a_grammar_that_takes_little_is_followed(grammars, which):
    constraint = grammars.constraint(Sampling(json_schema=HONEST[which]))
    walk(constraint, byte_level(), random.Random(0), 100)
    assert constraint.error is None


def test_a_grammar_of_lark_is_bounded_as_well(grammars):
    """As the parameters of tools."""
    lark = f"start: a\na: %json {json.dumps(multiple(999_983))}"
    with pytest.raises(ValueError, match="grammar cannot be followed: llguidance takes more"):
        grammars.constraint(Sampling(grammar=lark))


def test_a_mask_that_takes_long_ends_its_own_request_only(engine):
    """The others have their tokens within a second, and their answers."""
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": LATER}, "required": ["a", "b"]}
    asked = Sampling(max_tokens=200, temperature=0.0, json_schema={**schema, "additionalProperties": False})
    others = [engine.submit("the cat", Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)) for _ in range(2)]
    person = engine.submit("a", Sampling(max_tokens=400, seed=1, json_schema=PERSON))
    with pytest.raises(NotFollowed, match="the grammar is too large for a step: llguidance takes more than"):
        engine.submit("a", asked).result()
    outputs = [one.result() for one in others]
    assert all(len(output.token_ids) == 400 for output in outputs) and is_person(person.result().text)
    gaps = [b - a for output in outputs for a, b in zip(output.token_times, output.token_times[1:])]
    assert max(gaps) < 3  # 0.25 s of CPU, on a machine that has others to serve; 7 s without a bound


def test_a_process_that_ends_takes_its_answer_along(engine):
    """Whoever has ended it: a bug, or the machine that is out of memory."""
    asked = Sampling(max_tokens=900, json_schema={"type": "array", "items": {"type": "integer"}, "minItems": 10**5})
    engine.submit("a", Sampling(max_tokens=1, json_schema={})).result()
    session = program_of(inside(engine).grammars).pid
    before = processes(session)
    handle = engine.submit("a", asked)
    next(iter(handle))
    for pid in processes(session) - before:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(NotFollowed):
        handle.result()
    for pid in processes(session) - {session}:  # those that have compiled
        os.kill(pid, signal.SIGKILL)
    few = Sampling(max_tokens=9, json_schema=asked.json_schema)
    with pytest.raises(Busy, match="the process of this grammar has ended: ask again"):
        engine.submit("a", few).result()
    assert len(engine.submit("a", few).result().token_ids) == 9
    os.kill(session, signal.SIGKILL)
    (output,) = engine.generate_batch(["a"], Sampling(max_tokens=400, seed=2, json_schema={**PERSON, "title": "x"}))
    assert is_person(output.text)


def test_grammars_that_are_kept_are_bounded(grammars, monkeypatch):
    """By their number and their size, also those of requests that wait."""
    monkeypatch.setattr(grammar_module, "KEPT", 5)
    held = [grammars.constraint(Sampling(json_schema={"const": i})) for i in range(8)]
    assert len(compiled_by(grammars)) == 5 and all(compiled_by(one).size > 0 for one in held)
    monkeypatch.setattr(grammar_module, "KEPT_BYTES", 3 * compiled_by(held[0]).size)
    grammars.constraint(Sampling(json_schema={"const": 8}))
    assert len(compiled_by(grammars)) <= 3
    monkeypatch.setattr(grammar_module, "MOST_BYTES", 4 * compiled_by(held[0]).size)
    with pytest.raises(Exception, match="take too much memory already"):
        grammars.constraint(Sampling(json_schema={"const": 9}))
    del held
    assert grammars.constraint(Sampling(json_schema={"const": 9})) is not None


def test_processes_end_with_the_answers_and_the_engine():
    tokenizer = byte_level()
    made = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    constraint = made.constraint(Sampling(json_schema=PERSON))
    constraint.ask()
    constraint.fill(no_words(constraint))
    session = program_of(made).pid
    assert len(processes(session)) == 3  # of the tokenizer, the grammar and the answer
    del constraint
    assert until(lambda: len(processes(session)) == 2)
    made.close()
    assert until(lambda: not processes(session))


@pytest.mark.parametrize("end", ["whole", "too long", "cancelled", "failed"])
def test_the_process_of_an_answer_ends_with_it(end):
    """Without the cyclic garbage collector, which may not come for minutes."""
    asked = {"type": "array", "items": {"const": 1}, "minItems": 2 if end == "whole" else 10**5}
    if end == "whole":
        asked["maxItems"] = 2
    tokenizer = byte_level()
    net = build("llama", "sparsekv", vocab_size=len(tokenizer) + 5)
    options = ServingConfig(max_rows=2, max_length=1000, chunk=64)
    gc.disable()
    try:
        with Engine(net, tokenizer, TokenConfig(**{**SMALL, **FULL}), None, options) as engine:
            constraint = inside(engine).grammars.constraint(Sampling(json_schema=asked))
            session = program_of(inside(engine).grammars).pid
            before = processes(session)
            assert len(before) == 2  # of the tokenizer and the grammar
            handle = engine.submit("a", Sampling(max_tokens=9 if end == "too long" else 900, json_schema=asked))
            next(iter(handle))
            assert end in ("whole", "too long") or len(processes(session)) == 3
            if end == "cancelled":
                handle.cancel()
            if end == "failed":
                inside(engine).loop.lost(RuntimeError("a test"))
            with pytest.raises(RuntimeError) if end == "failed" else contextlib.nullcontext():
                handle.result()
            assert until(lambda: processes(session) == before) and constraint.error is None
    finally:
        gc.enable()


def test_masks_have_the_priority_of_the_engine(engine):
    """Threads that submit have a lower one."""
    with serving(create_app(engine, "m")) as url, openai_client(url) as client:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "priority"}}}
        client.completions.create(model="m", prompt="a", max_tokens=300, extra_body={"response_format": form})
    here = os.getpriority(os.PRIO_PROCESS, 0)
    found = processes(program_of(inside(engine).grammars).pid)
    assert len(found) > 1 and {os.getpriority(os.PRIO_PROCESS, pid) for pid in found} == {here}


@pytest.mark.parametrize("large", [False, True])
def test_other_requests_wait_for_no_schema(engine, monkeypatch, large):
    """Ten schemas that take half a second each, and then an ordinary request; in bodies of both kinds."""
    label = "x" * LARGE if large else "x"
    monkeypatch.setattr(grammar_module, "MOST_COMPILING", 6)
    with serving(create_app(engine, "m")) as url, openai_client(url) as client:

        def ask(**more):
            return client.completions.create(model="m", prompt="a", max_tokens=3, user=label, **more)

        def schema(i: int) -> dict:
            named = {"name": "x", "schema": multiple(9_000_011 + 2 * i + 100 * large)}
            return {"extra_body": {"response_format": {"type": "json_schema", "json_schema": named}}}

        ask()
        ends: list[int] = []

        def bomb(i: int) -> None:
            try:
                ask(**schema(i))
            except Exception as error:
                ends.append(error.status_code)

        threads = [threading.Thread(target=bomb, args=(i,)) for i in range(10)]
        for thread in threads:
            thread.start()
        assert until(lambda: len(compiling(inside(engine).grammars)) == grammar_module.MOST_COMPILING)
        began = time.monotonic()
        ask()
        took = time.monotonic() - began
        for thread in threads:
            thread.join()
    assert took < 2 and set(ends) == {400, 429} and len(ends) == 10


def test_one_schema_of_many_requests_is_compiled_once(grammars, monkeypatch):
    made, compiled = [], []
    compiles_by(monkeypatch, grammars, lambda real, *asked: compiled.append(1) or real(*asked))
    asked = Sampling(json_schema={"enum": [f"once {i}" for i in range(2000)]})
    threads = [threading.Thread(target=lambda: made.append(grammars.constraint(asked))) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 30 and len(compiled) == 1 and len({compiled_by(one) for one in made}) == 1


def test_a_slow_schema_of_many_requests_takes_as_much_as_one(grammars, monkeypatch):
    """Few wait for it, it is not compiled again, and its process ends without the cyclic garbage collector."""
    go, ends, compiled = threading.Event(), [], []
    grammars.constraint(Sampling(json_schema={"type": "object"}))  # the tokenizer is there
    compiles_by(monkeypatch, grammars, lambda real, *asked: (compiled.append(1), go.wait(20), real(*asked))[2])
    asked = Sampling(json_schema=multiple(9_100_003))
    gc.collect()
    before = processes(program_of(grammars).pid)

    def ask() -> None:
        try:
            grammars.constraint(asked)
        except Exception as error:
            ends.append(type(error))

    gc.disable()
    try:
        threads = [threading.Thread(target=ask) for _ in range(64)]
        for thread in threads:
            thread.start()
        assert until(lambda: ends == [Busy] * (64 - grammar_module.MOST_COMPILING))
        go.set()
        for thread in threads:
            thread.join()
        assert ends.count(ValueError) == grammar_module.MOST_COMPILING and len(ends) == 64
        with pytest.raises(ValueError, match="json_schema cannot be followed: llguidance takes more than"):
            grammars.constraint(asked)
        assert len(compiled) == 1 and until(lambda: processes(program_of(grammars).pid) <= before)
    finally:
        gc.enable()
    monkeypatch.setattr(grammar_module, "REFUSED_S", 0)
    ask()
    assert len(compiled) == 2 and ends[-1] is ValueError


def test_nobody_has_to_wait_for_processes_of_answers():
    """Also where the server is a container's process 1, which gets those whose parents have ended."""
    tokenizer = byte_level()
    made = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    prctl = ctypes.CDLL(None).prctl
    assert prctl(grammar_worker.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        constraint = made.constraint(Sampling(json_schema=PERSON))
        walk(constraint, tokenizer, random.Random(0), 2)
        session = program_of(made).pid
        compiled_by(made).clear()
        compiled_by(constraint).connection.close()
        assert until(lambda: len(processes(session)) == 2)
        constraint.close()
        assert until(lambda: processes(session) == {session}) and not processes(session, ended=True)
    finally:
        prctl(grammar_worker.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        made.close()


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_the_limit_of_time_holds_whatever_is_inherited(how):
    """The timers' signal is ignored or blocked in the server, as by a profiler. This schema takes little memory."""
    tokenizer, before = byte_level(), signal.getsignal(signal.SIGPROF)
    if how == "ignored":
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    made = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    try:
        with pytest.raises(ValueError, match=r"llguidance takes more than 0\.5 s"):
            made.constraint(Sampling(json_schema=multiple(199_999)))
    finally:
        signal.signal(signal.SIGPROF, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        made.close()


def test_a_machine_that_starts_no_process(grammars, monkeypatch):
    """No error of the system reaches the loop, and no request waits for what may never be."""
    constraint = grammars.constraint(Sampling(json_schema=PERSON))

    def none():
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "_pipe", none)
        with pytest.raises(RuntimeError, match=r"the machine starts no process for a grammar: .*Too many") as error:
            grammars.constraint(Sampling(json_schema={"const": "no process"}))
        assert type(error.value) is RuntimeError  # Engine.generate_batch waits for Busy
        walk(constraint, byte_level(), random.Random(0), 2)
        assert "the machine starts no process for this grammar: [Errno 24]" in str(constraint.error)
    walk(constraint := grammars.constraint(Sampling(json_schema=PERSON)), byte_level(), random.Random(0), 300)
    assert constraint.error is None


def test_python_s_default_timeout_is_not_the_processes():
    tokenizer = byte_level()
    made = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    socket.setdefaulttimeout(5)
    try:
        walk(constraint := made.constraint(Sampling(json_schema=PERSON)), tokenizer, random.Random(0), 300)
    finally:
        socket.setdefaulttimeout(None)
        made.close()
    assert constraint.error is None


def test_nothing_is_compiled_after_the_end():
    tokenizer = byte_level()
    made = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    made.constraint(Sampling(json_schema=PERSON))
    ends = []

    def slow() -> None:
        try:
            made.constraint(Sampling(json_schema=multiple(9_200_003)))
        except Exception as error:
            ends.append(type(error))

    thread = threading.Thread(target=slow)
    thread.start()
    assert until(lambda: compiling(made))
    made.close()
    thread.join()
    for schema in (PERSON, {"const": "after the end"}):
        with pytest.raises(Closed, match="it is closed"):
            made.constraint(Sampling(json_schema=schema))
    assert ends == [Closed] and program_of(made) is None


def test_requests_that_are_refused_are_counted(engine, monkeypatch):
    before = engine.stats().refused.get("grammars", 0)
    monkeypatch.setattr(grammar_module, "MOST_COMPILING", 0)
    with pytest.raises(Busy, match="wait for schemas and grammars already"):
        engine.submit("a", Sampling(json_schema={"const": "counted"}))
    assert engine.stats().refused["grammars"] == before + 1


# ---------------------------------------------------------------------- schemas at random


NUMBERS = (0, 1, 2, 7, 97, 1000, 9973, 10**5, 999_983, 10**9, 10**12, 0.1, 0.003, 1e-9, 1e300, -5)
ATOMS = ("a", ".", r"\w", "[a-z]", "(a|b)", "x*", "(ab)+", r"\d", "é", "(a|bc)*", ".*x")


def drawn(rng: random.Random, depth: int) -> dict:
    """A schema at random, with numbers of every size."""
    kinds = ["string", "integer", "number", "enum", "format", "ref"]
    kind = rng.choice(kinds + ["object", "array", "anyOf", "allOf", "many", "object"] * (depth > 0))
    number = rng.choice
    if kind == "string":
        made = {"type": "string"}
        if rng.random() < 0.5:
            low = rng.choice((0, 1, 50, 3000))
            quantified = f"{{{low},{low + rng.choice((0, 7, 10**4))}}}"
            text = "".join(rng.choice(ATOMS) + rng.choice(("", "?", "*", quantified)) for _ in range(rng.randint(1, 9)))
            made["pattern"] = rng.choice(("^{}$", "{}", "^({})*$", "^({}){{1,99}}$")).format(text)
        if rng.random() < 0.4:
            made |= {"minLength": rng.choice((0, 9, 10**5)), "maxLength": rng.choice((10**5, 10**9))}
        return made
    if kind in ("integer", "number"):
        names = rng.sample(("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), 2)
        return {"type": kind, **{name: number(NUMBERS) for name in names}}
    if kind == "enum":
        return {"enum": [rng.choice((str(i), i, None, [i])) for i in range(rng.choice((1, 9, 2000)))]}
    if kind == "format":
        return {"type": "string", "format": rng.choice(("date-time", "uri", "email", "ipv6", "uuid"))}
    if kind == "ref":
        return {"$ref": rng.choice(("#", "#/$defs/a"))}
    if kind == "array":
        options = {"minItems": abs(int(min(number(NUMBERS), 10**12))), "items": drawn(rng, depth - 1)}
        return {"type": "array", **dict(rng.sample([*options.items()], rng.randint(0, 2)))}
    if kind == "object":
        names = [f"k{i}" for i in range(rng.choice((1, 2, 5, 60)))]
        few = [drawn(rng, depth - 1) for _ in range(3)]
        made = {"type": "object", "properties": {name: rng.choice(few) for name in names}}
        return {**made, "required": rng.sample(names, rng.randint(0, len(names)))}
    if kind == "many":
        return {"anyOf": [multiple(rng.randint(2, 9999)) for _ in range(rng.choice((2, 50, 400)))]}
    return {kind: [drawn(rng, depth - 1) for _ in range(rng.randint(1, 12))]}


@pytest.mark.few(seed=[0])
@pytest.mark.parametrize("seed", range(6))
def test_schemas_at_random(grammars, seed):
    """None takes this process much, however it ends; after all of them an honest one is followed."""
    rng, tokenizer, before, ends = random.Random(seed), byte_level(), resident(), {"made": 0, "refused": 0, "later": 0}
    grammars.constraint(Sampling(json_schema={"type": "object"}))
    began, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - began < 4:
        schema = {**drawn(rng, 4), "$defs": {"a": drawn(rng, 1)}}
        if len(json.dumps(schema)) > MAX_GRAMMAR:
            continue
        try:
            constraint = grammars.constraint(Sampling(json_schema=schema))
        except ValueError:
            ends["refused"] += 1
            continue
        walk(constraint, tokenizer, rng, 40)
        ends["made" if constraint.error is None else "later"] += 1
    assert time.process_time() - cpu < time.monotonic() - began and resident() - before < 60 << 20
    assert ends["made"] and ends["refused"], ends
    walk(constraint := grammars.constraint(Sampling(json_schema=PERSON)), tokenizer, rng, 300)
    assert constraint.error is None


SLOW_MASKS = """
import runpy, sys, time

program = runpy.run_path(sys.argv[1])

class Matcher:
    is_stopped, is_error = lambda self: True, lambda self: False

    def unsafe_compute_mask_ptr(self, address, size):
        end = time.process_time() + float(sys.argv[2])
        while time.process_time() < end:
            pass

worker = program["Worker"](None, None, 1, {})
worker._matcher = Matcher()
for i in range(10_000):
    worker._next(b"")
    print(i, flush=True)
"""


@pytest.mark.parametrize(("seconds", "fewest", "most"), [(0.2, 3, 9), (0.5, 0, 0)])
def test_many_slow_masks_end_an_answer(seconds, fewest, most):
    """0.25 s are too long for one; of 0.2 s, each is short enough, and all together are not."""
    command = [sys.executable, "-c", SLOW_MASKS, grammar_worker.__file__, str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGPROF
    assert fewest <= len(done.stdout.splitlines()) <= most
