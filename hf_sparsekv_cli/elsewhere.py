"""Commands whose arguments belong to another program: what can be told of them before torch is imported."""

from __future__ import annotations

from importlib.util import find_spec

import typer

from .command import do


def _end(message: str, status: int) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)


def bench(context: typer.Context) -> None:
    """Moved: `python -m benchmarks`, in a checkout of the repository."""
    given = " ".join(["python -m benchmarks", *context.args])
    moved = "the benchmarks are no longer part of the package: in a checkout of the repository, run"
    _end(f"{moved}\n  {given}", 2)


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with `--model sparsekv`; the arguments are its own (`lm-eval --help`)."""
    if find_spec("lm_eval") is None:
        _end("this needs lm-evaluation-harness: pip install '.[lm-eval]' in a checkout of the project", 1)
    do("hf_sparsekv_eval.cli.lm_eval:lm_eval", {"arguments": context.args})
