"""Hostile clients beside honest ones: a real server, for minutes or an hour.

    python -m benchmarks serving hostile --minutes 60 -- small --max-rows 8 --context 2k --host ::
    python -m benchmarks serving hostile --minutes 60 -- tiny
    python -m benchmarks serving hostile --holds

Options after ``--`` go to ``hf-sparsekv serve``; ``tiny`` is a random Llama of four layers with the small model's
tokenizer. Both models get a chat template that shows all that a conversation can have. With ``--host ::`` the server
sees the clients' IPv4 addresses in IPv6. First each question is asked alone: its greedy answer is the right one. Then
``--honest`` clients stream the questions and check each answer, while a process of its own attacks in the kinds of
:mod:`.attacks`. Reported are the longest time between two pieces of an honest stream, alone and beside the attacks, and
counts. The resident memory of the server with its child processes is reported at its start, in the second quarter
(warm), and in the last (end).

Failures:

- an answer that differs, or an answer to an attack that should not be;
- a server that ends (the run ends with it), that does not end at SIGTERM, or that shows a traceback;
- memory ever more than ``--memory`` above that of the start;
- memory in the last quarter more than ``--growth`` above the second quarter's.

``--holds`` measures in this process how long parsing and checking each body keeps other Python threads from running.
The measure is the longest time between two looks of a thread that looks every millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from hf_sparsekv.results import device_name, versions

from ..arguments import new_parser, rows_file
from ..report import Report
from . import attacks

QUESTIONS = 8
TOKENS = 48
WORDS = ("river", "stone", "cloud", "wheel", "garden", "paper", "window", "light", "ocean", "bread", "letter", "road")
BUSY_S = 0.2  # between two tries of a client that is told to come later
# A chat template that shows all that a conversation can have, and calls of tools as Hermes writes them.
CHAT = """{{ mood }}{{ reasoning_effort }}{{ tools | tojson if tools }}{# "arguments" #}
{%- for m in messages %}<|im_start|>{{ m.role }} {{ m.name }} {{ m.tool_call_id }} {{ m.refusal }}
{{ m.reasoning_content }}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""


class Words:
    """Lines of a process from now on. They are read all the time: a process that writes to a full pipe waits."""

    def __init__(self, stream: Iterable[str]) -> None:
        self._lines: list[str] = []
        self._reading = threading.Thread(target=self._lines.extend, args=(stream,), daemon=True)
        self._reading.start()

    def all(self) -> str:
        """To its end, of a process that has ended."""
        self._reading.join(10)
        return "".join(self._lines)


def served(options: list[str]) -> tuple[subprocess.Popen, str, Words]:
    """A server in a process of its own, as people start it; its address, and its words."""
    command = [sys.executable, "-m", "hf_sparsekv", "serve", *options, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=os.environ)
    while line := server.stderr.readline():
        print(line, end="", flush=True)
        if found := re.search(r"listening on http://(\S+):(\d+)/", line):
            host = "127.0.0.1" if found[1] in ("0.0.0.0", "[::]") else found[1]
            return server, f"http://{host}:{found[2]}", Words(server.stderr)
    raise RuntimeError(f"the server has not started: it ended with {server.wait()}")


class Honest:
    """Clients whose answers are known."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.right: dict[int, str] = {}
        self.gaps: list[tuple[float, float]] = []  # the longest of each answer, and when it ended (monotonic seconds)
        self.busy = 0
        self.over = False  # the server has ended
        self.wrong: list[str] = []

    def body(self, number: int) -> dict:
        """Question ``number``."""
        text = " ".join(random.Random(number).choices(WORDS, k=20 + 10 * number))
        return {"prompt": text, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}

    async def ask(self, client: httpx.AsyncClient, number: int) -> str | None:
        """A whole answer; None if too many wait. Notes the longest time between two of its pieces."""
        text, last, longest = "", None, (0.0, 0.0)
        async with client.stream("POST", "/v1/completions", json=self.body(number)) as answer:
            if answer.status_code == 429:
                return None
            if answer.status_code != 200:
                raise attacks.Wrong(f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    piece = json.loads(line[6:])
                    if "error" in piece:
                        raise attacks.Wrong(str(piece["error"]))
                    now = time.monotonic()
                    if last is not None:
                        longest = max(longest, (now - last, now))
                    last = now
                    text += "".join(choice["text"] for choice in piece["choices"])
        self.gaps.append(longest)
        return text

    async def learn(self) -> float:
        """Ask each question alone, twice; gives the longest time between two pieces."""
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as client:
            for number in (*range(QUESTIONS), *range(QUESTIONS)):
                text = await self.ask(client, number)
                if text is None or self.right.setdefault(number, text) != text:
                    raise attacks.Wrong(f"question {number}, alone: {self.right.get(number)!r}, then {text!r}")
        gaps = self.gaps[-QUESTIONS:]
        del self.gaps[-2 * QUESTIONS :]  # they are not those beside others
        return max(gaps)[0]

    async def client(self, until: float, seed: int) -> None:
        """One question after the other."""
        rng = random.Random(seed)
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as client:
            while time.monotonic() < until and not self.over:
                number = rng.randrange(QUESTIONS)
                try:
                    text = await self.ask(client, number)
                except (attacks.Wrong, httpx.HTTPError) as error:
                    self.fail(f"question {number}: {type(error).__name__}: {error}")
                    await asyncio.sleep(1.0)  # the server may have ended
                    continue
                if text is None:
                    self.busy += 1
                    await asyncio.sleep(BUSY_S)
                elif text != self.right[number]:
                    self.fail(f"question {number}: {text!r} instead of {self.right[number]!r}")

    def longest(self) -> float:
        """Seconds between two pieces of an answer."""
        return max(self.gaps, default=(0.0, 0.0))[0]

    def fail(self, text: str) -> None:
        """Note what should not have been."""
        self.wrong.append(text)
        print(f"WRONG: {text}", flush=True)


def memory_of(server: psutil.Process) -> int:
    """Bytes of a server's resident memory, and of what its child processes do not share with it."""
    found = server.memory_info().rss
    for child in server.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            found += child.memory_full_info().uss
    return found


async def _beside(honest: Honest, args: Namespace, server: subprocess.Popen, attacker) -> list[int]:
    """Honest clients until the time is over or the server ends; gives the server's memory all along."""
    began = time.monotonic()
    until, resident, told, process = began + 60 * args.minutes, [], began, psutil.Process(server.pid)

    async def watch() -> None:
        nonlocal told
        while (now := time.monotonic()) < until:
            if server.poll() is not None:
                honest.over = True
                honest.fail(f"the server has ended with {server.returncode} after {now - began:.0f} s")
                return
            resident.append(memory_of(process))
            if now - told > 60:
                told = now
                print(
                    f"{(now - began) / 60:6.1f} min  {resident[-1] / 1e6:7.1f} MB  {len(honest.gaps)} answers, "
                    f"longest gap {1e3 * honest.longest():.0f} ms, {honest.busy} busy",
                    flush=True,
                )
            await asyncio.sleep(1.0)

    attacker.start()
    await asyncio.gather(watch(), *(honest.client(until, seed) for seed in range(args.honest)))
    return resident


def tiny(folder: Path) -> str:
    """A random Llama of four layers with the small model's tokenizer, saved there."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from hf_sparsekv.small_model import fetch_small_model

    tokenizer = AutoTokenizer.from_pretrained(fetch_small_model())
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def small(folder: Path) -> str:
    """The small model with :data:`CHAT`, there."""
    from transformers import AutoTokenizer

    from hf_sparsekv.small_model import fetch_small_model

    fetched = fetch_small_model()
    tokenizer = AutoTokenizer.from_pretrained(fetched)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    for file in fetched.iterdir():
        if not (folder / file.name).exists() and file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    return str(folder)


def holds(size: int, tries: int = 3) -> list[tuple[str, float]]:
    """Milliseconds for which each body keeps other threads from running, the longest first."""
    from hf_sparsekv_serve.http import schema
    from hf_sparsekv_serve.http.errors import ApiError
    from hf_sparsekv_serve.http.scan import PIECE, Scan

    def check(content: bytes, parse) -> None:
        scan = Scan(131_072)
        with contextlib.suppress(ApiError):
            for at in range(0, len(content), PIECE):
                scan.feed(content[at : at + PIECE])
                time.sleep(0)  # as the server's event loop does between two pieces
            parse(schema.loads(content), scan)

    found = []
    longest = {
        "honest: a prompt of 16 MB": json.dumps({"prompt": "the cat of " * ((16 << 20) // 11 - 10)}).encode(),
        "honest: 131,072 ids": json.dumps({"prompt": list(range(131_072))}).encode(),
        "honest: 1,000 messages": json.dumps({"messages": [{"role": "user", "content": "a" * 1000}] * 1000}).encode(),
    }
    kinds = {name: (body.make(size), body.path) for name, body in attacks.BODIES.items() if body.coding is None}
    kinds |= {
        name: (body, attacks.CHAT if b"messages" in body[:20] else attacks.COMPLETIONS)
        for name, body in longest.items()
    }
    for name, (content, path) in kinds.items():
        parse = schema.chat if path == attacks.CHAT else schema.completion
        best = float("inf")
        for _ in range(tries):
            gap, done = [0.0], threading.Event()

            def look(gap=gap, done=done) -> None:
                last = time.perf_counter()
                while not done.is_set():
                    time.sleep(0.001)
                    now = time.perf_counter()
                    gap[0], last = max(gap[0], now - last), now

            looking = threading.Thread(target=look)
            looking.start()
            time.sleep(0.02)
            check(content, parse)
            done.set()
            looking.join()
            best = min(best, gap[0])  # others' work on this machine makes it longer, never shorter
        found.append((name, 1e3 * best))
    return sorted(found, key=lambda one: -one[1])


def cores(text: str) -> set[int]:
    """Numbers of processor cores."""
    return {int(one) for one in text.split(",")}


@contextlib.contextmanager
def on_cores(which: set[int] | None) -> Iterator[None]:
    """Processes that are started inside run there; others, and this one afterwards, on the remaining cores."""
    if which is None:
        yield
        return
    process = psutil.Process()
    others = set(process.cpu_affinity()) - which
    if not others:
        raise SystemExit("--cores leaves none for the clients")
    process.cpu_affinity(sorted(which))
    yield
    process.cpu_affinity(sorted(others))


def arguments() -> ArgumentParser:
    """Its own options."""
    parser = new_parser("serving", __doc__)
    parser.prog = "python -m benchmarks serving hostile"
    add = parser.add_argument
    add("--minutes", type=float, default=60)
    add("--honest", type=int, default=2, help="clients that stream, at the same time")
    add("--hostile", type=int, default=4, help="clients that attack, at the same time")
    add("--cores", type=cores, help="processor cores of the server alone, as 0,1; clients get the others")
    add("--size", type=int, default=15 << 20, help="bytes of the largest bodies")
    add("--memory", type=float, default=1.5, help="GB that the server may take beside what it had at its start")
    add("--growth", type=float, default=0.1, help="of memory that is none yet, as a share")
    add("--seed", type=int, default=0)
    add("--holds", action="store_true", help="measure how long bodies hold the interpreter, and end")
    return parser


def main(argv: list[str]) -> int:
    """Run it; 1 if something is wrong."""
    mine, serve = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, ["small"])
    args = arguments().parse_args(mine)
    print(device_name(), versions())
    if args.holds:
        with Report("serving", "bodies", rows_file(args), None) as report:
            for name, ms in holds(args.size):
                with report.measuring(1, args.size, f"holds:{name}"):
                    report.add("holds", ms)
        return report.close()
    with tempfile.TemporaryDirectory() as folder, Report("serving", serve[0], rows_file(args), None) as report:
        made = {"tiny": tiny, "small": small}.get(serve[0])
        options = serve if made is None else [made(Path(folder)), *serve[1:]]
        with on_cores(args.cores):
            server, url, words = served(options)
        honest = Honest(url)
        attacked: tuple[dict[str, int], list[str], list[attacks.Made]] = {}, [], []
        process = psutil.Process(server.pid)
        try:
            with report.measuring(args.honest, 0, f"hostile:minutes={args.minutes:g}"):
                start = memory_of(process)
                alone = asyncio.run(honest.learn())
                context = multiprocessing.get_context("spawn")
                results = context.Queue()
                where = urlsplit(url)
                address = (where.hostname, where.port)
                attacker = context.Process(
                    target=attacks.attack_for,
                    args=(address, 60 * args.minutes, args.seed, args.size, args.hostile, results),
                )
                resident = asyncio.run(_beside(honest, args, server, attacker))
                try:
                    attacked = ({}, [], []) if honest.over else results.get(timeout=2 * attacks.LIMIT_S)
                    if not honest.over:
                        asyncio.run(honest.learn())  # it still answers, and as before
                except (queue.Empty, attacks.Wrong, httpx.HTTPError) as error:
                    honest.fail(f"after the attacks: {type(error).__name__}: {error}")
                attacker.terminate()
                attacker.join()
                judge(report, honest, attacked, alone, start, resident, args)
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(timeout=60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
                honest.fail("it has not ended 60 s after SIGTERM")
        said = words.all()
        if server.returncode != 0 or "Traceback" in said:
            honest.fail(f"it ended with {server.returncode}: {said[-2000:]}")
    print(f"{len(honest.wrong)} things were wrong" if honest.wrong else "nothing was wrong")
    return 1 if honest.wrong else report.close()


def judge(report, honest, attacked, alone, start, resident, args) -> None:
    """Rows, and what was wrong."""
    counts, wrong, made = attacked
    for text in wrong:
        honest.fail(text)
    resident = resident or [start]
    quarter = max(1, len(resident) // 4)
    warm, end = (statistics.median(part) for part in (resident[quarter : 2 * quarter] or resident, resident[-quarter:]))
    report.add("answers", len(honest.gaps), "count")
    report.add("busy", honest.busy, "count")
    report.add("attacks", sum(counts.values()), "count")
    report.add("kinds", len(counts), "count")
    report.add("longest_gap_alone", 1e3 * alone)
    report.add("longest_gap", 1e3 * honest.longest())
    for name, value in (("start", start), ("warm", warm), ("end", end), ("peak", max(resident))):
        report.add(f"{name}_mb", value / 1e6, "MB")
    if max(resident) > start + 1e9 * args.memory:
        honest.fail(f"memory is not bounded: {start / 1e6:.1f} MB at the start, {max(resident) / 1e6:.1f} at most")
    if end > warm * (1 + args.growth):
        honest.fail(f"memory grows: {warm / 1e6:.1f} MB when warm, {end / 1e6:.1f} at the end")
    report.add("wrong", len(honest.wrong), "count")
    print(dict(Counter(counts).most_common()), file=sys.stderr)
    for seconds, end in sorted(honest.gaps, reverse=True)[:10]:
        during = sorted({name for name, began, ended in made if began < end and ended > end - seconds})
        print(f"{1e3 * seconds:7.0f} ms without a token during: {', '.join(during)}", file=sys.stderr)
