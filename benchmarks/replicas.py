"""Replicas under Ray Serve, on this machine: its proxy's cost a token, what routing finds, traces, a lost replica.

    python -m benchmarks replicas overhead --streams 1 8 32 --tokens 200 --step-ms 20
    python -m benchmarks replicas prefix --model small --documents 4 --questions 5 --context 2k --replicas 2
    python -m benchmarks replicas trace --model random:qwen3-8b --gpus --replicas 4 --trace FILE
    python -m benchmarks replicas killed --model random:qwen3-8b --gpus --replicas 4 --streams 64 --tokens 512

overhead: an engine without a model writes the time into each token, one token a stream every --step-ms; delay_ms is how
much later a client has it, cpu_ms what all processes but the client's together compute for a token. Variants: direct,
uvicorn alone in a process; ray, the same application behind Ray Serve's proxy, one replica; ray+hints, and
hf_sparsekv_ray.proxy in that.

prefix: --replicas of a real model answer --questions to each document, in turn, one after the other, with one token.
cached_share: tokens of prompts that were found in the replicas' prefix caches, of all; the best is (questions - 1) of
questions. ttft_ms: of all but the first question to each document. Variants: routing, and without (the less busy of
two).

trace: as `serving open` with the replicas' address, and its rows in serving.csv. killed: one of the replicas is killed
while --streams answers of --tokens are under way. answered, told (503, or an error in the stream: "send the request
again"), lost (anything else); next_s from the kill until a request is answered, back_s until all replicas run again.

--gpus: a GPU for each replica. Needs the extras ray and serve; Ray listens on 127.0.0.1 and sends nothing elsewhere.
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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

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
        fields = dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {"refused": {}, "host_limit": None, "prompts": ()}
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
def ray_serve(application, cpus: int, hints: bool, gpus: int = 0) -> Iterator[str]:
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
                num_gpus=gpus,
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


@contextmanager
def replicated(args: Namespace, rows: int, length: int, routing: bool = True) -> Iterator[str]:
    """Replicas of the model, as the arguments say; their address."""

    def application():
        from hf_sparsekv.serving.ray import build

        serving = {"max_rows": rows, "max_length": length}
        settings = {"num_gpus": int(args.gpus), "num_cpus": 1, "offload": False, "replicas": args.replicas}
        config = {"config": {"token_budget": args.budget}} if args.budget else {}
        return build({"model": args.model, "serving": serving, "prefix_routing": routing, **settings, **config})

    with ray_serve(application, args.replicas, True, args.replicas * args.gpus) as url:
        yield url


def run_prefix(args: Namespace, report: Report) -> None:
    """Questions to documents, with routing and without."""
    for routing in (True, False):
        label = f"{'routing' if routing else 'without'}:replicas={args.replicas},questions={args.questions}"
        with report.measuring(args.documents, args.context, label):
            with replicated(args, 4, args.context + 64, routing) as url:
                cached, total, times = ask_documents(url, args)
            report.add("cached_share", cached / total, "")
            report.add("ttft_ms", times)


def run_trace(args: Namespace, report: Report) -> None:
    """A trace, sent to the proxy."""
    from .serving import urls
    from .serving.trace import read_trace

    requests = read_trace(args.trace)[1]
    length = max(one.prompt_tokens + one.output_tokens for one in requests)
    with report.measuring(args.replicas, length, "trace"), replicated(args, args.max_rows, length) as url:
        where = ["--no-csv"] if args.no_csv else ["--csv", str(args.csv.with_name("serving.csv"))]
        name = ["--name", f"ray-{args.replicas}", "--model", args.model.removeprefix("random:")]
        if urls.main("open", [url, "--trace", str(args.trace), "--timeout", str(WAIT_S), *name, *where]):
            raise RuntimeError("the trace was not played")


def run_killed(args: Namespace, report: Report) -> None:
    """A replica is killed while all of them answer."""
    with report.measuring(args.streams, args.tokens, f"killed:replicas={args.replicas}"):
        with replicated(args, args.max_rows, args.context + args.tokens) as url:
            found, next_s, back_s = asyncio.run(lose_one(url, args))
        for name, count in found.items():
            report.add(name, count, "count")
        report.add("next_s", next_s, "s")
        report.add("back_s", back_s, "s")


async def lose_one(url: str, args: Namespace) -> tuple[dict[str, int], float, float]:
    """What became of the answers; seconds until the next one, and until all replicas are back."""
    draw = random.Random(args.seed)

    async def ask(client: httpx.AsyncClient, tokens: int) -> str:
        prompt = [draw.randrange(300, 3000) for _ in range(args.context)]
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = [line async for line in response.aiter_lines() if line]
        except httpx.HTTPError:
            return "lost"
        if lines and lines[-1] == "data: [DONE]":
            return "answered"
        return "told" if any("replica_lost" in line for line in lines) else "lost"

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as client:
        await asyncio.gather(*(ask(client, 8) for _ in range(4 * args.replicas)))  # each has compiled its kernels
        asked = [asyncio.create_task(ask(client, args.tokens)) for _ in range(args.streams)]
        await asyncio.sleep(args.after)
        replica_processes()[0].kill()
        killed = time.monotonic()
        while await ask(client, 1) != "answered":
            await asyncio.sleep(0.1)
        next_s = time.monotonic() - killed
        found = Counter(await asyncio.gather(*asked))
        while running_replicas() < args.replicas or len(replica_processes()) < args.replicas:
            if time.monotonic() > killed + WAIT_S:
                raise RuntimeError(f"{running_replicas()} of {args.replicas} replicas run")
            await asyncio.sleep(0.1)
    return {name: found[name] for name in ("answered", "told", "lost")}, next_s, time.monotonic() - killed


def replica_processes() -> list[psutil.Process]:
    """Of replicas that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            found += [process] if "ServeReplica:llm" in " ".join(process.cmdline()) else []
    return found


def running_replicas() -> int:
    """As Ray Serve counts them."""
    from ray import serve

    return serve.status().applications["llm"].deployments["Replica"].replica_states.get("RUNNING", 0)


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


RUNS = {"overhead": run_overhead, "prefix": run_prefix, "trace": run_trace, "killed": run_killed}


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
        return parser
    add("--model", default="small", help="default: small; random:SHAPE has random weights")
    add("--replicas", type=int, default=2)
    add("--gpus", action="store_true", help="a GPU for each replica")
    add("--budget", type=parse_tokens, metavar="TOKENS", help="that a step chooses; default: by need")
    add("--seed", type=int, default=0)
    if command != "prefix":
        add("--max-rows", type=int, default=32, help="of a replica (default: 32)")
    if command == "trace":
        add("--trace", type=Path, required=True)
    else:
        add("--context", type=parse_tokens, default=2048, metavar="TOKENS", help="of a prompt (default: 2k)")
    if command == "prefix":
        add("--documents", type=int, default=4)
        add("--questions", type=int, default=5, help="to each document (default: 5)")
    elif command == "killed":
        add("--streams", type=int, default=64, help="answers that are under way (default: 64)")
        add("--tokens", type=int, default=512, help="of each answer (default: 512)")
        add("--after", type=float, default=3.0, help="seconds after which a replica is killed (default: 3)")
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
    total = {"overhead": lambda: len(args.ways) * len(args.streams), "prefix": lambda: 2}.get(command, lambda: 1)()
    with Report("replicas", case, rows_file(args), total) as report:
        RUNS[command](args, report)
    return report.close()
