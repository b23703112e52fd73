"""Output of the commands: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import typer
from rich.console import Console

results = Console(highlight=False, soft_wrap=True)
ALL = 0.9995  # share of the context that is shown as 100.0 %
messages = Console(highlight=False, soft_wrap=True, stderr=True)


@dataclass
class _State:
    debug: bool = False


state = _State()


class CommandError(Exception):
    """Something the user can put right; the message is shown as one line."""


def one_line_errors(command: Callable) -> Callable:
    """Turn any exception of ``command`` into one line on standard error and exit status 1.

    Wrong usage is typer's business and exits with 2. ``--debug`` lets the traceback through.
    """

    @functools.wraps(command)
    def run(*args, **kwargs):
        warnings.showwarning = _show_warning
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            if state.debug:
                raise
            messages.print(f"[red]error:[/] {_escape(_one_line(error))}")
            raise typer.Exit(1) from error

    return run


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, (CommandError, ValueError, OSError, MemoryError, RuntimeError)):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    messages.print(f"[yellow]warning:[/] {_escape(' '.join(str(message).split()))}")


def note(text: str) -> None:
    """A line for people on standard error."""
    messages.print(_escape(text))


def size(n: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"
