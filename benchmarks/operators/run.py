"""How long the attention of one layer takes in one decode step: the whole step, its operators, the baselines.

    python -m benchmarks operator                        # the four shapes that have a target
    python -m benchmarks operator --shapes 1x64k 4x64k --dim 64 --heads 16x4 --dtype float16
    python -m benchmarks operator --model glm-4.7-flash
    python -m benchmarks operator --sweep token_score sparse_decode --no-csv

Everything is captured in a CUDA graph, 20 repetitions that go round several sets of inputs, so that what a step reads
comes from memory and not from the L2 cache. The step is compared with the references before it is timed.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from hf_sparsekv.config import TwoLevelConfig
from hf_sparsekv.results import Row, append_rows, device_name, versions
from hf_sparsekv.tuning.layer_step import MODELS, Layer, Shape, set_count
from hf_sparsekv.tuning.timing import Time, captured

from .. import RESULTS
from .check import check
from .limits import absorbed, dense_torch, expanded, read_bandwidth
from .sweep import FIRST, OPERATORS, differs, variants
from .walk import measure_walks

TARGETS = {(1, 32768): 33, (1, 131072): 33, (8, 32768): 50, (8, 131072): 65}  # us, the whole step
CSV = RESULTS / "operator.csv"


class Report:
    """Prints a line per figure and collects the rows."""

    def __init__(self, limit_rate: float) -> None:
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.rate = limit_rate

    def add(self, shape: Shape, variant: str, metric: str, found: Time, note: str = "") -> None:
        self.rows.append(
            Row(
                "operator",
                shape.case,
                variant,
                shape.batch,
                shape.context,
                metric,
                found.median,
                found.low,
                found.high,
                "us",
            )
        )
        spread = f"{found.low:8.2f} {found.high:8.2f}"
        print(f"  {variant:24s} {metric:18s} {found.median:8.2f} {spread}  {note}", flush=True)

    def try_add(self, shape: Shape, variant: str, metric: str, run: Callable[[int], None], sets: int) -> None:
        """Measure and add; what fails is reported and does not lose the rest."""
        try:
            found = captured(run, sets)
        except Exception as error:
            self.fail(f"{shape.batch} x {shape.context} {variant} {metric}", error)
            return
        target = TARGETS.get((shape.batch, shape.context)) if variant.startswith("two_level") else None
        whole = metric == "attention_us" and shape.case == "qwen3-8b" and target
        self.add(shape, variant, metric, found, f"target {target}" if whole else "")

    def fail(self, what: str, error: Exception) -> None:
        self.failed.append(what)
        print(f"  FAILED {what}: {error!r}"[:400], flush=True)
        traceback.print_exc()


def parts(layers: list[Layer]) -> dict[str, Callable[[int], None]]:
    """Each operator alone."""
    return {
        "append": lambda i: layers[i].append(),
        "block_score": lambda i: layers[i].block_score(),
        "block_select": lambda i: layers[i].block_select(),
        "token_score": lambda i: layers[i].token_score(layers[i].previous, layers[i].token_scores),
        "token_select": lambda i: layers[i].token_select(layers[i].previous, layers[i].token_scores),
        "sparse_decode": lambda i: layers[i].decode(layers[i].tokens, "token"),
        "dense_decode": lambda i: layers[i].decode(None, "all"),
    }


def steps(layers: list[Layer], side: torch.cuda.Stream) -> dict[str, Callable[[int], None]]:
    """Everything that a step does, by variant."""
    first = layers[0]
    every = first.slots.shape[1] * first.shape.config.block_size
    scores = torch.empty(*first.blocks.shape[:2], every, dtype=torch.float32, device=first.q.device)
    return {
        "two_level": lambda i: layers[i].step(),
        "two_level:lag": lambda i: layers[i].lagged_step(side),
        "block_only": lambda i: layers[i].block_step(),
        "token_only": lambda i: layers[i].token_step(scores),
        "captured_dense": lambda i: layers[i].dense_step(),
    }


def sweep(shape: Shape, device: torch.device, report: Report, operators: list[str]) -> None:
    """Every way to run the operators at one shape, each compared with the first way; quickest last."""
    sets = set_count(shape, device)
    print(f"{shape.case} {shape.batch} x {shape.context}: sweep over {sets} sets of inputs", flush=True)
    layers = [Layer(shape, device, seed) for seed in range(sets)]
    check(layers[0])
    for layer in layers:
        layer.step()
    for operator in operators:
        first, before, found = None, Time(0.0, 0.0, 0.0), []
        for name, run, result in variants(layers, operator):
            what = f"{shape.batch} x {shape.context} {operator} {name}"
            try:
                took = captured(run, sets)
                if name == FIRST:
                    before = took
                    continue
                took -= before
                got = result().clone()
                first = got if first is None else first
                if differs(got, first):
                    raise AssertionError("another result than the first variant's")
                found.append((took.median, name, took))
            except Exception as error:  # not all tiles fit every shape
                report.fail(what, error)
        for _, name, took in sorted(found, reverse=True):
            report.add(shape, f"two_level:{name}", f"{operator}_us", took)


def measure(shape: Shape, device: torch.device, report: Report) -> None:
    """All figures of one shape."""
    start, sets = time.perf_counter(), set_count(shape, device)
    print(f"{shape.case} {shape.batch} x {shape.context} {str(shape.dtype)[6:]}, {sets} sets of inputs", flush=True)
    limits = {name: 1e6 * shape.bytes_read(name) / report.rate for name in ("two_level", "dense")}
    for name, us in limits.items():
        variant = "limit" if name == "two_level" else f"limit:{name}"
        report.add(shape, variant, "attention_us", Time(us, us, us), f"{shape.bytes_read(name) / 1e6:.1f} MB")

    layers = [Layer(shape, device, seed) for seed in range(sets)]
    side = torch.cuda.Stream()
    try:
        check(layers[0], side)
        torch.cuda.synchronize()
    except Exception as error:  # a wrong kernel's times are worth nothing
        report.fail(f"check of {shape.batch} x {shape.context}", error)
        return
    for layer in layers[1:]:
        layer.step()  # the operators alone need what those before them have written
    for variant, run in steps(layers, side).items():
        report.try_add(shape, variant, "attention_us", run, sets)
    for layer in layers:
        layer.step()
    for name, run in parts(layers).items():
        report.try_add(shape, "two_level", f"{name}_us", run, sets)
    measure_walks(layers, partial(report.add, shape), report.fail)
    del layers, run
    gc.collect()
    torch.cuda.empty_cache()
    try:
        found = absorbed(shape, device) if shape.value_dim else dense_torch(shape, device)
        name = min(found, key=lambda name: found[name].median)
        others = ", ".join(f"{name} {t.median:.1f}" for name, t in found.items())
        report.add(shape, "sdpa_best", "attention_us", found[name], f"{name} of {others}")
    except Exception as error:
        report.fail(f"{shape.batch} x {shape.context} sdpa_best", error)
    if shape.value_dim:
        try:
            report.add(shape, "hf_expanded", "attention_us", expanded(shape, device))
        except ValueError as error:
            print(f"  hf_expanded left out: {error}", flush=True)
        except Exception as error:
            report.fail(f"{shape.batch} x {shape.context} hf_expanded", error)
    torch.cuda.empty_cache()
    print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="operator", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--shapes", nargs="+", default=[f"{b}x{n // 1024}k" for b, n in TARGETS], metavar="BATCHxLENGTH"
    )
    parser.add_argument("--model", choices=list(MODELS), help="heads and sizes of a known model")
    parser.add_argument("--heads", default="32x8", metavar="QUERYxKV")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int, help="latents (MLA): so many of the --dim numbers are the value, too")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--num-blocks", type=int, default=128)
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--sweep", nargs="+", choices=OPERATORS, help="time the ways to run these operators instead")
    parser.add_argument("--csv", type=Path, default=CSV, help="rows are appended to it")
    parser.add_argument("--no-csv", action="store_true")
    return parser


def shapes(args: argparse.Namespace) -> list[Shape]:
    """The shapes that the arguments ask for."""
    q_heads, heads = (int(n) for n in args.heads.split("x"))
    sizes = {"q_heads": q_heads, "heads": heads, "dim": args.dim, "value_dim": args.value_dim}
    if args.model is not None:
        sizes = MODELS[args.model]
    config = TwoLevelConfig(block_size=args.block_size, num_blocks=args.num_blocks, token_budget=args.token_budget)
    found = []
    for text in args.shapes:
        batch, length = text.lower().split("x")
        context = int(length[:-1]) * 1024 if length.endswith("k") else int(length)
        found.append(Shape(int(batch), context, dtype=getattr(torch, args.dtype), config=config, **sizes))
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if anything failed."""
    args = arguments().parse_args(argv)
    if not torch.cuda.is_available():
        print("the operator benchmark needs a CUDA device")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    rate = read_bandwidth(device)
    print(f"{device_name()} {versions()}\nread-only bandwidth {rate / 1e12:.3f} TB/s")
    print(f"  {'variant':24s} {'metric':18s} {'median':>8s} {'25 %':>8s} {'75 %':>8s}  us")
    report = Report(rate)
    for shape in shapes(args):
        try:
            if args.sweep:
                sweep(shape, device, report, args.sweep)
            else:
                measure(shape, device, report)
        except Exception as error:
            report.fail(f"{shape.batch} x {shape.context}", error)
        gc.collect()
        torch.cuda.empty_cache()
    if report.rows and not args.no_csv:
        append_rows(args.csv, report.rows)
    for what in report.failed:
        print(f"FAILED {what}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
