"""Command-line options that several benchmarks share."""

from __future__ import annotations

import re
from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    Namespace,
    RawDescriptionHelpFormatter,
)
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
import typer

from hf_sparsekv.cli.loading import pick_device
from hf_sparsekv.cli.output import CommandError
from hf_sparsekv.tuning.shapes import SHAPES
from hf_sparsekv_config.options import guess

from . import RESULTS
from .shapes import parse_model, parse_shape


class Parser(ArgumentParser):
    """Wrong usage is told in one line, with what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        options = [name for action in self._actions for name in action.option_strings]
        if match := re.search(r"unrecognized arguments: (--[^\s=]+)", message):
            message += guess(match[1], options)
        elif match := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += guess(match[1], re.findall(r"[\w.:+-]+", match[2]))
        self.exit(2, f"error: {message} ({self.prog} --help)\n")


def parse_count(text: str) -> int:
    """A number of rows, tokens or layers: at least 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def parse_device(text: str) -> str:
    """``cpu``, ``cuda`` or ``cuda:1``, if it is there.

    Raises:
        ArgumentTypeError: it is not.
    """
    try:
        pick_device(text)
    except (typer.BadParameter, CommandError) as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def parse_kv(text: str) -> str:
    """``random``, ``replayed``, or ``replayed:SPREAD`` with a spread of logits of 0.1 to 2 times the recorded one.

    Raises:
        ArgumentTypeError: it is none of them.
    """
    name, colon, spread = text.partition(":")
    if name in ("random", "replayed") and not colon:
        return text
    with suppress(ValueError):
        if name == "replayed" and 0.1 <= float(spread) <= 2:
            return text
    raise ArgumentTypeError(f"{text!r} is not random, replayed or replayed:SPREAD with a spread of 0.1 to 2")


KNOWN = f"{', '.join(SHAPES)}; or a model's name or path"
_SHARED = {
    "shapes": {"nargs": "+", "type": parse_shape, "metavar": "BATCHxLENGTH"},
    "model": {"default": "qwen3-8b", "type": parse_model, "help": f"{KNOWN} (its config only: weights are random)"},
    "dtype": {"choices": ("bfloat16", "float16", "float32"), "help": "default: bfloat16; on a CPU float32"},
    "device": {"default": "cuda" if torch.cuda.is_available() else "cpu", "type": parse_device},
    "fused": {"action": BooleanOptionalAction, "default": True, "help": "fuse the small layers, join projections"},
    "kv": {"default": "random", "type": parse_kv, "help": "caches hold random, replayed or replayed:SPREAD keys"},
    "host-gb": {"type": float, "help": "host memory that offloaded caches may take; default 80 %% of all"},
}


def new_parser(name: str, doc: str, *shared: str) -> ArgumentParser:
    """A parser with these shared options, and with ``--csv FILE`` and ``--no-csv``."""
    parser = Parser(prog=f"python -m benchmarks {name}", description=doc, formatter_class=RawDescriptionHelpFormatter)
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
