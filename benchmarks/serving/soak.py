"""A real server under clients of every kind for a long time: nothing may hang, nothing may grow.

    python -m benchmarks serving soak --minutes 60 -- small --max-rows 8 --context 2k --batch-tokens 24k

What stands behind ``--`` goes to ``hf-sparsekv serve``, which runs in a process of its own, as people run it. Clients
are (at the same time, ``--clients`` of them): whole streams, whose greedy answers must be the same each time they are
asked for; answers in one piece, drawn with a seed, likewise; clients that close in the middle; clients that are killed
with SIGKILL; clients that read a few bytes a second; bodies that are no request. Every few minutes 200 connections come
at once. In float32 the same question has the same answer, whoever decodes beside it; in other precisions near ties
turn, so ``--may-differ`` counts them and does not fail.

The server's memory (resident), threads, open files and its own metrics are noted all the time. At the end everybody has
gone: nothing runs, waits or is held, and it ends at SIGTERM. A failure is: an answer that differs, an error that should
not be, a request without an end after ``--limit`` seconds, rows that stay taken, memory of the last quarter more than
``--growth`` above the second quarter's, and more threads or files at the end than when it was warm.

``--ranks 2`` serves tensor parallel: torchrun starts so many processes, and rank 0's is watched. With ``--lose-a-rank``
the last one is killed at the end, while answers are under way: each of them must have an end, and all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import psutil

from hf_sparsekv.results import device_name, versions

from ..arguments import new_parser, rows_file
from ..report import Report
from .server_process import rank_of, served

QUESTIONS = 12
CROWD, CROWD_EVERY_S = 200, 300.0
LOST_S = 60.0  # within which everything has ended after a rank is lost
WORDS = ("river", "stone", "cloud", "wheel", "garden", "paper", "window", "light", "ocean", "bread", "letter", "road")
BAD = (
    b"",
    b"{",
    b"[]",
    b'"text"',
    b'{"prompt": ""}',
    b'{"prompt": [1, -5]}',
    b'{"prompt": [99999999]}',
    b'{"prompt": "a", "max_tokens": 0}',
    b'{"prompt": "a", "max_tokens": 100000000}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "top_p": 0}',
    b'{"prompt": "a", "n": 3000}',
    b'{"prompt": "a", "unknown_field": 1}',
    b"\xff\xfe\x00 not text",
)
# A client that is killed: it has no end of its own.
READER = """
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
s.sendall(sys.stdin.buffer.read())
while s.recv(4096):
    pass
"""


@dataclass
class Seen:
    """The server at one time."""

    at: float
    resident: int
    threads: int
    files: int
    metrics: dict[str, float]


@dataclass
class Soak:
    """What has been asked, and what came of it."""

    url: str
    args: Namespace
    rng: random.Random
    ends: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: dict[tuple, str] = field(default_factory=dict)
    differing: int = 0
    seen: list[Seen] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        """Where the server listens."""
        parts = urlsplit(self.url)
        return parts.hostname, parts.port

    def fail(self, text: str) -> None:
        """Note what should not have been."""
        self.wrong.append(text)
        print(f"WRONG: {text}", flush=True)

    def body(self, number: int, drawn: bool = False, stream: bool = True) -> dict:
        """Question ``number``: some share their beginning with others."""
        rng = random.Random(number)
        shared = random.Random(number % 3)
        text = " ".join(shared.choices(WORDS, k=300 if number % 2 else 20)) + " " + " ".join(rng.choices(WORDS, k=30))
        body = {"prompt": text, "max_tokens": 4 + 9 * (number % 7), "stream": stream, "ignore_eos": True}
        return body | ({"temperature": 0.9, "top_p": 0.9, "seed": number} if drawn else {"temperature": 0})

    # ------------------------------------------------------------------ clients

    async def whole(self, client: httpx.AsyncClient, drawn: bool) -> str:
        """A question and its whole answer, which is what it was before."""
        number = self.rng.randrange(QUESTIONS)
        body = self.body(number, drawn, stream=not drawn)
        text = ""
        if drawn:
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                return self.refused(answer.status_code, answer.text)
            text = answer.json()["choices"][0]["text"]
        else:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    return self.refused(answer.status_code, (await answer.aread()).decode())
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        piece = json.loads(line[6:])
                        if "error" in piece:
                            self.fail(f"question {number}: {piece['error']}")
                            return "error"
                        text += "".join(choice["text"] for choice in piece["choices"])
        before = self.answers.setdefault((number, drawn), text)
        if before != text:
            self.differing += 1
            if not self.args.may_differ:
                self.fail(f"question {number} (drawn: {drawn}) had the answer {before!r}, now {text!r}")
        return "answered"

    def refused(self, status: int, text: str) -> str:
        """Busy is an answer, too."""
        if status == 429:
            return "busy"
        self.fail(f"status {status}: {text[:200]}")
        return f"status {status}"

    async def leaves(self, client: httpx.AsyncClient) -> str:
        """Closes after a few pieces."""
        body = self.body(self.rng.randrange(1000)) | {"max_tokens": 200}
        pieces = self.rng.randrange(6)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return self.refused(answer.status_code, (await answer.aread()).decode())
            async for _ in answer.aiter_lines():
                if pieces == 0:
                    break
                pieces -= 1
        return "left"

    def sent(self, body: dict | bytes) -> bytes:
        """A request as it goes over the wire."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close"
        return f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content

    async def killed(self) -> str:
        """A process that is killed with SIGKILL while it reads."""
        host, port = self.address
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", READER, host, str(port), stdin=asyncio.subprocess.PIPE
        )
        process.stdin.write(self.sent(self.body(self.rng.randrange(1000)) | {"max_tokens": 300}))
        await process.stdin.drain()
        process.stdin.close()
        await asyncio.sleep(0.2 + 2 * self.rng.random())
        with contextlib.suppress(ProcessLookupError):  # its answer may have ended before, and so has it
            process.kill()
        await process.wait()
        return "killed"

    async def slow(self) -> str:
        """Reads a few bytes at a time, then the rest."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(connection, self.address)
            await loop.sock_sendall(connection, self.sent(self.body(self.rng.randrange(QUESTIONS))))
            until, got = time.monotonic() + self.args.slow, b""
            while time.monotonic() < until:
                part = await loop.sock_recv(connection, 16)
                if not part:
                    break
                got += part
                await asyncio.sleep(0.1)
            while part := await loop.sock_recv(connection, 1 << 16):
                got += part
        finally:
            connection.close()
        if b"data: [DONE]" not in got and b" 429 " not in got[:40]:
            self.fail(f"a slow reader's answer ends with {got[-120:]!r}")
        return "read slowly"

    async def bad(self, client: httpx.AsyncClient) -> str:
        """What is no request gets an error that says so."""
        content = self.rng.choice(BAD)
        answer = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        if answer.status_code not in (400, 422) or not answer.json()["error"]["message"]:
            self.fail(f"{content!r}: status {answer.status_code}: {answer.text[:200]}")
        return "refused"

    async def crowd(self) -> str:
        """Many connections at once, each with a short question; each gets an answer."""
        limits = httpx.Limits(max_connections=CROWD, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=self.args.limit, limits=limits) as client:
            body = self.body(0, stream=False) | {"max_tokens": 2}
            found = await asyncio.gather(
                *(client.post("/v1/completions", json=body) for _ in range(CROWD)), return_exceptions=True
            )
        ends = Counter(one.status_code if isinstance(one, httpx.Response) else type(one).__name__ for one in found)
        if set(ends) - {200, 429}:
            self.fail(f"{CROWD} connections at once: {dict(ends)}")
        self.ends[f"of a crowd of {CROWD}: answered"] += ends[200]
        return "crowds"

    async def clients(self, until: float) -> None:
        """One client after the other, until the time is over."""
        async with httpx.AsyncClient(base_url=self.url, timeout=self.args.limit) as client:
            kinds = {
                lambda: self.whole(client, False): 8,
                lambda: self.whole(client, True): 4,
                lambda: self.leaves(client): 3,
                self.killed: 1,
                self.slow: 1,
                lambda: self.bad(client): 3,
            }
            while time.monotonic() < until:
                kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
                await self.one(kind)

    async def one(self, kind) -> None:
        """One client, which must have an end."""
        try:
            self.ends[await asyncio.wait_for(kind(), self.args.limit)] += 1
        except (TimeoutError, httpx.TimeoutException):
            self.fail(f"no end after {self.args.limit:g} s")
        except (httpx.HTTPError, OSError) as error:
            self.fail(f"{type(error).__name__}: {error}")

    async def crowds(self, until: float) -> None:
        """A crowd every few minutes; the first one soon."""
        while (left := until - time.monotonic()) > 30:
            await asyncio.sleep(min(20 if not self.ends["crowds"] else CROWD_EVERY_S, left - 20))
            await self.one(self.crowd)

    # ------------------------------------------------------------------ the server

    async def look(self, client: httpx.AsyncClient, process: psutil.Process) -> Seen:
        """What the server is like now."""
        text = (await client.get("/metrics")).text
        metrics = {
            name: float(value) for name, value in re.findall(r"^hf_sparsekv_(\w+) ([\d.e+]+)$", text, re.MULTILINE)
        }
        with process.oneshot():
            now = Seen(time.monotonic(), process.memory_info().rss, process.num_threads(), process.num_fds(), metrics)
        self.seen.append(now)
        return now

    async def watch(self, process: psutil.Process, until: float) -> None:
        """Look all the time, and say something now and then."""
        began, told = time.monotonic(), 0.0
        async with httpx.AsyncClient(base_url=self.url, timeout=self.args.limit) as client:
            while time.monotonic() < until:
                now = await self.look(client, process)
                if now.at - told > 60:
                    told = now.at
                    print(
                        f"{(now.at - began) / 60:6.1f} min  {now.resident / 1e6:7.1f} MB  {now.threads} threads  "
                        f"{now.files} files  {now.metrics['generated_tokens_total']:.0f} tokens  {dict(self.ends)}",
                        flush=True,
                    )
                await asyncio.sleep(self.args.every)

    async def run(self, process: psutil.Process) -> None:
        """Everything, until the time is over and everybody has gone."""
        until = time.monotonic() + 60 * self.args.minutes
        tasks = [self.clients(until) for _ in range(self.args.clients)]
        await asyncio.gather(*tasks, self.watch(process, until), self.crowds(until))
        async with httpx.AsyncClient(base_url=self.url, timeout=self.args.limit) as client:
            for _ in range(100):
                last = await self.look(client, process)
                left = sum(last.metrics[f"requests_{state}"] for state in ("running", "waiting", "held", "prefilling"))
                if not left:
                    break
                await asyncio.sleep(0.3)
            else:
                self.fail(f"everybody has gone, and {left:g} requests are still there: {last.metrics}")
            await self.one(lambda: self.whole(client, False))  # it still answers

    def judge(self, report: Report) -> None:
        """Rows, and whether something has grown."""
        quarter = max(1, len(self.seen) // 4)
        early, late = self.seen[quarter : 2 * quarter], self.seen[-quarter:]
        middle = {
            name: [statistics.median(getattr(one, name) for one in part) for part in (early or late, late)]
            for name in ("resident", "threads", "files")
        }
        report.add("second_quarter_mb", middle["resident"][0] / 1e6, "MB")
        report.add("last_quarter_mb", middle["resident"][1] / 1e6, "MB")
        report.add("peak_mb", max(one.resident for one in self.seen) / 1e6, "MB")
        report.add("threads", middle["threads"][1], "count")
        report.add("files", middle["files"][1], "count")
        last = self.seen[-1].metrics
        for name in ("requests", "requests_finished", "requests_cancelled", "requests_failed", "generated_tokens"):
            report.add(name, last[f"{name}_total"], "count")
        for state in ("held", "waiting"):
            report.add(f"most_{state}", max(one.metrics[f"requests_{state}"] for one in self.seen), "count")
        report.add("differing", self.differing, "count")
        report.add("wrong", len(self.wrong), "count")
        before, after = middle["resident"]
        if after > before * (1 + self.args.growth):
            self.fail(f"memory grows: {before / 1e6:.1f} MB in the second quarter, {after / 1e6:.1f} in the last")
        warm = self.seen[quarter:-quarter] or late  # pools of threads fill up when crowds come
        for name in ("threads", "files"):
            most, last_of = max(getattr(one, name) for one in warm), getattr(self.seen[-1], name)
            if last_of > most:
                self.fail(f"{name}: {last_of} at the end, at most {most} in the middle half")
        if last["requests_failed_total"]:
            self.fail(f"{last['requests_failed_total']:.0f} requests failed in the engine")


async def lose_a_rank(soak: Soak, server: subprocess.Popen, ranks: int) -> float:
    """Kill the last rank while answers are under way; seconds until all processes have ended."""
    async with httpx.AsyncClient(base_url=soak.url, timeout=LOST_S) as client:
        body = soak.body(0) | {"max_tokens": 512}
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(8)]
        await asyncio.sleep(2)
        rank_of(server, ranks - 1, ranks).kill()
        killed = time.monotonic()
        done, pending = await asyncio.wait(asked, timeout=LOST_S)
        for task in pending:
            task.cancel()
        if pending:
            soak.fail(f"{len(pending)} answers have no end {LOST_S:g} s after a rank was killed")
        soak.ends["ended with a lost rank"] += len(done)
    while server.poll() is None:
        if time.monotonic() > killed + LOST_S:
            soak.fail(f"the others have not ended {LOST_S:g} s after a rank was killed")
            break
        await asyncio.sleep(0.1)
    return time.monotonic() - killed


def arguments() -> ArgumentParser:
    """Its own options."""
    parser = new_parser("serving", __doc__)
    parser.prog = "python -m benchmarks serving soak"
    add = parser.add_argument
    add("--minutes", type=float, default=60)
    add("--clients", type=int, default=12, help="at the same time")
    add("--every", type=float, default=5.0, help="seconds between two looks at the server")
    add("--slow", type=float, default=10.0, help="seconds that a slow client reads a few bytes at a time")
    add("--limit", type=float, default=300.0, help="seconds until a request must have an end")
    add("--growth", type=float, default=0.05, help="of memory that is none yet, as a share")
    add("--may-differ", action="store_true", help="answers to the same question: not in float32")
    add("--seed", type=int, default=0)
    add("--ranks", type=int, default=1, help="tensor parallel, over so many processes (default: 1)")
    add("--lose-a-rank", action="store_true", help="with --ranks: kill one at the end")
    return parser


def main(argv: list[str]) -> int:
    """Run it; 1 if something is wrong."""
    mine, serve = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, ["small"])
    args = (parser := arguments()).parse_args(mine)
    if args.lose_a_rank and args.ranks < 2:
        parser.error("--lose-a-rank is of a tensor parallel server: give --ranks")
    print(device_name(), versions())
    server, url, words = served(serve, args.ranks)
    soak = Soak(url, args, random.Random(args.seed))
    with Report("serving", serve[0], rows_file(args), None) as report:
        try:
            ranks = f":ranks={args.ranks}" * (args.ranks > 1)
            with report.measuring(args.clients, 0, f"soak:minutes={args.minutes:g}{ranks}"):
                asyncio.run(soak.run(rank_of(server, 0, args.ranks)))
                soak.judge(report)
                if args.lose_a_rank:
                    report.add("gone_s", asyncio.run(lose_a_rank(soak, server, args.ranks)), "s")
        finally:
            with contextlib.suppress(psutil.Error, RuntimeError):  # it has ended
                rank_of(server, 0, args.ranks).send_signal(signal.SIGTERM)
            try:
                server.wait(timeout=60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
                soak.fail("it has not ended 60 s after SIGTERM")
            rest = words.all()
        if (server.returncode != 0 or "Traceback" in rest) and not args.lose_a_rank:
            soak.fail(f"it ended with {server.returncode}: {rest[-2000:]}")
    print(dict(soak.ends))
    print(f"{len(soak.wrong)} things were wrong" if soak.wrong else "nothing was wrong")
    return 1 if soak.wrong else report.close()
