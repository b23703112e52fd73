"""Commands whose arguments belong to another program: what can be told of them before torch is imported.

Apart from :mod:`.arguments`, which knows the arguments of all others from a file.
"""

from __future__ import annotations

from importlib.util import find_spec

import typer


def _end(message: str, status: int) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(status)


def bench(context: typer.Context) -> None:
    """Moved: `python -m benchmarks`, in a checkout of the repository."""
    given = " ".join(["python -m benchmarks", *context.args])
    moved = "the benchmarks are no longer part of the package: in a checkout of the repository, run"
    _end(f"{moved}\n  {given}", 2)


def needs_lm_eval() -> None:
    """End with what to install, where lm-evaluation-harness is missing."""
    if find_spec("lm_eval") is None:
        _end("this needs lm-evaluation-harness: pip install '.[lm-eval]' in a checkout of the project", 1)
