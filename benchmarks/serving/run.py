"""Serving: traces of requests against whole systems, and a fixed number of rows.

    python -m benchmarks serving trace --rate 0.5 --seconds 120 --clip 32k --seed 1 --out FILE
    python -m benchmarks serving open SYSTEM --trace FILE [FILE ...]
    python -m benchmarks serving goodput SYSTEM --rates 0.1 0.2 0.4 --clip 32k --seed 1
    python -m benchmarks serving saturated SYSTEM --trace FILE [FILE ...] --seconds 60
    python -m benchmarks serving closed SYSTEM --rows 1 2 4 8 --context 32k
    python -m benchmarks serving overhead SYSTEM --rows 1 8 32 --context 8k
    python -m benchmarks serving again SYSTEM --context 128k
    python -m benchmarks serving beside SYSTEM --context 128k --short 1k --rows 8
    python -m benchmarks serving open http://127.0.0.1:8000 [URL ...] --trace FILE     # any server: urls.py
    python -m benchmarks serving closed http://127.0.0.1:8000 [URL ...] --rows 1 8 32 --context 8k
    python -m benchmarks serving flags segments --model qwen3-8b --context 34k     # its setting as options of `serve`
    python -m benchmarks serving soak --minutes 60 -- small        # a real server under clients of every kind
    python -m benchmarks serving hostile --minutes 60 -- small     # hostile clients beside honest ones

SYSTEM: dense, sparse, offload, working-set, segments (our engine, each with one thing more than the one before: see
ours.py); vllm; transformers. One system a process, so that none finds another one's memory. Random weights of a known
shape, greedy, no end of an answer before its length; all have the same bytes of GPU memory for keys and values
(--kv-gb), rows at a time (--max-rows) and, but for the last rung, tokens of prompts in a step (--chunk).

Metrics of open and goodput, of each trace (mean, p50, p99): ttft_s from a request's arrival in the trace to its first
token; between_ms of all times between two tokens of a request; queued_s until work on it began; tokens_per_s and
requests_per_s from the first arrival to the last token; requests, failed. goodput_rps: the highest rate at which, and
at all lower ones, the 99th percentile of times between tokens is at most 25 decode iterations, the mean delay before
work on a request begins at most 2 s, and no request fails (SparseServe, section 4.2). The iteration is --iteration-ms;
not given, it is measured on the system itself: 32 rows of 4k (as Sarathi-Serve, section 5.1, from which the limit is).

saturated: all requests of a trace come at once and the trace is long enough that some always wait, so the system is as
full as it can be: tokens_per_s, requests_per_s and the mean number of rows that answer, for --seconds, from --warm
seconds on; times between their tokens.

closed: tokens_per_s and between_ms while all rows decode (or are held back, where the system does that) and none reads
a prompt. overhead: step_ms of captured steps alone, over as many rows; between_ms in the engine; overhead_ms, the
difference of their means; and by the device's clock in the engine, means: step_ms:inside_mean of the captured steps,
outside_ms between them. again: ttft_s:first of a question about a document of --context tokens, ttft_s:again of others
about it, one after the other. beside: ttft_s:long of a prompt of --context tokens, ttft_s:short of --count others that
come a second apart while it is read, and between_ms of --rows that decode meanwhile. Ours also: captures, steps,
step_ms, rows_a_step, prefill_s (all prompts) and cached_tokens (of prompts, found) of the engine; hit_rate, missed_mb
and host_mb a step of offloaded settings (as in ``step``; of saturated from the first request on); peak_gb.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import torch

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, SparseConfig, optimize, unoptimize
from hf_sparsekv.results import device_name, versions
from hf_sparsekv.serving.garbage import set_aside

from ..arguments import new_parser, rows_file
from ..baselines import NotRun
from ..decoding import LEFT_OUT, free, marked_replays, replay_ms
from ..report import Report
from ..rows import RowSteps, prefilled
from ..shapes import case_name, known_config, parse_tokens, random_model
from . import trace
from .client import (
    Figures,
    NotTogether,
    RanDry,
    Together,
    add_figures,
    closed_loop,
    figures,
    fixed_rows,
    goodput,
    mean,
    play,
    quantile,
    saturate,
)
from .ours import BUDGET, RUNGS, SERVED, OurSystem, serve_flags
from .settings import Settings
from .trace import Request

SYSTEMS = (*RUNGS, "vllm", "transformers")
ITERATION_ROWS, ITERATION_CONTEXT = 32, 4096
WARM_UP_STEPS = 8
CHUNK = Settings.chunk
LEAST = 16  # tokens that all rows make together
AGAIN = 5  # questions about a document behind the first
ROW_PROMPT = 4096  # tokens of what decodes beside a long prompt
WARM_UP = 600, 8  # tokens of a prompt and its answer before what counts


class Bench:
    """One system, and what it is measured with."""

    def __init__(self, args: Namespace, report: Report, max_length: int) -> None:
        self.args, self.report = args, report
        config = known_config(args.model)
        config.max_position_embeddings = max(config.max_position_embeddings or 0, max_length)
        dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
        self.settings = Settings(
            model=args.model,
            config=config,
            dtype=dtype,
            kv_gpu=int(1e9 * args.kv_gb),
            kv_host=int(0.8 * psutil.virtual_memory().total if args.host_gb is None else 1e9 * args.host_gb),
            max_rows=args.max_rows,
            max_length=max_length,
            chunk=args.chunk,
            kv=args.kv,
        )
        self._model: torch.nn.Module | None = None

    @property
    def model(self) -> torch.nn.Module:
        """Made when it is asked for: vLLM makes its own."""
        if self._model is None:
            settings = self.settings
            self._model = random_model(settings.config, getattr(torch, settings.dtype), torch.device(self.args.device))
        return self._model

    @property
    def vocabulary(self) -> int:
        """Of the model."""
        return self.settings.config.vocab_size

    def label(self, *parts: str) -> str:
        """A variant's name."""
        name = self.args.system
        if self.args.chunk != CHUNK and name != "segments":
            parts = (f"chunk={self.args.chunk}", *parts)
        if name in RUNGS and name != "dense":
            parts = (f"budget={self.args.budget}", *parts)
            if self.args.kv != "random":
                parts = (*parts, f"kv={self.args.kv}")
        return ":".join((name, f"gpu={self.args.kv_gb:g}gb", *parts))

    def make(self, rows: int | None = None):
        """The system; raises NotRun if it cannot be had."""
        settings, name = self.settings, self.args.system
        if rows is not None:
            settings = Settings(**{**vars(settings), "max_rows": rows})
        if name == "vllm":
            from .vllm_engine import VllmSystem

            return VllmSystem(settings, self.args.vllm)
        if name == "transformers":
            from .transformers_engine import TransformersSystem

            return TransformersSystem(self.model, settings)
        return OurSystem(self.model, settings, name, self.args.budget, self.args.prompt, **self.args.options)

    @contextmanager
    def running(self, rows: int | None = None):
        """The system, which has answered something and is closed at the end."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        system = self.make(rows)
        self.report.note(f"started in {time.perf_counter() - began:.1f} s")
        try:
            prompt, answer = WARM_UP
            first = Request(0.0, min(prompt, self.settings.max_length // 2), answer, 1)
            for one in play(system, [first], self.vocabulary):
                if one.error is not None:
                    raise RuntimeError(f"the first request failed: {one.error}")
            with set_aside():  # as `hf-sparsekv serve` does, and vLLM
                yield system
        finally:
            system.close()

    def count(self, system) -> None:
        """Rows of what a system counts itself."""
        if isinstance(system, OurSystem):
            system.add_to(self.report)
        if torch.cuda.is_available():
            self.report.add("peak_gb", torch.cuda.max_memory_allocated() / 1e9, "GB")

    def play(self, system, requests: list[Request], label: str) -> Figures:
        """One trace; all its figures as rows, and each request's times as lines of ``--requests``."""
        if isinstance(system, OurSystem):
            system.restart()
        played = play(system, requests, self.vocabulary, self.args.timeout)
        if self.args.requests is not None:
            with self.args.requests.open("a") as file:
                file.writelines(json.dumps({"variant": label, **one.record()}) + "\n" for one in played)
        errors = {one.error for one in played if one.error is not None}
        for error in sorted(errors)[:3]:
            self.report.note(f"failed: {error}")
        found = figures(played)
        add_figures(self.report, found)
        self.count(system)
        return found

    def iteration_s(self, system) -> float:
        """Seconds of a decode iteration: as given, or measured."""
        if self.args.iteration_ms is not None:
            return 1e-3 * self.args.iteration_ms
        rows = min(ITERATION_ROWS, self.settings.max_rows)
        requests = fixed_rows(rows, ITERATION_CONTEXT, 4 * LEAST, self.args.lead)
        found = closed_loop(system, requests, self.vocabulary, LEAST, self.args.timeout)
        return quantile(found.between_s, 0.5)


# ---------------------------------------------------------------------- commands


def run_open(args: Namespace, report: Report) -> None:
    """Traces, one after the other."""
    made = [trace.read_trace(path) for path in args.trace]
    bench = Bench(args, report, longest([requests for _, requests in made]))
    args.prompt = made[0][0].prompt_median
    with bench.running() as system:
        for config, requests in made:
            label = bench.label(f"rate={config.rate:g}", *config.answers, f"seed={config.seed}")
            with report.measuring(args.max_rows, config.clip, label):
                report.note(trace.describe(requests))
                bench.play(system, requests, label)


def run_goodput(args: Namespace, report: Report) -> None:
    """A sweep of rates, lowest first; ends where the service fails its limits."""
    configs = {rate: trace.config_of(args, rate) for rate in sorted(args.rates)}
    traces = {rate: trace.make_trace(config) for rate, config in configs.items()}
    empty = [f"{rate:g}" for rate, requests in traces.items() if not requests]
    if empty:
        raise SystemExit(
            f"no request arrives at rate {', '.join(empty)} within {args.seconds:g} s: give more --seconds"
        )
    most = longest(traces.values())
    if args.iteration_ms is None:
        most = max(most, ITERATION_CONTEXT + 4 * LEAST + ITERATION_ROWS * args.lead)
    bench = Bench(args, report, most)
    swept: dict[float, Figures] = {}
    rest = (*next(iter(configs.values())).answers, f"seed={args.seed}")
    with bench.running() as system:
        with report.measuring(args.max_rows, args.clip, bench.label(*rest)):
            iteration = bench.iteration_s(system)
            report.add("iteration_ms", 1e3 * iteration)
        for rate, requests in traces.items():
            label = bench.label(f"rate={rate:g}", *rest)
            with report.measuring(args.max_rows, args.clip, label):
                report.note(trace.describe(requests))
                swept[rate] = bench.play(system, requests, label)
            if rate not in swept or not (swept[rate].meets(iteration) or args.all_rates):
                break
        with report.measuring(args.max_rows, args.clip, bench.label(*rest)):
            report.add("goodput_rps", goodput(swept, iteration), "1/s")


def run_saturated(args: Namespace, report: Report) -> None:
    """All requests of a trace at once, one trace after the other."""
    if args.system == "transformers":
        raise SystemExit("saturated cancels what is left, which transformers is not asked to: name another one")
    made = [trace.read_trace(path) for path in args.trace]
    bench = Bench(args, report, longest([requests for _, requests in made]))
    args.prompt = made[0][0].prompt_median
    with bench.running() as system:
        for config, requests in made:
            counted = f"s={args.warm:g}-{args.warm + args.seconds:g}"
            lengths = f"prompt={config.prompt_median}", *config.answers
            label = bench.label("saturated", *lengths, f"seed={config.seed}", counted)
            with report.measuring(args.max_rows, config.clip, label):
                report.note(trace.describe(requests))
                saturated(bench, system, requests)


def saturated(bench: Bench, system, requests: list[Request]) -> None:
    """Figures of a system that is always full."""
    args, report = bench.args, bench.report
    look = {}
    if isinstance(system, OurSystem):
        system.restart()
        look = {"look": system.look}
    try:
        found = saturate(system, requests, bench.vocabulary, args.warm, args.seconds, args.timeout, **look)
    except RanDry as error:
        raise NotRun(str(error)) from error
    report.add("tokens_per_s", found.tokens / found.seconds, "1/s")
    report.add("requests_per_s", found.finished / found.seconds, "1/s")
    report.add("rows", found.rows, "count")
    report.add("between_ms:mean", 1e3 * mean(found.between_s))
    report.add("between_ms:p50", 1e3 * quantile(found.between_s, 0.5))
    report.add("between_ms:p99", 1e3 * quantile(found.between_s, 0.99))
    bench.count(system)


def run_closed(args: Namespace, report: Report) -> None:
    """A fixed number of rows, each time in a system of its own."""
    bench = Bench(args, report, closed_length(args))
    held = args.system in RUNGS and RUNGS[args.system].working_set
    for rows in args.rows:
        # While rows are held back an engine keeps one place free.
        with report.measuring(rows, args.context, bench.label()), bench.running(rows + held) as system:
            closed(bench, system, rows, held)


def closed(bench: Bench, system, rows: int, held: bool = False) -> Together:
    """Figures while all rows decode, or, if the system may hold some back, while all are there."""
    report = bench.report
    if isinstance(system, OurSystem):
        system.restart()
    found = decode_together(bench, system, rows, held)
    report.add("tokens_per_s", found.tokens / found.seconds, "1/s")
    report.add("between_ms", [1e3 * gap for gap in found.between_s])
    bench.count(system)
    return found


def decode_together(bench: Bench, system, rows: int, held: bool = False) -> Together:
    """So many rows with prompts of ``--context`` tokens answer; raises NotRun if they do not at the same time."""
    args = bench.args
    requests = fixed_rows(rows, args.context, args.tokens, args.lead)
    try:
        return closed_loop(system, requests, bench.vocabulary, LEAST, args.timeout, held)
    except NotTogether as error:
        raise NotRun(str(error)) from error


def inside_ms(bench: Bench, system: OurSystem, rows: int) -> tuple[float, float]:
    """Means by the device's clock: of a captured step while all rows decode, and from its end to the next one's begin.

    In a run of its own: marks take the host some time.
    """
    with marked_replays(bench.model, system.engine._cache, rows) as clock:
        decode_together(bench, system, rows)
        marked = clock.between()[2 * LEFT_OUT :]
    return mean(marked[::2]), mean(marked[1::2])


def run_overhead(args: Namespace, report: Report) -> None:
    """Steps in the engine beside the captured step alone."""
    if args.system not in RUNGS:
        raise SystemExit(f"overhead is of our engine ({', '.join(RUNGS)}), not of {args.system}")
    if not args.device.startswith("cuda"):
        raise SystemExit("overhead needs a CUDA device: it compares with a captured step")
    bench = Bench(args, report, closed_length(args))
    for rows in args.rows:
        with report.measuring(rows, args.context, bench.label(), bench.model):
            with bench.running(rows) as system:
                inside = closed(bench, system, rows)
                step_ms, outside_ms = inside_ms(bench, system, rows)
                made = system.config, system.engine._cache.offload_config
            lengths = [args.context + answered for answered in inside.answered]
            alone = step_alone_ms(bench, lengths, *made)
            report.add("step_ms:alone", alone)
            # Means: where some row's block is full in every other step, a median is of one kind of steps or the other.
            report.add("between_ms:mean", 1e3 * mean(inside.between_s))
            report.add("step_ms:alone_mean", mean(alone))
            report.add("overhead_ms", 1e3 * mean(inside.between_s) - mean(alone))
            report.add("step_ms:inside_mean", step_ms)
            report.add("outside_ms", outside_ms)
        free()


def run_again(args: Namespace, report: Report) -> None:
    """A question about a document, and other ones."""
    if args.system not in RUNGS:
        raise SystemExit(f"again is of our engine ({', '.join(RUNGS)}): others run without shared prefixes here")
    length, document = args.context + trace.QUESTION, 7_000_001
    requests = [
        Request(0.0, length, LEAST, document + nth, shared_tokens=args.context, document=document)
        for nth in range(1, 2 + AGAIN)
    ]
    bench = Bench(args, report, longest([requests]))
    with report.measuring(1, args.context, bench.label("again")), bench.running() as system:
        system.restart()
        times = []
        for request in requests:
            (played,) = play(system, [request], bench.vocabulary, args.timeout)
            if played.error is not None:
                raise RuntimeError(played.error)
            times.append(played.ttft_s)
        report.add("ttft_s:first", times[0], "s")
        report.add("ttft_s:again", times[1:], "s")
        bench.count(system)


def run_beside(args: Namespace, report: Report) -> None:
    """Short prompts that come while a long one is read, and rows decode."""
    (rows,), begins = args.rows, args.head_start
    decode = [Request(0.0, ROW_PROMPT, args.tokens, 7_100_001 + row) for row in range(rows)]
    long = Request(begins, args.context, LEAST, 7_200_001)
    short = [Request(begins + 1.0 + nth, args.short, LEAST, 7_300_001 + nth) for nth in range(args.count)]
    bench = Bench(args, report, longest([[*decode, long, *short]]))
    label = bench.label("beside", f"short={args.short}")
    with report.measuring(rows, args.context, label), bench.running(rows + args.count + 2) as system:
        if isinstance(system, OurSystem):
            system.restart()
        played = play(system, [*decode, long, *short], bench.vocabulary, args.timeout)
        errors = [one.error for one in played if one.error is not None]
        if errors:
            raise RuntimeError(errors[0])
        before, (slow, *quick) = played[:rows], played[rows:]
        until = slow.token_times[0]
        gaps = [b - a for one in before for a, b in pairwise(one.token_times) if begins < b <= until]
        if any(one.token_times[-1] < until for one in before):
            report.note("not all rows decoded all the while: give more --tokens")
        report.add("ttft_s:long", slow.ttft_s, "s")
        report.add("ttft_s:short", [one.ttft_s for one in quick], "s")
        report.add("between_ms:p50", 1e3 * quantile(gaps, 0.5))
        report.add("between_ms:p99", 1e3 * quantile(gaps, 0.99))
        bench.count(system)


def step_alone_ms(
    bench: Bench, lengths: Sequence[int], config: SparseConfig, offload: OffloadConfig | None
) -> list[float]:
    """Captured steps of rows of these lengths, those of the engine's halfway through; keys and values are random.

    As many as a block has tokens: each row seals one, as in the engine, where it is some row's turn in every other
    step if there are many.
    """
    model = bench.model
    model.set_attn_implementation("sparsekv")
    optimize(model)
    try:
        cache = OffloadedSparseCache(config, offload)
        batch = cache.rows(len(lengths), bench.settings.max_length)
        for seed, length in enumerate(lengths):
            batch.join(prefilled(model, batch, length, seed))
        step = RowSteps(model, batch)
        for _ in range(WARM_UP_STEPS):
            step()
        began = cache.joined_rows()
        for _ in range(config.block_size + LEFT_OUT):
            step()
        return replay_ms(model, cache, began)
    finally:
        unoptimize(model)


def longest(traces) -> int:
    """Tokens of the longest request, in whole blocks, and one block more."""
    most = max((r.prompt_tokens + r.output_tokens for requests in traces for r in requests), default=0)
    return -(-most // 256) * 256 + 256


def closed_length(args: Namespace) -> int:
    """Tokens of the longest row of a closed loop, likewise."""
    return longest([fixed_rows(rows, args.context, args.tokens, args.lead) for rows in args.rows])


# ---------------------------------------------------------------------- command line


def print_flags(argv: list[str]) -> int:
    """What ``hf-sparsekv serve`` is to be given for the memory of a setting."""
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
    gpu = int(1e9 * args.kv_gb)
    shape = known_config(args.model)
    settings = Settings(args.model, shape, "bfloat16", gpu, int(host), args.max_rows, args.context)
    print(" ".join(serve_flags(settings, args.system, args.budget)))
    return 0


RUNS = {
    "open": (run_open, "traces from files"),
    "goodput": (run_goodput, "a sweep of rates"),
    "saturated": (run_saturated, "as many rows as there is room for"),
    "closed": (run_closed, "a fixed number of rows"),
    "overhead": (run_overhead, "steps in the engine beside the captured step"),
    "again": (run_again, "questions about a document that has been read"),
    "beside": (run_beside, "short prompts that come while a long one is read"),
}


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
    elif command in ("again", "beside"):
        add("--context", type=parse_tokens, default=131072, metavar="TOKENS", help="of the long prompt (default: 128k)")
    if command == "beside":
        add("--short", type=parse_tokens, default=1024, metavar="TOKENS", help="of the short prompts (default: 1k)")
        add("--count", type=int, default=10, help="short prompts, a second apart (default: 10)")
        add("--rows", type=int, nargs=1, default=[8], help="that decode meanwhile (default: 8)")
        add("--tokens", type=int, default=4096, help="of their answers (default: 4,096)")
        add("--head-start", type=float, default=5.0, help="seconds in which their prompts are read (default: 5)")
    if command in ("closed", "overhead"):
        add("--rows", type=int, nargs="+", default=[1, 8, 32] if command == "overhead" else [1, 2, 4, 8, 16, 32])
        add("--context", type=parse_tokens, default=8192 if command == "overhead" else 32768, metavar="TOKENS")
        add("--tokens", type=int, default=256, help="of the shortest answer")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; 1 if anything failed."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "trace":
        return trace.main(rest)
    if command == "soak":
        from . import soak

        return soak.main(rest)
    if command == "hostile":
        from . import hostile

        return hostile.main(rest)
    if command in ("open", "closed") and rest and rest[0].startswith(("http://", "https://")):
        from . import urls

        return urls.main(command, rest)
    if command == "flags":
        return print_flags(rest)
    if command not in RUNS:
        print(__doc__)
        return 0 if command in ("--help", "-h") else 2
    args = arguments(command).parse_args(rest)
    if args.system == "segments" and args.chunk != CHUNK:
        raise SystemExit("segments reads prompts as users have it: --chunk is for the settings before it, and others")
    print(device_name(), versions())
    case = case_name(args.model)
    with Report("serving", case, rows_file(args), None) as report:
        try:
            RUNS[command][0](args, report)
        except Exception as error:  # of the system as a whole: it could not be made
            with report.measuring(args.max_rows, 0, args.system):
                raise error
    return report.close()


if __name__ == "__main__":
    raise SystemExit(main())
