"""How many GPUs a number of users with long documents needs: the model of docs/serving-scale.md, as a table.

    python tools/gpus_for_users.py qwen3-8b --context 128k --gpu-memory 140GiB --host-memory 200GiB \\
        --tokens-per-s 400 --prompt-tokens-per-s 10600 --users 10 1000 100000

Rows of a GPU are those of `hf-sparsekv plan --serve`, offloaded. --tokens-per-s (all rows of a replica together) and
--prompt-tokens-per-s are to be measured; nothing is assumed for them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import typer

from hf_sparsekv import TokenConfig
from hf_sparsekv.cli.loading import load_config
from hf_sparsekv.tuning.plan import model_shape
from hf_sparsekv.tuning.serving_plan import rows_that_fit
from hf_sparsekv.tuning.shapes import SHAPES
from hf_sparsekv_cli.values import parse_bytes, parse_tokens


@dataclass(frozen=True)
class Load:
    """What a user does, and what a replica can.

    Attributes:
        context: tokens of a document.
        answer: tokens of an answer.
        asks: questions an hour of a user who is active.
        active: share of the users who are, at the busiest time.
        cached: share of a prompt that is found in a prefix cache while its document is kept.
        used: share of a GPU's time to plan with: requests come unevenly.
        rows: documents of ``context`` tokens that a replica holds.
        tokens_per_s: that a replica decodes, all rows together.
        prompt_tokens_per_s: that it reads.
    """

    context: int
    answer: int
    asks: float
    active: float
    cached: float
    used: float
    rows: int
    tokens_per_s: float
    prompt_tokens_per_s: float

    def requests_per_s(self, users: int) -> float:
        """At the busiest time."""
        return users * self.active * self.asks / 3600

    def seconds(self, cached: float) -> float:
        """Of a GPU for one request."""
        return (1 - cached) * self.context / self.prompt_tokens_per_s + self.answer / self.tokens_per_s

    def by_time(self, users: int, cached: float) -> int:
        """GPUs that have the time."""
        return max(1, math.ceil(self.requests_per_s(users) * self.seconds(cached) / self.used))

    def by_memory(self, users: int) -> int:
        """GPUs that keep a document of every active user."""
        return max(1, math.ceil(users * self.active / self.rows))

    def keeping(self, users: int) -> int:
        """GPUs if documents are kept between questions."""
        return max(self.by_time(users, self.cached), self.by_memory(users))

    def anew(self, users: int) -> int:
        """GPUs if every question reads its document anew."""
        return self.by_time(users, 0.0)


def table(load: Load, users: list[int]) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "| users | requests/s | GPUs by time, documents kept | GPUs by memory, documents kept | GPUs, documents kept | "
        "GPUs, every document read again |",
        "|---|---|---|---|---|---|",
    ]
    for n in users:
        cells = [f"{load.requests_per_s(n):.3g}", load.by_time(n, load.cached), load.by_memory(n)]
        cells += [load.keeping(n), load.anew(n)]
        shown = [f"{cell:,}" if isinstance(cell, int) else cell for cell in cells]
        lines.append(f"| {n:,} | {' | '.join(shown)} |")
    return lines


def checked(parse: Callable[[str], int]) -> Callable[[str], int]:
    """A parser of the command's options, for argparse."""

    def parsed(text: str) -> int:
        try:
            return parse(text)
        except typer.BadParameter as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="as for `hf-sparsekv plan`")
    add("--context", type=checked(parse_tokens), required=True, help="of a document: 128k")
    add("--gpu-memory", type=checked(parse_bytes), required=True, help="of a replica: 140GiB")
    add("--host-memory", type=checked(parse_bytes), required=True, help="of a replica, for keys and values: 200GiB")
    add("--tokens-per-s", type=float, required=True, help="that a replica decodes, all rows together")
    add("--prompt-tokens-per-s", type=float, required=True, help="that a replica reads")
    add("--users", type=int, nargs="+", default=[10, 1000, 100_000])
    add("--answer", type=int, default=300, help="tokens of an answer (default: 300)")
    add("--asks", type=float, default=6.0, help="questions an hour of an active user (default: 6)")
    add("--active", type=float, default=0.1, help="share of users who are active (default: 0.1)")
    add("--cached", type=float, default=0.8, help="share of a prompt in the cache, documents kept (default: 0.8)")
    add("--used", type=float, default=0.7, help="share of a GPU's time to plan with (default: 0.7)")
    args = parser.parse_args(argv)
    for name in ("tokens_per_s", "prompt_tokens_per_s", "answer", "asks", "active", "used"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if not 0 <= args.cached <= 1:
        parser.error("--cached is a share, from 0 to 1")
    config = SHAPES[args.model]() if args.model in SHAPES else load_config(args.model, SHAPES)
    shape = model_shape(config, None)
    fit = rows_that_fit(shape, TokenConfig(), None, context=args.context, gpu=args.gpu_memory, host=args.host_memory)
    if fit.offloaded < 1:
        parser.error(f"not even one row of {args.context:,} tokens fits: give more memory")
    given = {name: getattr(args, name) for name in Load.__dataclass_fields__ if name != "rows"}
    load = Load(**given, rows=fit.offloaded)
    print(f"{load.rows} rows of {load.context:,} tokens a GPU; {load.seconds(0):.2f} s of a GPU for a request whose")
    print(f"document is read, {load.seconds(load.cached):.2f} s for one whose document is kept\n")
    print("\n".join(table(load, args.users)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
