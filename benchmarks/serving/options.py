"""Serving: traces of requests against whole systems, and a fixed number of rows.

    python -m benchmarks serving trace --rate 0.5 --seconds 120 --clip 32k --seed 1 --out FILE
    python -m benchmarks serving open SYSTEM --trace FILE [FILE ...]
    python -m benchmarks serving goodput SYSTEM --rates 0.1 0.2 0.4 --clip 32k --seed 1
    python -m benchmarks serving saturated SYSTEM --trace FILE [FILE ...] --seconds 60
    python -m benchmarks serving closed SYSTEM --rows 1 2 4 8 --context 32k
    python -m benchmarks serving open http://127.0.0.1:8000 [URL ...] --trace FILE     # any server: urls.py
    python -m benchmarks serving closed http://127.0.0.1:8000 [URL ...] --rows 1 8 32 --context 8k
    python -m benchmarks serving flags segments --model qwen3-8b --context 34k     # its setting as options of `serve`
    python -m benchmarks serving hostile --minutes 60 -- small     # hostile clients beside honest ones

SYSTEM: dense, sparse, exact, offload, working-set, segments (our engine, each with one thing more than the one before:
see ours.py); vllm. One system a process, so that none finds another one's memory. Random weights of a known shape,
greedy, no end of an answer before its length. All systems have the same bytes of GPU memory for keys and values
(--kv-gb) and rows at a time (--max-rows). All but the last rung have the same tokens of prompts in a step (--chunk).

Metrics of open and goodput, of each trace (mean, p50, p99):

- ttft_s: from a request's arrival in the trace to its first token.
- between_ms: all times between two tokens of a request.
- queued_s: until work on it began.
- tokens_per_s and requests_per_s: from the first arrival to the last token.
- requests, failed.

goodput_rps: the highest rate at which, and at all lower ones, three limits hold (SparseServe, section 4.2). The 99th
percentile of times between tokens is at most 25 decode iterations. The mean delay before work on a request begins is at
most 2 s. No request fails. The iteration is --iteration-ms. Not given, it is measured on the system itself: 32 rows of
4k (as Sarathi-Serve, section 5.1, the limit's source).

saturated: all requests of a trace come at once. The trace is long enough that some always wait, so the system is as
full as it can be. Metrics: tokens_per_s, requests_per_s and the mean number of rows that answer, for --seconds, from
--warm seconds on; times between their tokens.

closed: tokens_per_s and between_ms while all rows decode (or are held back, where the system does that) and none reads
a prompt. Ours also: captures, steps, step_ms, rows_a_step, prefill_s (all prompts) and cached_tokens (of prompts,
found) of the engine; peak_gb. Offloaded settings also: hit_rate, missed_mb and host_mb a step (as in ``step``; of
saturated from the first request on).
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import psutil

from ..arguments import new_parser
from ..shapes import known_config, parse_tokens
from . import trace
from .ours import BUDGET, RUNGS, SERVED, serve_flags
from .settings import Settings

SYSTEMS = (*RUNGS, "vllm")
CHUNK = Settings.chunk


def arguments(command: str) -> ArgumentParser:
    """The command line of one command."""
    parser = new_parser("serving", __doc__, "model", "dtype", "device", "kv", "host-gb")
    parser.prog = f"python -m benchmarks serving {command}"
    add = parser.add_argument
    add("system", choices=SYSTEMS)
    add("--kv-gb", type=float, default=24.0, help="GPU memory for keys and values, 10^9 bytes (default: 24)")
    add("--max-rows", type=int, default=32, help="requests that decode together at most (default: 32)")
    add("--chunk", type=parse_tokens, default=CHUNK, metavar="TOKENS", help="of prompts in a step (default: 2k)")
    add(
        "--budget", type=parse_tokens, default=BUDGET, metavar="TOKENS", help="that a sparse step chooses (default: 2k)"
    )
    add("--prefill-ms", type=float, default=Settings.prefill_ms, help="of prompts between steps of `segments`")
    add("--prompt-density", type=float, metavar="SHARE", help="of sparse prompts of ours: lists are drawn")
    add("--vllm", type=Path, metavar="DIR", help="a folder that holds vLLM")
    add("--timeout", type=float, default=1800.0, help="seconds behind the last arrival (default: 1800)")
    add("--lead", type=int, default=128, help="tokens that a row decodes while the next one's prompt is read")
    if command in ("open", "goodput"):
        add("--requests", type=Path, metavar="FILE", help="each request's times are appended to it, as lines of JSON")
    parser.set_defaults(options={}, prompt=trace.PROMPT_MEDIAN)
    if command in ("open", "saturated"):
        add("--trace", type=Path, nargs="+", required=True)
    if command == "saturated":
        add("--warm", type=float, default=15.0, help="seconds before what counts (default: 15)")
        add("--seconds", type=float, default=60.0, help="that count (default: 60)")
    elif command == "goodput":
        trace.add_options(parser)
        add("--rates", type=float, nargs="+", required=True, help="requests a second")
        add("--iteration-ms", type=float, help="a decode iteration; default: measured, 32 rows of 4k")
        add("--all-rates", action="store_true", help="also those behind the first that fails its limits")
    elif command == "closed":
        add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
        add("--context", type=parse_tokens, default=32768, metavar="TOKENS")
        add("--tokens", type=int, default=256, help="of the shortest answer")
    return parser


def print_flags(argv: list[str]) -> int:
    """Options of ``hf-sparsekv serve`` for the memory of a setting."""
    parser = ArgumentParser(prog="python -m benchmarks serving flags", description=print_flags.__doc__)
    add = parser.add_argument
    add("system", choices=SERVED)
    add("--model", default="qwen3-8b")
    add("--context", type=parse_tokens, required=True, metavar="TOKENS", help="of a prompt and its answer at most")
    add("--kv-gb", type=float, default=24.0)
    add("--host-gb", type=float, help="10^9 bytes; default: 80 % of the machine's")
    add("--max-rows", type=int, default=32)
    add("--budget", type=parse_tokens, default=BUDGET, metavar="TOKENS")
    args = parser.parse_args(argv)
    host = 0.8 * psutil.virtual_memory().total if args.host_gb is None else 1e9 * args.host_gb
    if args.kv not in ("random", "replayed"):
        parser.error(f"--kv {args.kv}: requests have random or replayed keys")
    gpu = int(1e9 * args.kv_gb)
    shape = known_config(args.model)
    settings = Settings(args.model, shape, "bfloat16", gpu, int(host), args.max_rows, args.context)
    print(" ".join(serve_flags(settings, args.system, args.budget)))
    return 0
