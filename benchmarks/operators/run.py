"""How long the attention of one layer takes in one decode step: the whole step, its operators, the baselines.

    python -m benchmarks operator                        # the four shapes that have a target
    python -m benchmarks operator --shapes 1x64k 4x64k --dim 64 --heads 16x4 --dtype float16
    python -m benchmarks operator --model glm-4.7-flash
    python -m benchmarks operator --sweep token_score sparse_decode --no-csv
    python -m benchmarks operator --sweep sparse_decode --ways clusters= --no-csv
    python -m benchmarks operator --sweep sparse_decode --kv-dtype int8 --no-csv    # of codes

Everything is captured in a CUDA graph, 20 repetitions that go round several sets of inputs, so that what a step reads
comes from memory and not from the L2 cache. The step is compared with the references before it is timed.
"""

from __future__ import annotations

import gc
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import torch

from hf_sparsekv import TokenConfig
from hf_sparsekv.results import device_name, versions
from hf_sparsekv.tuning.layer_step import MODELS, Layer, Shape, set_count, steps
from hf_sparsekv.tuning.timing import Time, captured

from ..arguments import new_parser, rows_file
from ..report import Report
from ..shapes import parse_shape
from .check import check
from .limits import absorbed, dense_torch, expanded, read_bandwidth
from .sweep import FIRST, OPERATORS, differs, variants
from .walk import measure_walks

TARGETS = {(1, 32768): 33, (1, 131072): 33, (8, 32768): 50, (8, 131072): 65}  # us, the whole step


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


def sweep(layers: list[Layer], report: Report, operators: list[str], ways: list[str] | None = None) -> None:
    """Every way to run the operators at one shape, each compared with the first way; then the quickest.

    With ``ways`` those alone whose names contain one of them, beside the first.
    """
    shape = layers[0].shape
    stored = "" if layers[0].scales is None else ":kv_dtype=int8"
    for operator in operators:
        first, before, found = None, Time(0.0, 0.0, 0.0), {}
        for name, run, result in variants(layers, operator):
            if ways and first is not None and not any(way in name for way in ways):
                continue
            with report.measuring(shape.batch, shape.context, f"two_level{stored}:{name}"):  # not all tiles fit
                took = captured(run, len(layers))
                if name == FIRST:
                    before = took
                    continue
                got = result().clone()
                first = got if first is None else first
                if differs(got, first):
                    raise RuntimeError(f"{operator} {name}: another result than the first variant's")
                found[name] = took - before
                report.add(f"{operator}_us", found[name].samples, "us")
        if found:
            best = min(found, key=lambda name: found[name].median)
            report.note(f"{operator}, quickest: {best}, {found[best].median:.2f} us")


def measure(layers: list[Layer], report: Report, rate: float) -> None:
    """All figures of one shape."""
    shape, device = layers[0].shape, layers[0].q.device
    where, side = (shape.batch, shape.context), torch.cuda.Stream()

    def add(variant: str, metric: str, run: Callable[[int], None]) -> None:
        with report.measuring(*where, variant):
            report.add(metric, captured(run, len(layers)).samples, "us")

    for variant, read in (("limit", "two_level"), ("limit:dense", "dense")):
        with report.measuring(*where, variant):
            report.add("attention_us", 1e6 * shape.bytes_read(read) / rate, "us")
    check(layers[0], side)  # a wrong kernel's times are worth nothing
    torch.cuda.synchronize()
    for layer in layers[1:]:
        layer.step()  # the operators alone need what those before them have written
    for variant, run in steps(layers, side).items():
        add("captured_dense" if variant == "dense" else variant, "attention_us", run)
    if shape.case == "qwen3-8b" and where in TARGETS:
        report.note(f"target of two_level: {TARGETS[where]} us")
    for layer in layers:
        layer.step()
    for name, run in parts(layers).items():
        add("two_level", f"{name}_us", run)
    measure_walks(layers, report)
    layers.clear()
    gc.collect()
    torch.cuda.empty_cache()
    with report.measuring(*where, "sdpa_best"):
        found = absorbed(shape, device) if shape.value_dim else dense_torch(shape, device)
        best = min(found, key=lambda name: found[name].median)
        report.add("attention_us", found[best].samples, "us")
        report.note(f"{best} of " + ", ".join(f"{name} {time.median:.1f}" for name, time in found.items()))
    if shape.value_dim:
        with report.measuring(*where, "hf_expanded"):
            report.add("attention_us", expanded(shape, device).samples, "us")


def arguments() -> ArgumentParser:
    """The command line."""
    parser = new_parser("operator", __doc__)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=list(TARGETS), metavar="BATCHxLENGTH")
    parser.add_argument("--model", choices=list(MODELS), help="heads and sizes of a known model")
    parser.add_argument("--heads", default="32x8", metavar="QUERYxKV")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int, help="latents (MLA): so many of the --dim numbers are the value, too")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--num-blocks", type=int, default=128)
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument(
        "--sweep",
        nargs="+",
        choices=OPERATORS,
        help="time the ways to run these operators instead",
    )
    parser.add_argument("--kv-dtype", choices=("int8",), help="of stored keys and values, on the device: with --sweep")
    parser.add_argument("--ways", nargs="+", metavar="TEXT", help="of a sweep those whose names contain one of these")
    return parser


def shapes(args: Namespace) -> list[Shape]:
    """The shapes that the arguments ask for."""
    q_heads, heads = (int(n) for n in args.heads.split("x"))
    sizes = {"q_heads": q_heads, "heads": heads, "dim": args.dim, "value_dim": args.value_dim}
    sizes = sizes if args.model is None else MODELS[args.model]
    blocks = {"num_blocks": args.num_blocks, "level": "two_level"}
    config = TokenConfig(block_size=args.block_size, token_budget=args.token_budget, **blocks)
    return [Shape(*where, dtype=getattr(torch, args.dtype), config=config, **sizes) for where in args.shapes]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if anything failed."""
    parser = arguments()
    args = parser.parse_args(argv)
    if args.ways and not args.sweep:
        parser.error("--ways are of --sweep")
    if args.kv_dtype and (not args.sweep or any(shape.value_dim for shape in shapes(args))):
        parser.error("--kv-dtype is of keys and values (no latents), in --sweep")
    if not torch.cuda.is_available():
        print("the operator benchmark needs a CUDA device")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    rate = read_bandwidth(device)
    print(f"{device_name()} {versions()}\nread-only bandwidth {rate / 1e12:.3f} TB/s")
    with Report("operator", "", rows_file(args), None) as report:
        for shape in shapes(args):
            report.case = shape.case
            with report.measuring(shape.batch, shape.context, "all"):
                layers = [Layer(shape, device, seed) for seed in range(set_count(shape, device))]
                print(
                    f"{shape.case} {shape.batch} x {shape.context} {str(shape.dtype)[6:]}, {len(layers)} sets of inputs"
                )
                if args.sweep:
                    check(layers[0])
                    for layer in layers:
                        layer.step()
                        if args.kv_dtype:
                            layer.encode()
                    sweep(layers, report, args.sweep, args.ways)
                else:
                    measure(layers, report, rate)
            layers = None
            gc.collect()
            torch.cuda.empty_cache()
    return report.close()


if __name__ == "__main__":
    raise SystemExit(main())
