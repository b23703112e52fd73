"""Serving over HTTP: traces and fixed numbers of rows against any server with OpenAI's API.

    python -m benchmarks serving open URL [URL ...] --trace FILE [FILE ...] [--route prefix] [--name two-replicas]
    python -m benchmarks serving closed URL [URL ...] --rows 1 8 32 --context 8k

Requests go to /v1/completions with token ids as the prompt, streamed, greedy, each at its arrival in the trace.
`ignore_eos`, which ours and vLLM's servers know, gives answers their length. Several URLs are replicas without a proxy:
requests go round robin. With --route prefix they go by a hash of their first 1,024 tokens (shorter prompts round
robin).

open: as of the systems in this process, but for queued_s, which no server tells. client_late_ms: how much later than
its arrival a request was sent (median and quartiles; :p99). closed: tokens_per_s and between_ms while all rows decode,
and ttft_s of all, which came at once. client_cpu: what this process computed, of one core; near 1 the client does not
keep up, and times are its own.

A server keeps what it has read. Play a trace against it again with another --salt: the same lengths and arrivals with
other tokens. Otherwise its prompts are found in its prefix cache.

An event of a stream may hold several tokens. Where the text has a word for each token (`hf-sparsekv serve
random:SHAPE`) they are counted; else the answer's tokens are spread evenly over its events.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np

from hf_sparsekv.results import versions

from ..arguments import new_parser, rows_file
from ..baselines import NotRun
from ..report import Report
from ..shapes import case_name, known_config, parse_tokens
from . import trace
from .client import NotTogether, Played, add_figures, figures, fixed_rows, quantile, together
from .trace import Request

ROUTE_TOKENS = 1024  # that a prompt is routed by
LEAST = 16  # tokens that all rows make together
BUSY = 0.7  # of a core: above it the client is too slow to believe its times
CONNECT_S = 30.0


def route(requests: Sequence[Request], prompts: Sequence[Sequence[int]], servers: int, how: str) -> list[int]:
    """The server of each request.

    Args:
        how: ``round`` robin, or ``prefix``: prompts with the same first ``ROUTE_TOKENS`` tokens go to the same server.
    """
    found, turn = [], 0
    for request, prompt in zip(requests, prompts):
        if how == "prefix" and request.prompt_tokens >= ROUTE_TOKENS:
            found.append(zlib.crc32(np.asarray(prompt[:ROUTE_TOKENS], np.int64).tobytes()) % servers)
        else:
            found.append(turn % servers)
            turn += 1
    return found


def spread_tokens(events: Sequence[tuple[float, str]], tokens: int) -> tuple[float, ...]:
    """A time for each token, from the times and texts of events; see above."""
    words = [len(text.split()) for _, text in events]
    if sum(words) == tokens:
        return tuple(at for (at, _), count in zip(events, words) for _ in range(count))
    until = [round(tokens * (which + 1) / len(events)) for which in range(len(events))]
    return tuple(at for (at, _), end, begin in zip(events, until, [0, *until]) for _ in range(end - begin))


def salted(requests: Sequence[Request], salt: int) -> list[Request]:
    """The same requests with other tokens; those that share a document still do. 0: unchanged."""
    by = salt * 1_000_000_007
    return [replace(one, seed=one.seed + by, document=one.document + by) for one in requests]


class UrlSystem:
    """Servers that are there already.

    Args:
        urls: without ``/v1``.
        how: see :func:`route`.
        timeout: seconds that a request may take.
    """

    def __init__(self, urls: Sequence[str], how: str = "round", timeout: float | None = None) -> None:
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.how, self.timeout = how, timeout
        self.late_s: list[float] = []  # of the requests played last
        self.cpu = 0.0  # of this process while it played them, of one core
        self._models = [self._model(url) for url in self.urls]

    @staticmethod
    def _model(url: str) -> str:
        try:
            return httpx.get(f"{url}/v1/models", timeout=CONNECT_S).raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise SystemExit(f"no server with OpenAI's API answers at {url} ({error!r}): start it first") from error

    def play(self, requests: Sequence[Request], vocabulary: int) -> list[Played]:
        """All requests, each at its arrival; what became of them."""
        prompts = [request.ids(vocabulary) for request in requests]
        servers = route(requests, prompts, len(self.urls), self.how)
        bodies = [self._body(*each) for each in zip(requests, prompts, servers)]  # none is made while times count
        cpu, began = time.process_time(), time.perf_counter()
        played = asyncio.run(self._play(requests, servers, bodies))
        self.cpu = (time.process_time() - cpu) / (time.perf_counter() - began)
        return played

    def _body(self, request: Request, prompt: list[int], server: int) -> bytes:
        asked = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        asked |= {"model": self._models[server], "prompt": prompt, "max_tokens": request.output_tokens}
        return json.dumps(asked, separators=(",", ":")).encode()

    async def _play(self, requests: Sequence[Request], servers: list[int], bodies: list[bytes]) -> list[Played]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(self.timeout, connect=CONNECT_S)
        async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:
            self.late_s, begin = [], time.perf_counter()
            each = zip(requests, servers, bodies)
            return await asyncio.gather(*(self._one(client, *one, begin) for one in each))

    async def _one(self, client: httpx.AsyncClient, request: Request, server: int, body: bytes, begin: float) -> Played:
        await asyncio.sleep(begin + request.arrival - time.perf_counter())
        self.late_s.append(time.perf_counter() - begin - request.arrival)
        try:
            streamed = self._stream(client, self.urls[server], body, begin)
            events, tokens = await asyncio.wait_for(streamed, self.timeout)
        except Exception as error:  # of the connection, the server, or the answer: this request has failed
            return Played(request, error=f"{type(error).__name__}: {error}")
        if tokens != request.output_tokens or not events:
            return Played(request, error=f"{tokens} tokens instead of {request.output_tokens}")
        return Played(request, token_times=spread_tokens(events, tokens))

    async def _stream(
        self, client: httpx.AsyncClient, url: str, body: bytes, begin: float
    ) -> tuple[list[tuple[float, str]], int]:
        """Times and texts of the events that have any, and the number of tokens that the server counted."""
        events, tokens = [], 0
        headers = {"content-type": "application/json"}
        async with client.stream("POST", f"{url}/v1/completions", content=body, headers=headers) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:200]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                at, data = time.perf_counter() - begin, json.loads(line[6:])
                if "error" in data:
                    raise RuntimeError(str(data["error"])[:200])
                events += [(at, choice["text"]) for choice in data["choices"] if choice["text"]]
                tokens = (data.get("usage") or {}).get("completion_tokens", tokens)
        return events, tokens


class UrlBench:
    """Servers, and what is measured with them."""

    def __init__(self, args: Namespace, report: Report) -> None:
        self.args, self.report = args, report
        self.vocabulary = known_config(args.model).vocab_size
        self.system = UrlSystem(args.urls, args.route, args.timeout)
        for which in range(len(args.urls)):  # connections, first calls
            first = [Request(0.0, 64, 4, 1 + which)] * len(args.urls)
            for one in self.system.play(first, self.vocabulary):
                if one.error is not None:
                    raise SystemExit(f"the first request failed: {one.error}")

    def label(self, *parts: str) -> str:
        """A variant's name: what served, and over how many addresses."""
        how = (f"route={self.args.route}",) if len(self.args.urls) > 1 else ()
        return ":".join((self.args.name, f"urls={len(self.args.urls)}", *how, *parts))

    def played(self, requests: Sequence[Request], label: str) -> list[Played]:
        """Play requests; rows about the client, and lines of ``--requests``."""
        played = self.system.play(requests, self.vocabulary)
        if self.args.requests is not None:
            with self.args.requests.open("a") as file:
                file.writelines(json.dumps({"variant": label, **one.record()}) + "\n" for one in played)
        for error in sorted({one.error for one in played if one.error is not None})[:3]:
            self.report.note(f"failed: {error}")
        late = [1e3 * one for one in self.system.late_s]
        self.report.add("client_late_ms", late)
        self.report.add("client_late_ms:p99", quantile(late, 0.99))
        self.report.add("client_cpu", self.system.cpu, "")
        if self.system.cpu > BUSY:
            self.report.note(f"the client took {self.system.cpu:.0%} of a core: its own delays may be in these times")
        return played


def run_open(args: Namespace, report: Report) -> None:
    """Traces, one after the other."""
    made = [trace.read_trace(path) for path in args.trace]
    bench = UrlBench(args, report)
    for config, requests in made:
        requests = salted(requests, args.salt)
        shared = (f"documents={config.documents}", f"shared={config.shared:g}") if config.documents else ()
        label = bench.label(f"rate={config.rate:g}", *config.answers, f"seed={config.seed}", *shared)
        with report.measuring(0, config.clip, label):
            report.note(trace.describe(requests))
            if not requests:
                raise NotRun("the trace has no requests")
            add_figures(report, figures(bench.played(requests, label)), queued=False)


def run_closed(args: Namespace, report: Report) -> None:
    """A fixed number of streams, all sent at once."""
    bench = UrlBench(args, report)
    for number, rows in enumerate(args.rows):
        label = bench.label()
        with report.measuring(rows, args.context, label):
            requests = [
                replace(one, seed=one.seed + 1000 * number)  # none is cached
                for one in salted(fixed_rows(rows, args.context, args.tokens, args.lead), args.salt)
            ]
            played = bench.played(requests, label)
            if failed := [one for one in played if one.error is not None]:
                raise RuntimeError(f"{len(failed)} of {rows} requests failed: {failed[0].error}")
            report.add("ttft_s", [one.ttft_s for one in played], "s")
            try:
                found = together([one.token_times for one in played], LEAST)
            except NotTogether as error:
                raise NotRun(str(error)) from error
            report.add("tokens_per_s", found.tokens / found.seconds, "1/s")
            report.add("between_ms", [1e3 * gap for gap in found.between_s])


RUNS = {"open": run_open, "closed": run_closed}


def arguments(command: str) -> ArgumentParser:
    """The command line of one command."""
    parser = new_parser("serving", __doc__, "model")
    parser.prog = f"python -m benchmarks serving {command}"
    add = parser.add_argument
    add("urls", nargs="+", metavar="URL", help="of servers, as http://127.0.0.1:8000")
    add("--name", default="http", help="what serves, in the rows (default: http)")
    add("--route", choices=("round", "prefix"), default="round", help="which of several servers (default: round robin)")
    add("--timeout", type=float, default=1800.0, help="seconds that a request may take (default: 1800)")
    add("--requests", type=Path, metavar="FILE", help="each request's times are appended to it, as lines of JSON")
    add("--salt", type=int, default=0, help="other tokens in prompts of the same lengths (default: 0)")
    if command == "open":
        add("--trace", type=Path, nargs="+", required=True)
    else:
        add("--rows", type=int, nargs="+", default=[1, 8, 32], help="streams at a time (default: 1 8 32)")
        add("--context", type=parse_tokens, default=8192, metavar="TOKENS", help="of each prompt (default: 8k)")
        add("--tokens", type=int, default=256, help="of the shortest answer (default: 256)")
        add("--lead", type=int, default=128, help="tokens that a row decodes while the next one's prompt is read")
    return parser


def main(command: str, argv: list[str]) -> int:
    """Run a command; 1 if anything failed."""
    args = arguments(command).parse_args(argv)
    print(f"{', '.join(args.urls)}; {versions()}")
    with Report("serving", case_name(args.model), rows_file(args), None) as report:
        RUNS[command](args, report)
    return report.close()
