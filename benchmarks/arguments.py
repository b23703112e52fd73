"""Command-line options that several benchmarks share."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import torch

from . import RESULTS
from .shapes import SHAPES, parse_shape

KNOWN = f"{', '.join(SHAPES)}; or a model's name or path"
_SHARED = {
    "shapes": {"nargs": "+", "type": parse_shape, "metavar": "BATCHxLENGTH"},
    "model": {"default": "qwen3-8b", "help": f"{KNOWN} (its config only: weights are random)"},
    "dtype": {"choices": ("bfloat16", "float16", "float32"), "help": "default: bfloat16; on a CPU float32"},
    "device": {"default": "cuda" if torch.cuda.is_available() else "cpu"},
    "fused": {"action": BooleanOptionalAction, "default": True, "help": "fuse the small layers, join projections"},
    "kv": {"default": "random", "choices": ("random", "replayed"), "help": "what caches are filled with"},
    "host-gb": {"type": float, "help": "host memory that offloaded caches may take; default 80 %% of all"},
}


def new_parser(name: str, doc: str, *shared: str) -> ArgumentParser:
    """A parser with these shared options, and with ``--csv FILE`` and ``--no-csv``."""
    parser = ArgumentParser(
        prog=f"python -m benchmarks {name}", description=doc, formatter_class=RawDescriptionHelpFormatter
    )
    for option in shared:
        parser.add_argument(f"--{option}", **_SHARED[option])
    parser.add_argument("--csv", type=Path, default=RESULTS / f"{name}.csv", help="rows are appended to it")
    parser.add_argument("--no-csv", action="store_true", help="print only")
    return parser


def rows_file(args: Namespace) -> Path | None:
    """Where rows go."""
    return None if args.no_csv else args.csv


def host_bytes(args: Namespace) -> int | None:
    """``--host-gb`` in bytes."""
    return None if args.host_gb is None else int(1e9 * args.host_gb)
