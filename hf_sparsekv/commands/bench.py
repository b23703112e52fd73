"""``hf-sparsekv bench``."""

from __future__ import annotations

import enum
import importlib
from typing import Annotated

import torch
import typer

from .output import CommandError


class Benchmark(str, enum.Enum):
    """What there is to measure."""

    operator = "operator"
    step = "step"


def bench(
    context: typer.Context,
    what: Annotated[
        Benchmark,
        typer.Argument(help="operator: the attention of one layer. step: whole decode steps, also through generate()."),
    ],
) -> None:
    """Measure on this GPU; appends rows to benchmarks/results. `bench operator --help` shows a benchmark's options."""
    asks_help = any(arg in ("-h", "--help") for arg in context.args)
    if not torch.cuda.is_available() and not asks_help:
        raise CommandError("benchmarks need a CUDA device; `hf-sparsekv doctor` shows what there is")
    importlib.import_module(f"..benchmark.{what.value}", __package__).main(context.args)
