"""Output of the commands: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn

from hf_sparsekv_cli.ending import interrupted
from hf_sparsekv_cli.names import state

ALL = 0.9995  # share of the context that is shown as 100.0 %
SECONDS = 10  # between two lines of progress where there is no terminal


class _Line:
    """In place of a spinner where there is no terminal: each new text is a line."""

    def __init__(self, console: Console, text: str) -> None:
        self._console = console
        self._text: str | None = None
        self.update(text)

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, text: str) -> None:
        if text != self._text:
            self._console.print(text, markup=False)
            self._text = text

    def stop(self) -> None:
        pass


class _Messages(Console):
    """Standard error: what is going on is a spinner or a bar on a terminal, and lines in a file or a pipe."""

    def status(self, status, **kwargs):
        return super().status(status, **kwargs) if self.is_terminal else _Line(self, str(status))

    @contextmanager
    def progress(self, title: str, total: float, *columns: ProgressColumn | str) -> Iterator[Callable[..., None]]:
        """A bar; the function it gives takes what has been done since, and perhaps a new title."""
        if not self.is_terminal:
            yield _Share(self, title, total)
            return
        with Progress(*columns, console=self, transient=True) as bar:
            task = bar.add_task(title, total=total)

            def advance(done: float, title: str | None = None) -> None:
                bar.update(task, advance=done, description=title)

            yield advance


class _Share:
    """In place of a bar where there is no terminal: a line at a new title, and every ten seconds."""

    def __init__(self, console: Console, title: str, total: float) -> None:
        self._console, self._title, self._total = console, title, total
        self._done, self._told = 0.0, time.monotonic()
        console.print(title, markup=False)

    def __call__(self, done: float, title: str | None = None) -> None:
        self._done += done
        fresh = title is not None and title != self._title
        self._title = title if title is not None else self._title
        if fresh or time.monotonic() - self._told >= SECONDS:
            share = self._done / self._total if self._total else 1
            self._console.print(f"{self._title}: {share:.0%}", markup=False)
            self._told = time.monotonic()


results = Console(highlight=False, soft_wrap=True)
messages = _Messages(highlight=False, soft_wrap=True, stderr=True)


class CommandError(Exception):
    """Something the user can put right; the message is shown as one line."""


def one_line_errors(command: Callable, spelled: Callable[[str], str] = str) -> Callable:
    """Turn any exception of ``command`` into one line on standard error and exit status 1.

    Wrong usage is typer's business and exits with 2. ``--debug`` lets the traceback through. ``spelled`` writes errors
    and warnings with the names of the command's options.
    """

    @functools.wraps(command)
    def run(*args, **kwargs):
        warnings.showwarning = functools.partial(_show_warning, spelled)
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            if interrupted():  # a library has made another error of it
                raise KeyboardInterrupt from error
            if state.debug:
                raise
            messages.print(f"[red]error:[/] {_escape(spelled(_one_line(error)))}")
            raise typer.Exit(1) from error

    return run


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, (CommandError, ValueError, OSError, MemoryError, RuntimeError)):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


def _show_warning(spelled, message, category, filename, lineno, file=None, line=None) -> None:
    messages.print(f"[yellow]warning:[/] {_escape(spelled(' '.join(str(message).split())))}")


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
