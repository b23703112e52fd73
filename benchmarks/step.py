"""Time per output token of a whole model: the captured forward alone, and through ``generate()``.

    python -m benchmarks step --shapes 1x32k 1x128k 8x32k

Random weights of a known shape, KV filled with random keys and values. The time of a step does not depend on them while
all KV is on the device. Baselines in the same run: transformers' DynamicCache with sdpa, eager; the captured step with
dense attention; block-only and token-only selection. The limit is the bytes that must be read over the measured
read-only bandwidth. A failure in one variant does not lose the others, and rows are written after each variant.

Metrics:

- tpot_ms: through generate().
- read: share of the cached tokens that the steps of tpot_ms attended to, dense layers included.
- steps_ms: steps in a row without its loop, each with its own query.
- step_ms: the captured forward alone, the same step again and again.
- capture_s: from the first decode step to the end of its capture. capture_s:cold: the variant's first in this process,
  compilation of Triton kernels included if its cache on disk is empty.
- peak_gb while decoding (peak_gb:second on a second GPU, if that chooses).
- allocations and host_syncs of one replayed step (:seal: the largest, of a step that seals a block).
- generate_host_syncs of one token.
- Offloaded caches: fill_s to make and fill the cache, pinned memory included.
- Offloaded caches, over the tokens of tpot_ms: hit_rate, the share of the chosen tokens or blocks that were on the
  device; missed_mb, the others; host_mb, what crossed the link. Both are 10^6 bytes a step.
- With --kv replayed, caches that choose for expected queries: foreseen_overlap, the share of the own query's selection
  that is chosen for the expected one, too; foreseen_cosine, of both queries.
- With --kv replayed, these caches and caches that copy chosen tokens after a step: overlap_1, the share that the step
  before chose.
- Names that end in :recorded: the same figures on a recorded real model, for the three above, and hit_rate and
  missed_mb of tokens.

Selections are measured whether they pay or not. --crossover decides as users' caches do, and its rows end in +dense
where attention was dense. --kernels prints where a captured step's time goes. It lists the longest kernels by their
sums. It lists a middle layer's kernels in their order, with how much later each ended than all before it.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import torch

from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.fusion.fuse import why_not
from hf_sparsekv.results import device_name, versions

from . import foresight
from .arguments import host_bytes, new_parser, parse_count, rows_file
from .baselines import (
    VARIANTS,
    Variant,
    captured_sdpa_ms,
    check,
    chose_dense,
    find,
    forget_compiled,
    make_cache,
    prepare,
    second_gpu,
)
from .decoding import (
    WARM_UP,
    Steps,
    capture_seconds,
    count_steps,
    free,
    generate,
    generate_syncs,
    in_a_row_ms,
    replay_ms,
    timed,
)
from .filling import Source, fill_layers, make_source
from .kernels import describe_step, launched
from .report import Report
from .shapes import (
    POOL_SIZES,
    case_name,
    known_config,
    kv_bytes,
    parse_pool,
    pool_size,
    random_model,
    text_config,
    weight_bytes,
)
from .traffic import Meter

DEFAULT = ("hf_dynamic", "sdpa_best", "captured_dense", "two_level", "two_level:lag", "block_only", "token_only")
TOKENS = {"dynamic": 24, "static": 24, "offloaded": 14}  # at most: eager steps take long and vary little
IN_A_ROW = 32  # steps
COUNTED = 64  # steps: one of them seals a block
SPARE = 256  # tokens beside those of --tokens: counted steps, captures


def limit_ms(weights: int, config, batch: int, context: int, itemsize: int, rate: float) -> float:
    """Bytes that a dense step must read (``weights`` and KV) over the read-only bandwidth in bytes a second."""
    return 1e3 * (weights + kv_bytes(config, batch, context, itemsize)) / rate


class Bench:
    """One model, measured in all its variants."""

    def __init__(self, model, report: Report, args: Namespace) -> None:
        self.model, self.report, self.args = model, report, args
        self.fused = args.fused and why_not(model) is None
        self.host_bytes = host_bytes(args)
        self.captured: set[str] = set()  # labels
        self.fill_s = 0.0  # of the cache that was filled last
        self.source: Source | None = None  # of its keys and queries

    def label(self, variant: Variant, found: str = "") -> str:
        """Name of a variant's rows."""
        replayed = variant.ours and self.args.kv != "random"
        pool = f":pool={self.args.device_pool}" if variant.offload and self.args.device_pool else ""
        pool += f":kv_dtype={self.args.kv_dtype}" if variant.offload and self.args.kv_dtype else ""
        budget = f":budget={self.args.budget}" if self.args.budget and variant.ours else ""
        return variant.label(self.fused) + found + budget + pool + f":kv={self.args.kv}" * replayed

    def filled(self, variant: Variant, batch: int, context: int, length: int | None):
        """A full cache, and what to call after each step."""
        model, args = self.model, self.args
        kv = kv_bytes(text_config(model), batch, context, model.dtype.itemsize)
        source = self.source = make_source(args.kv, model, batch, context)
        begin = time.perf_counter()
        pool = pool_size(args.device_pool, kv)
        cache = make_cache(model, variant, length, self.host_bytes, pool, args.budget, args.kv_dtype)
        fill_layers(source, cache)
        torch.cuda.synchronize()
        if (second := second_gpu(cache)) is not None:
            torch.cuda.synchronize(second)
            torch.cuda.reset_peak_memory_stats(second)
        self.fill_s = time.perf_counter() - begin
        return cache, source.start(cache)

    def measure(self, variant: Variant, batch: int, context: int) -> None:
        """All figures of one variant."""
        check(variant, self.model, batch, context, self.host_bytes)
        if variant.kind == "sdpa":
            self.report.add("step_ms", captured_sdpa_ms(self.model, batch, context, self.fused, timed))
            return
        prepare(self.model, variant, self.fused)
        if variant.ours and variant.captured:
            self.ours(variant, batch, context)
        elif variant.ours:
            self.eager(variant, batch, context)
        else:
            self.stock(variant, batch, context)

    def stock(self, variant: Variant, batch: int, context: int) -> None:
        """A cache of transformers."""
        tokens, compiled = min(self.args.tokens, TOKENS[variant.kind]), variant.name == "hf_static_compile"
        # As generate() would size it; masked room is read, too.
        length = context + 1 + tokens + (0 if compiled else SPARE)
        cache, after = self.filled(variant, batch, context, length)
        torch.cuda.reset_peak_memory_stats()
        try:
            found = generate(self.model, cache, batch, tokens, compiled=compiled)
            self.report.add("tpot_ms", found.tpot_ms)
            if compiled:
                self.report.add("capture_s", found.set_up_ms / 1e3, "s")
            self.report.add("peak_gb", torch.cuda.max_memory_allocated() / 1e9, "GB")
            if not compiled:
                syncs = generate_syncs(self.model, cache, batch, 8, after)
                self.report.add("generate_host_syncs", syncs, "count")
        finally:
            if compiled:
                forget_compiled(self.model)

    def eager(self, variant: Variant, batch: int, context: int) -> None:
        """A cache of ours whose steps are not captured."""
        tokens = min(self.args.tokens, TOKENS["dynamic"])
        cache, after = self.filled(variant, batch, context, context + tokens + SPARE)
        torch.cuda.reset_peak_memory_stats()
        self.report.add("tpot_ms", generate(self.model, cache, batch, tokens, each=after).tpot_ms)
        self.report.note(f"{cache.stats()}")
        self.peak(cache)

    def ours(self, variant: Variant, batch: int, context: int) -> None:
        """A captured step over a cache of ours."""
        model, report = self.model, self.report
        label, runner = self.label(variant), runner_of(model)
        cache, after = self.filled(variant, batch, context, context + self.args.tokens + SPARE)
        torch.cuda.reset_peak_memory_stats()
        first = capture_seconds(model, Steps(model, cache, batch, 8, after))
        if chose_dense(cache):
            label = self.label(variant, "+dense")
            report.rename(label)
        if label not in self.captured:
            self.captured.add(label)
            report.add("capture_s:cold", first, "s")
        meter = Meter(cache)
        report.add("tpot_ms", generate(model, cache, batch, self.args.tokens, each=after).tpot_ms)
        stats = cache.stats()
        report.note(f"{stats}; {runner.captures} captures")
        report.add("read", stats.attended_share, "share")
        if stats.walks:
            report.add("tokens", stats.tokens_per_walk, "count")
            report.add("covered_mass:estimated", stats.estimated_mass, "share")
        if variant.offload:
            meter.read().add_to(report)
            report.add("fill_s", self.fill_s, "s")
        if getattr(self.source, "pairs", None) is not None:
            foresight.add_to(report, cache, self.source.replayed, self.source.pairs)
        self.peak(cache)
        if host := cache.memory_bytes()["host"]:
            report.add("host_gb", host / 1e9, "GB")
        report.add("steps_ms", in_a_row_ms(Steps(model, cache, batch, IN_A_ROW + WARM_UP, after), IN_A_ROW))
        self.counts(cache, batch, after)
        # A second cache of the same shape is captured again: so is this one, once its graph is gone.
        runner.graphs.pop(cache, None)
        step = Steps(model, cache, batch, 8, after)
        report.add("capture_s", capture_seconds(model, step), "s")
        if self.args.kernels:
            print(describe_step(launched(step)), flush=True)
        report.add("step_ms", replay_ms(model, cache))

    def peak(self, cache) -> None:
        """Most memory that was in use, on the second device as well."""
        self.report.add("peak_gb", torch.cuda.max_memory_allocated() / 1e9, "GB")
        if (second := second_gpu(cache)) is not None:
            self.report.add("peak_gb:second", torch.cuda.max_memory_allocated(second) / 1e9, "GB")

    def counts(self, cache, batch: int, after: Callable[[], None]) -> None:
        """Allocations and waits of steps that are replayed, and waits of generate()'s tokens."""
        report = self.report
        allocations, syncs, places = count_steps(Steps(self.model, cache, batch, COUNTED, after), COUNTED)
        for name, values in (("allocations", allocations), ("host_syncs", syncs)):
            report.add(name, values, "count")
            report.add(f"{name}:seal", max(values), "count")
        where = ", ".join(f"{place} {n / COUNTED:.2f}" for place, n in places.most_common(6))
        report.note(f"the host waited at (times a step): {where or 'nowhere'}")
        report.add("generate_host_syncs", generate_syncs(self.model, cache, batch, 16, after), "count")


def arguments() -> ArgumentParser:
    """The command line."""
    parser = new_parser("step", __doc__, "shapes", "model", "dtype", "fused", "kv", "host-gb")
    parser.set_defaults(shapes=[(1, 32768), (1, 131072), (8, 32768)], dtype="bfloat16")
    add = parser.add_argument
    add("--layers", type=parse_count, help="the model's first layers only; its rows say so")
    add("--variants", nargs="+", default=list(DEFAULT), choices=list(VARIANTS), metavar="VARIANT")
    add("--compile", action="store_true", help="also StaticCache compiled by generate(): about a minute")
    add("--offload", action="store_true", help="our caches keep full blocks in host memory")
    add("--crossover", action="store_true", help="attend densely where known to be as quick: +dense")
    add("--tokens", type=parse_count, default=160, help="tokens to generate")
    add("--kernels", action="store_true", help="also print where a step's time goes, kernel by kernel")
    add("--budget", type=parse_count, help="tokens that our caches select; default 1024")
    add("--kv-dtype", choices=("int8",), help="of keys and values in host memory: with --offload")
    add("--device-pool", type=parse_pool, metavar="SIZE", help=f"of offloaded caches: {POOL_SIZES}")
    return parser


def variants(args: Namespace) -> list[Variant]:
    """The variants that the arguments ask for."""
    names = list(args.variants)
    if args.compile and "hf_static_compile" not in names:
        names.append("hf_static_compile")
    return [find(name, args.offload, args.crossover) for name in names]


def run(bench: Bench, args: Namespace, rate: float) -> None:
    """All shapes and variants."""
    model, report = bench.model, bench.report
    config = text_config(model)
    for batch, context in args.shapes:
        weights = weight_bytes(model, batch)
        with report.measuring(batch, context, "limit"):
            report.add("step_ms", limit_ms(weights, config, batch, context, model.dtype.itemsize, rate))
        for variant in variants(args):
            with report.measuring(batch, context, bench.label(variant), model):
                bench.measure(variant, batch, context)
            free()


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if anything failed for other reasons than memory."""
    args = (parser := arguments()).parse_args(argv)
    if args.kv_dtype and not args.offload:
        parser.error("--kv-dtype is of keys and values in host memory: add --offload")
    if not torch.cuda.is_available():
        print("the step benchmark needs a CUDA device")
        return 1
    from .operators.limits import read_bandwidth  # needs Triton

    print(device_name(), versions())
    rate = read_bandwidth(torch.device("cuda"))
    free()
    print(f"read-only bandwidth {rate / 1e12:.2f} TB/s")
    case = case_name(args.model) + ("" if args.dtype == "bfloat16" else f":{args.dtype}")
    case += "" if args.layers is None else f":layers={args.layers}"
    model = random_model(known_config(args.model, args.layers), getattr(torch, args.dtype), torch.device("cuda"))
    total = len(args.shapes) * (1 + len(variants(args)))
    with Report("step", case, rows_file(args), total) as report:
        run(Bench(model, report, args), args, rate)
    return report.close()


if __name__ == "__main__":
    raise SystemExit(main())
