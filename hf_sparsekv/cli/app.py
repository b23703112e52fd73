"""The ``hf-sparsekv`` command. Each subcommand is a module of :mod:`hf_sparsekv.cli`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_sparsekv_cli.elsewhere import bench
from hf_sparsekv_cli.ending import ending
from hf_sparsekv_cli.names import HELP, NAME, Group
from hf_sparsekv_eval.cli.evaluate import app as evaluate
from hf_sparsekv_eval.cli.lm_eval import lm_eval
from hf_sparsekv_serve.cli.serve import serve

from ..version import __version__
from . import output
from .calibrate import calibrate
from .calibrate_device import calibrate_device
from .demo import demo
from .doctor import doctor
from .fetch import fetch
from .generate import generate
from .options import spelling
from .plan import plan

app = typer.Typer(
    name=NAME,
    cls=Group,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    output.state.debug = debug


for command in (generate, serve, plan, calibrate, calibrate_device, doctor, fetch, demo):
    app.command()(output.one_line_errors(command, spelling(command)))
app.add_typer(evaluate)
# Arguments after these names belong to the benchmark or to lm-eval.
for command, name in ((bench, "bench"), (lm_eval, "lm-eval")):
    own = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(name, context_settings=own)(output.one_line_errors(command))


def main() -> None:
    """Entry point of the console script."""
    with ending():
        app(prog_name=NAME)
