"""The ``hf-sparsekv`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from . import commands, elsewhere, evaluate, version
from .names import HELP, NAME, Group, state
from .serve import serve

app = typer.Typer(
    name=NAME,
    cls=Group,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"{NAME} {version()}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    state.debug = debug


for _command in (
    commands.generate,
    serve,
    commands.plan,
    commands.calibrate,
    commands.calibrate_device,
    commands.doctor,
    commands.fetch,
    commands.demo,
):
    app.command()(_command)
app.add_typer(evaluate.app)
# Arguments after this name belong to lm-eval.
_own = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command("lm-eval", context_settings=_own)(elsewhere.lm_eval)
