"""``hf-sparsekv lm-eval``."""

from __future__ import annotations

import sys


def lm_eval(arguments: list[str]) -> None:
    """Run lm-evaluation-harness with `--model sparsekv`; the arguments are its own (`lm-eval --help`)."""
    import lm_eval.models  # noqa: F401 (its own types register first)
    from lm_eval.__main__ import cli_evaluate

    from .. import lm_eval_model  # noqa: F401 (registers ours)

    before = sys.argv
    sys.argv = ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
