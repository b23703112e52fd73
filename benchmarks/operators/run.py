"""The ways to run each operator of a decode step of one layer, timed: where constants of kernels come from.

    python -m benchmarks operator --sweep sparse_decode --shapes 1x64k 4x64k --dim 64 --heads 16x4 --dtype float16
    python -m benchmarks operator --sweep latent_decode --model glm-4.7-flash
    python -m benchmarks operator --sweep token_score sparse_decode --no-csv
    python -m benchmarks operator --sweep sparse_decode --ways clusters= --no-csv
    python -m benchmarks operator --sweep sparse_decode --kv-dtype int8 --no-csv    # of codes

Everything is captured in a CUDA graph. The 20 repetitions go round several sets of inputs, so that a step reads from
memory and not from the L2 cache. The step is compared with the references before it is timed.
"""

from __future__ import annotations

import gc
from argparse import ArgumentParser, Namespace

import torch

from hf_sparsekv import TokenConfig
from hf_sparsekv.results import device_name, versions
from hf_sparsekv.tuning.layer_step import MODELS, Layer, Shape, set_count
from hf_sparsekv.tuning.timing import captured

from ..arguments import new_parser, rows_file
from ..report import Report
from ..shapes import parse_shape
from .check import check
from .sweep import OPERATORS, differs, variants

SHAPES = (1, 32768), (1, 131072), (8, 32768), (8, 131072)


def sweep(layers: list[Layer], report: Report, operators: list[str], ways: list[str] | None = None) -> None:
    """Every way to run the operators at one shape, each compared with the first way; then the fastest.

    With ``ways`` those alone whose names contain one of them, beside the first.
    """
    shape = layers[0].shape
    stored = "" if layers[0].scales is None else ":kv_dtype=int8"
    for operator in operators:
        first, found = None, {}
        for name, run, result in variants(layers, operator):
            if ways and first is not None and not any(way in name for way in ways):
                continue
            with report.measuring(shape.batch, shape.context, f"two_level{stored}:{name}"):  # not all tiles fit
                took = captured(run, len(layers))
                got = result().clone()
                first = got if first is None else first
                if differs(got, first):
                    raise RuntimeError(f"{operator} {name}: another result than the first variant's")
                found[name] = took
                report.add(f"{operator}_us", found[name].samples, "us")
        if found:
            best = min(found, key=lambda name: found[name].median)
            report.note(f"{operator}, quickest: {best}, {found[best].median:.2f} us")


def arguments() -> ArgumentParser:
    """The command line."""
    parser = new_parser("operator", __doc__)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=list(SHAPES), metavar="BATCHxLENGTH")
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
        required=True,
        choices=OPERATORS,
        help="operators",
    )
    parser.add_argument("--kv-dtype", choices=("int8",), help="of stored keys and values, on the device")
    parser.add_argument("--ways", nargs="+", metavar="TEXT", help="those whose names contain one of these")
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
    if args.kv_dtype and any(shape.value_dim for shape in shapes(args)):
        parser.error("--kv-dtype is of keys and values, not of latents")
    if not torch.cuda.is_available():
        print("the operator benchmark needs a CUDA device")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{device_name()} {versions()}")
    with Report("operator", "", rows_file(args), None) as report:
        for shape in shapes(args):
            report.case = shape.case
            with report.measuring(shape.batch, shape.context, "all"):
                layers = [Layer(shape, device, seed) for seed in range(set_count(shape, device))]
                print(
                    f"{shape.case} {shape.batch} x {shape.context} {str(shape.dtype)[6:]}, {len(layers)} sets of inputs"
                )
                check(layers[0])
                for layer in layers:
                    layer.step()
                    if args.kv_dtype:
                        layer.encode()
                sweep(layers, report, args.sweep, args.ways)
            layers = None
            gc.collect()
            torch.cuda.empty_cache()
    return report.close()


if __name__ == "__main__":
    raise SystemExit(main())
