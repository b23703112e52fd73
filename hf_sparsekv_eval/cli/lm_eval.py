"""``hf-sparsekv lm-eval``."""

from __future__ import annotations

import importlib.util
import sys

import typer

from hf_sparsekv.cli.output import CommandError


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with `--model sparsekv`; the arguments are its own (`lm-eval --help`)."""
    if importlib.util.find_spec("lm_eval") is None:
        raise CommandError("this needs lm-evaluation-harness: pip install '.[lm-eval]' in a checkout of the project")
    import lm_eval.models  # noqa: F401 (its own types register first)
    from lm_eval.__main__ import cli_evaluate

    from .. import lm_eval_model  # noqa: F401 (registers ours)

    before = sys.argv
    sys.argv = ["lm_eval", *context.args]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
