"""A command whose arguments belong to another program: what can be told of them before torch is imported."""

from __future__ import annotations

from importlib.util import find_spec

import typer

from .command import do


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with `--model sparsekv`; the arguments are its own (`lm-eval --help`)."""
    if find_spec("lm_eval") is None:
        needed = "this needs lm-evaluation-harness: pip install '.[lm-eval]' in a checkout of the project"
        typer.echo(f"error: {needed}", err=True)
        raise typer.Exit(1)
    do("hf_sparsekv_eval.cli.lm_eval:lm_eval", {"arguments": context.args})
