"""Hostile bodies and connections, each beside a stream that goes on and is right."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from fake_engine import FakeEngine
from http_server import serving
from tokenizers_made import byte_level
from waiting import wait_until

from benchmarks.serving import attacks, hostile
from hf_sparsekv_serve.http import create_app
from hf_sparsekv_serve.process import ASIDE, step_aside


class Honest:
    """A client that streams the same answer again and again, and notes when its pieces come."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.over = False
        self.times: list[float] = []
        self.right = self.wrong = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": "the cat ", "max_tokens": 60, "temperature": 0, "stream": True}
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self.over:
                pieces = []
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            self.times.append(time.monotonic())
                            pieces.append(line.partition('"text":"')[2].partition('"')[0])
                if "".join(pieces) == ("the cat " * 60)[: len("".join(pieces))] and len("".join(pieces)) > 100:
                    self.right += 1
                else:
                    self.wrong += 1

    def end(self) -> None:
        self.over = True
        self._thread.join(60)


@pytest.fixture(scope="module")
def served():
    tokenizer = byte_level()
    tokenizer.chat_template = hostile.CHAT
    with (
        FakeEngine(tokenizer, step_s=0.002) as engine,
        serving(create_app(engine, "fake"), most=300, head_s=1.0) as url,
    ):
        honest = Honest(url)
        wait_until(lambda: honest.right or honest.wrong)
        yield url, honest, engine
        honest.end()


@pytest.mark.parametrize("name", attacks.NAMES)
def test_a_stream_goes_on_beside(served, name, caplog):
    url, honest, engine = served
    where, begun = urlsplit(url), len(honest.times)
    asyncio.run(attacks.attack(name, (where.hostname, where.port), attacks.HARMFUL))
    wait_until(lambda: len(honest.times) > begun + 5, 60)
    times = honest.times[max(0, begun - 1) :]
    longest = max(after - before for before, after in itertools.pairwise(times))
    assert longest < 5, "a bound that says that nothing hangs; `serving hostile` measures"
    assert not honest.wrong and "Traceback" not in caplog.text
    assert not [prompt for prompt in engine.prompts if len(prompt) > 1000]


def test_a_bomb_is_never_parsed(served, monkeypatch):
    """json.loads() would hold the interpreter."""
    from hf_sparsekv_serve.http import schema

    monkeypatch.setattr(schema, "loads", lambda body: pytest.fail("it was parsed"))
    where = urlsplit(served[0])
    for name in ("empty lists", "many fields", "many values", "many long numbers", "many escapes", "lists in lists"):
        asyncio.run(attacks.attack(name, (where.hostname, where.port), attacks.HARMFUL))


def test_how_long_bodies_hold_the_interpreter_is_measured():
    found = hostile.holds(1000, tries=1)
    assert {name for name, _ in found} >= {name for name, body in attacks.BODIES.items() if body.coding is None}
    assert [ms for _, ms in found] == sorted((ms for _, ms in found), reverse=True)


def test_the_table_has_many_kinds():
    assert len(attacks.BODIES) >= 120 and len(attacks.CONNECTIONS) >= 30


def test_bodies_reach_what_they_are_to_try(served):
    """Long texts are refused for their length; schemas reach the engine (this one compiles none)."""
    url = served[0]
    for name, body in attacks.BODIES.items():
        if name.startswith(("text in ", "a schema with ", "a tool with ")):
            headers = {"content-type": body.kind}
            answer = httpx.post(f"{url}{body.path}", content=body.make(attacks.HARMFUL), headers=headers, timeout=60)
            if body.statuses == (400,):
                assert "has more tokens than max_length" in answer.text, (name, answer.text)
            else:  # the schemas of some tools are too long for this context
                served_it = answer.status_code == 200 or (name.startswith("a tool") and "max_length" in answer.text)
                assert served_it, (name, answer.text)


def test_a_server_that_ends_ends_the_run(capsys):
    async def asks(until: float, seed: int) -> None:
        while not honest.over:
            await asyncio.sleep(0.01)

    honest, begun = hostile.Honest("http://127.0.0.1:1"), time.monotonic()
    honest.client = asks
    args = hostile.arguments().parse_args(["--minutes", "1"])
    server = subprocess.Popen([sys.executable, "-c", "import os; os.abort()"])
    asyncio.run(hostile._beside(honest, args, server, SimpleNamespace(start=lambda: None)))
    assert time.monotonic() - begun < 30 and honest.over
    assert honest.wrong == [one for one in honest.wrong if "the server has ended with -6" in one] != []


def test_memory_of_child_processes_counts():
    child = "bytearray(80_000_000); print(flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'a = {child}'])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as server:
        server.stdout.readline()
        assert hostile.memory_of(psutil.Process(server.pid)) > 80e6
        server.stdin.close()


def test_a_wrong_answer_and_memory_that_grows_are_told(capsys):
    honest = hostile.Honest("http://127.0.0.1:1")
    args = hostile.arguments().parse_args([])
    from benchmarks.report import Report

    honest.gaps = [(0.3, 10.0), (0.2, 20.0)]
    made = [("n", 9.8, 9.9), ("TLS", 9.0, 9.6), ("UTF-16", 19.0, 25.0)]
    with Report("serving", "tiny", None, None) as report, report.measuring(1, 0, "hostile"):
        hostile.judge(report, honest, ({"n": 3}, ["n: not refused"], made), 0.01, 100, [100] * 5 + [200] * 15, args)
    assert len(honest.wrong) == 1 and "not refused" in honest.wrong[0]
    told = capsys.readouterr().err
    assert "300 ms without a token during: n\n" in told and "200 ms without a token during: UTF-16\n" in told
    with Report("serving", "tiny", None, None) as report, report.measuring(1, 0, "hostile"):
        hostile.judge(report, honest, ({}, [], []), 0.01, 100, [100] * 10 + [200] * 10, args)
    assert "memory grows" in honest.wrong[-1]
    with Report("serving", "tiny", None, None) as report, report.measuring(1, 0, "hostile"):
        hostile.judge(report, honest, ({}, [], []), 0.01, 100, [100] * 10 + [2_000_000_000] + [100] * 10, args)
    assert "memory is not bounded" in honest.wrong[-1]
    with Report("serving", "tiny", None, None) as report, report.measuring(1, 0, "hostile"):
        hostile.judge(report, honest, ({}, [], []), 0.01, 100, [], args)  # it has ended at once


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
def test_threads_that_read_requests_step_aside():
    found = []

    def read() -> None:
        for _ in range(2):
            step_aside()
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    step_aside()  # not the main thread
    assert found == [max(before, ASIDE)] * 2 and os.getpriority(os.PRIO_PROCESS, 0) == before
