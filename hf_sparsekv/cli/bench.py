"""``hf-sparsekv bench``."""

from __future__ import annotations

import enum
import importlib
from typing import Annotated

import torch
import typer

from .output import CommandError, results


class Benchmark(str, enum.Enum):
    """What there is to measure."""

    operator = "operator"
    step = "step"
    generate = "generate"
    offload = "offload"


_ON_A_CPU = (Benchmark.generate, Benchmark.offload)  # the latter in part, and says in which


def bench(
    context: typer.Context,
    what: Annotated[
        Benchmark | None,
        typer.Argument(
            help="operator: the attention of one layer. step: whole decode steps, alone and through generate(), beside "
            "their baselines. generate: a model and a cache as people use them, also on a CPU. offload: what it costs "
            "to keep blocks in host memory, in parts.",
            show_default=False,
        ),
    ] = None,
    known: Annotated[bool, typer.Option("--list", help="Show the known model shapes and variants.")] = False,
    asks_help: Annotated[
        bool, typer.Option("--help", "-h", help="Show this, or a benchmark's options: `bench step --help`.")
    ] = False,
) -> None:
    """Measure on this machine; appends rows to benchmarks/results. Options after the benchmark's name are its own."""
    if known:
        _list()
        return
    if what is None:
        results.print(context.get_help(), markup=False)
        raise typer.Exit(0 if asks_help else 2)
    if not (torch.cuda.is_available() or asks_help or what in _ON_A_CPU):
        raise CommandError(f"bench {what.value} needs a CUDA device; `hf-sparsekv doctor` shows what there is")
    module = importlib.import_module(f"..benchmark.{what.value}", __package__)
    if status := module.main([*context.args, *["--help"] * asks_help]):
        raise typer.Exit(status)


def _list() -> None:
    """Print shapes with their sizes, and variants."""
    from ..benchmark.baselines import VARIANTS
    from ..benchmark.shapes import SHAPES, head_dim, latent_dims, windows

    results.print("model shapes (random weights); any other model by its name or path")
    for name, make in SHAPES.items():
        config = make()
        kinds = windows(config)
        sliding = sum(window is not None for window in kinds)
        text = f"{len(kinds)} layers, {config.num_attention_heads} query and {config.num_key_value_heads} KV heads"
        text += f" of {head_dim(config)}"
        if latent := latent_dims(config):
            text = f"{len(kinds)} layers, {config.num_attention_heads} query heads over latents of {latent[0]}"
            text += f" + {latent[1]} (MLA)"
        if sliding:
            text += f", {sliding} layers slide over {config.sliding_window} tokens"
        results.print(f"  {name:18} {text}")
    results.print("variants of step; caches of generate (all but sdpa_best); ours also with +offload in generate")
    for variant in VARIANTS.values():
        results.print(f"  {variant.name:18} {variant.about}")
