"""Replicas under Ray Serve, on this machine: what its proxy costs a token, what routing by prompts' beginnings finds.

    python -m benchmarks replicas overhead --streams 1 8 32 --tokens 200 --step-ms 20
    python -m benchmarks replicas prefix --model small --documents 4 --questions 5 --context 2k --replicas 2

overhead: an engine without a model writes the time into each token, one token a stream every --step-ms; delay_ms is how
much later a client has it, cpu_ms what all processes but the client's together compute for a token. Variants: direct,
uvicorn alone in a process; ray, the same application behind Ray Serve's proxy, one replica; ray+hints, and
hf_sparsekv_ray.proxy in that.

prefix: --replicas of a real model answer --questions to each document, in turn, one after the other, with one token.
cached_share: tokens of prompts that were found in the replicas' prefix caches, of all; the best is (questions - 1) of
questions. ttft_ms: of all but the first question to each document. Variants: routing, and without (the less busy of
two).

Needs the extras ray and serve; Ray listens on 127.0.0.1 and sends nothing elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

import httpx
import psutil

from hf_sparsekv.results import device_name, versions
from hf_sparsekv.serving.request import Handle, Output, Piece
from hf_sparsekv.serving.sampling import Sampling
from hf_sparsekv.serving.stats import EngineStats, SampleCounter

from .arguments import new_parser, rows_file
from .report import Report
from .shapes import parse_tokens

HINTS = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
WAIT_S = 120.0
WAYS = ("direct", "ray", "ray+hints")
HEAD = 4096  # bytes that make a hint


class Clock:
    """An engine without a model: each token is the time at which it was made.

    Args:
        step_s: between two tokens of a stream.
    """

    tokenizer, max_length, max_waiting, failed, ready = None, 1 << 20, 1 << 20, None, True

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._rows: list[tuple[Handle, int]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="clock", daemon=True).start()

    def submit(self, prompt: list[int], sampling: Sampling) -> Handle:
        """Take a request; its tokens begin with the next step."""
        handle = Handle("clock", len(prompt))
        with self._lock:
            self._rows.append((handle, sampling.max_tokens))
        return handle

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self._step_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            with self._lock:
                rows = [(handle, left) for handle, left in self._rows if not handle.cancelled.is_set()]
                self._rows = [(handle, left - 1) for handle, left in rows if left > 1]
            for handle, left in rows:
                handle.push(Piece(f"{time.monotonic():.6f} ", (0,)))
                if left == 1:
                    handle.finish(Output("", (), "length", handle.prompt_tokens))

    def stats(self) -> EngineStats:
        """Nothing but the rows there are."""
        none = SampleCounter((1.0,)).samples()
        times = dict.fromkeys(("queue_s", "ttft_s", "between_s", "total_s"), none)
        fields = dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {"refused": {}, "host_limit": None}
        return EngineStats(**{**fields, **times, "running": len(self._rows)})


def clock_app(step_s: float):
    """The server around a clock."""
    from hf_sparsekv.serving.http import create_app

    return create_app(Clock(step_s), "clock")


def free_port() -> int:
    """Of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def direct(step_s: float) -> Iterator[str]:
    """uvicorn in a process of its own; its address."""
    port = free_port()
    code = (
        "import uvicorn; from benchmarks.replicas import clock_app; "
        f"uvicorn.run(clock_app({step_s}), host='127.0.0.1', port={port}, log_level='error', access_log=False)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + WAIT_S
        while True:
            try:
                httpx.get(f"{url}/ready")
                break
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the server has not started") from None
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


@contextmanager
def ray_serve(application, cpus: int, hints: bool) -> Iterator[str]:
    """An application under a local Ray, which ends with it; its address.

    Args:
        application: makes it, once Ray is there.
    """
    before, port = dict(os.environ), free_port()
    os.environ.update(QUIET)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    os.environ.pop(HINTS, None)
    if hints:
        os.environ.update({HINTS: "hf_sparsekv_ray.proxy:middlewares", "HF_SPARSEKV_ROUTE_BYTES": str(HEAD)})
    import ray
    from ray import serve

    with tempfile.TemporaryDirectory() as directory:
        try:
            ray.init(
                num_cpus=cpus,
                object_store_memory=100 << 20,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=directory,
            )
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(application(), name="llm")
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)


class ClockReplica:
    """The clock as Ray deploys it."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def __serve_build_asgi_app__(self):
        return clock_app(self._step_s)


def clock_deployment(step_s: float, streams: int):
    """One replica that takes so many streams at a time."""
    from ray import serve

    options = {"num_cpus": 1}
    deployment = serve.deployment(serve.ingress()(ClockReplica), ray_actor_options=options)
    return deployment.options(max_ongoing_requests=2 * streams).bind(step_s)


async def delays(url: str, streams: int, tokens: int) -> list[float]:
    """Milliseconds from each token's making to its arrival, of streams that run together; without the first tenth."""

    async def one(client: httpx.AsyncClient) -> list[float]:
        found, body = [], {"prompt": [1, 2, 3], "max_tokens": tokens, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                now = time.monotonic()
                if line.startswith("data: {"):
                    text = line.partition('"text":"')[2].partition('"')[0]
                    found += [1e3 * (now - float(made)) for made in text.split()]
        if len(found) != tokens:
            raise RuntimeError(f"{len(found)} of {tokens} tokens have come")
        return found[tokens // 10 :]

    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as client:
        await one(client)  # connections, caches
        found = await asyncio.gather(*(one(client) for _ in range(streams)))
    return [delay for each in found for delay in each]


def cpu_s() -> float:
    """That all processes which this one has started have computed."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            total += sum(process.cpu_times()[:2])
        except psutil.Error:  # it has ended
            continue
    return total


def run_overhead(args: Namespace, report: Report) -> None:
    """Tokens' delays without Ray and with it."""
    step_s = 1e-3 * args.step_ms
    most = max(args.streams)
    ways = {
        "direct": lambda: direct(step_s),
        "ray": lambda: ray_serve(lambda: clock_deployment(step_s, most), 1, False),
        "ray+hints": lambda: ray_serve(lambda: clock_deployment(step_s, most), 1, True),
    }
    for name in args.ways:
        with ways[name]() as url:
            for streams in args.streams:
                with report.measuring(streams, args.tokens, f"{name}:step={args.step_ms:g}ms"):
                    before, began = cpu_s(), time.monotonic()
                    found = asyncio.run(delays(url, streams, args.tokens))
                    seconds, spent = time.monotonic() - began, cpu_s() - before
                    report.add("delay_ms", found)
                    report.add("delay_p99_ms", sorted(found)[int(0.99 * len(found))])
                    report.add("cpu_ms", 1e3 * spent / ((streams + 1) * args.tokens))
                    report.note(f"{seconds:.1f} s")


def run_prefix(args: Namespace, report: Report) -> None:
    """Questions to documents, with routing and without."""
    for routing in (True, False):

        def application(routing: bool = routing):
            from hf_sparsekv.serving.ray import build

            serving = {"max_rows": 4, "max_length": args.context + 64}
            settings = {"num_gpus": 0, "num_cpus": 1, "offload": False, "replicas": args.replicas}
            return build({"model": args.model, "serving": serving, "prefix_routing": routing, **settings})

        label = f"{'routing' if routing else 'without'}:replicas={args.replicas},questions={args.questions}"
        with report.measuring(args.documents, args.context, label):
            with ray_serve(application, args.replicas, True) as url:
                cached, total, times = ask_documents(url, args)
            report.add("cached_share", cached / total, "")
            report.add("ttft_ms", times)


def ask_documents(url: str, args: Namespace) -> tuple[int, int, list[float]]:
    """Cached and all tokens of the prompts, and milliseconds to the first token behind each document's first."""
    draw = random.Random(args.seed)
    documents = [[draw.randrange(300, 3000) for _ in range(args.context)] for _ in range(args.documents)]
    cached = total = 0
    times = []
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        for question in range(args.questions):
            for document in documents:
                body = {"prompt": [*document, *range(100 + question, 116 + question)], "max_tokens": 1}
                began = time.monotonic()
                usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
                if question:
                    times.append(1e3 * (time.monotonic() - began))
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                total += usage["prompt_tokens"]
    return cached, total, times


def ray_version() -> str:
    """For the first line."""
    try:
        return f"ray={metadata.version('ray')}"
    except metadata.PackageNotFoundError:
        return "without Ray"


RUNS = {"overhead": run_overhead, "prefix": run_prefix}


def arguments(command: str) -> ArgumentParser:
    """The command line of one command."""
    parser = new_parser("replicas", __doc__)
    parser.prog = f"python -m benchmarks replicas {command}"
    add = parser.add_argument
    if command == "overhead":
        add("--streams", type=int, nargs="+", default=[1, 8, 32])
        add("--tokens", type=int, default=200, help="of a stream (default: 200)")
        add("--step-ms", type=float, default=20.0, help="between two tokens (default: 20)")
        add("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: all")
    else:
        add("--model", default="small")
        add("--documents", type=int, default=4)
        add("--questions", type=int, default=5, help="to each document (default: 5)")
        add("--context", type=parse_tokens, default=2048, metavar="TOKENS", help="of a document (default: 2k)")
        add("--replicas", type=int, default=2)
        add("--seed", type=int, default=0)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; 1 if anything failed."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command not in RUNS:
        print(__doc__)
        return 0 if command in ("--help", "-h") else 2
    args = arguments(command).parse_args(rest)
    print(device_name(), versions(), ray_version())
    case = "clock" if command == "overhead" else args.model
    total = len(args.ways) * len(args.streams) if command == "overhead" else 2
    with Report("replicas", case, rows_file(args), total) as report:
        RUNS[command](args, report)
    return report.close()
