"""``hf-sparsekv bench``, for one release: it says where the benchmarks are now."""

from __future__ import annotations

import typer

from .output import messages


def bench(context: typer.Context) -> None:
    """Moved: `python -m benchmarks`, in a checkout of the repository."""
    given = " ".join(["python -m benchmarks", *context.args])
    messages.print(
        f"error: the benchmarks are no longer part of the package: in a checkout of the repository, run\n  {given}",
        markup=False,
        soft_wrap=True,
    )
    raise typer.Exit(2)
