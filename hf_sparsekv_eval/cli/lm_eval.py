"""``hf-sparsekv lm-eval``."""

from __future__ import annotations

import sys

import typer

from hf_sparsekv_cli.elsewhere import needs_lm_eval


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with `--model sparsekv`; the arguments are its own (`lm-eval --help`)."""
    needs_lm_eval()
    import lm_eval.models  # noqa: F401 (its own types register first)
    from lm_eval.__main__ import cli_evaluate

    from .. import lm_eval_model  # noqa: F401 (registers ours)

    before = sys.argv
    sys.argv = ["lm_eval", *context.args]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
