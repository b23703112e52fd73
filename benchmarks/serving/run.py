"""The commands of ``benchmarks serving``: traces against whole systems, and a fixed number of rows.

Each command's measure is in :mod:`.options`, which is their command line.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from contextlib import contextmanager

import psutil
import torch

from hf_sparsekv.results import device_name, versions
from hf_sparsekv_serve.process import set_aside

from ..arguments import rows_file
from ..baselines import NotRun
from ..drawn_lists import draw
from ..report import Report
from ..shapes import case_name, known_config, random_model
from . import options, trace
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
from .options import CHUNK, arguments
from .ours import RUNGS, OurSystem
from .settings import Settings
from .trace import Request

ITERATION_ROWS, ITERATION_CONTEXT = 32, 4096
LEAST = 16  # tokens that all rows make together
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
            prefill_ms=args.prefill_ms,
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
        """Vocabulary size of the model."""
        return self.settings.config.vocab_size

    def label(self, *parts: str) -> str:
        """A variant's name."""
        name = self.args.system
        if self.args.chunk != CHUNK and name != "segments":
            parts = (f"chunk={self.args.chunk}", *parts)
        if name in RUNGS and name != "dense":
            parts = (f"budget={self.args.budget}", *parts)
            if self.args.prompt_density is not None:
                parts = (*parts, f"prompts={self.args.prompt_density:g}")
            if name == "segments" and self.args.prefill_ms != Settings.prefill_ms:
                parts = (*parts, f"prefill={self.args.prefill_ms:g}ms")
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
        options = self.args.options
        if self.args.prompt_density is not None:
            draw(self.args.prompt_density)
            options = {**options, "prefill": 0.9}
        return OurSystem(self.model, settings, name, self.args.budget, self.args.prompt, **options)

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


def longest(traces) -> int:
    """Tokens of the longest request, in whole blocks, and one block more."""
    most = max((r.prompt_tokens + r.output_tokens for requests in traces for r in requests), default=0)
    return -(-most // 256) * 256 + 256


def closed_length(args: Namespace) -> int:
    """Tokens of the longest row of a closed loop, likewise."""
    return longest([fixed_rows(rows, args.context, args.tokens, args.lead) for rows in args.rows])


# ---------------------------------------------------------------------- command line


RUNS = {
    "open": (run_open, "traces from files"),
    "goodput": (run_goodput, "a sweep of rates"),
    "saturated": (run_saturated, "as many rows as there is room for"),
    "closed": (run_closed, "a fixed number of rows"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; 1 if anything failed."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "trace":
        return trace.main(rest)
    if command == "hostile":
        from . import hostile

        return hostile.main(rest)
    if command in ("open", "closed") and any(part.startswith(("http://", "https://")) for part in rest):
        from . import urls

        return urls.main(command, rest)
    if command == "flags":
        return options.print_flags(rest)
    if command not in RUNS:
        print(options.__doc__)
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
