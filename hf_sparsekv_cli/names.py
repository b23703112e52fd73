"""The command's name and help, and what is said of wrong usage."""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import dataclass

import typer
from typer.core import TyperGroup

from .ending import interrupted

NAME = "hf-sparsekv"
HELP = "Sparse, offloadable KV caches for Hugging Face Transformers."


@dataclass
class State:
    """Options of the whole command line."""

    debug: bool = False


state = State()

# The class in several releases of typer, some with a click of their own.
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
            if not interrupted():
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
    """Options or commands that resemble unknown words of the command line; None: none, or the message names them."""
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
