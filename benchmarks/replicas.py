"""Replicas under Ray Serve, on this machine: traces, a lost replica.

    python -m benchmarks replicas trace --model random:qwen3-8b --gpus --replicas 4 --trace FILE
    python -m benchmarks replicas killed --model random:qwen3-8b --gpus --replicas 4 --streams 64 --tokens 512

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
import sys
import tempfile
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

from .arguments import new_parser, rows_file
from .report import Report
from .shapes import parse_tokens

HINTS = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
WAIT_S = 120.0
HEAD = 4096  # bytes that make a hint


def free_port() -> int:
    """Of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def ray_serve(application, cpus: int, gpus: int = 0) -> Iterator[str]:
    """An application under a local Ray, which ends with it; its address.

    Args:
        application: makes it, once Ray is there.
    """
    before, port = dict(os.environ), free_port()
    os.environ.update(QUIET)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    os.environ.update({HINTS: "hf_sparsekv_serve.ray.proxy:middlewares", "HF_SPARSEKV_ROUTE_BYTES": str(HEAD)})
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


@contextmanager
def replicated(args: Namespace, rows: int, length: int) -> Iterator[str]:
    """Replicas of the model, as the arguments say; their address."""

    def application():
        from hf_sparsekv_serve.ray.deployment import build

        serving = {"max_rows": rows, "max_length": length}
        settings = {"num_gpus": int(args.gpus), "num_cpus": 1, "offload": False, "replicas": args.replicas}
        config = {"config": {"token_budget": args.budget}} if args.budget else {}
        return build({"model": args.model, "serving": serving, **settings, **config})

    with ray_serve(application, args.replicas, args.replicas * args.gpus) as url:
        yield url


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


def ray_version() -> str:
    """For the first line."""
    try:
        return f"ray={metadata.version('ray')}"
    except metadata.PackageNotFoundError:
        return "without Ray"


RUNS = {"trace": run_trace, "killed": run_killed}


def arguments(command: str) -> ArgumentParser:
    """The command line of one command."""
    parser = new_parser("replicas", __doc__)
    parser.prog = f"python -m benchmarks replicas {command}"
    add = parser.add_argument
    add("--model", default="small", help="default: small; random:SHAPE has random weights")
    add("--replicas", type=int, default=2)
    add("--gpus", action="store_true", help="a GPU for each replica")
    add("--budget", type=parse_tokens, metavar="TOKENS", help="that a step chooses; default: by need")
    add("--max-rows", type=int, default=32, help="of a replica (default: 32)")
    if command == "trace":
        add("--trace", type=Path, required=True)
    else:
        add("--context", type=parse_tokens, default=2048, metavar="TOKENS", help="of a prompt (default: 2k)")
        add("--streams", type=int, default=64, help="answers that are under way (default: 64)")
        add("--tokens", type=int, default=512, help="of each answer (default: 512)")
        add("--after", type=float, default=3.0, help="seconds after which a replica is killed (default: 3)")
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
    with Report("replicas", args.model, rows_file(args), 1) as report:
        RUNS[command](args, report)
    return report.close()
