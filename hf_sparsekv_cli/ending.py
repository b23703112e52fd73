"""How a command ends when it is interrupted, when its output has no reader, or cannot be written.

Commands, ``--version`` and ``python -m hf_sparsekv`` end the same way. Libraries handle a broken pipe and an interrupt
in ways of their own (typer, rich and transformers do), so neither is left to them.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator

INTERRUPTED = 130  # 128 + SIGINT, as shells say it
UNREAD = 141  # 128 + SIGPIPE: what a shell shows of other tools whose reader has gone


class _Ended(BaseException):
    """Standard output cannot be written. No ``Exception``, so that :func:`ending` alone handles it."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class _Output(io.FileIO):
    """Standard output; the command ends if it cannot be written."""

    def write(self, data, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            raise _Ended(error) from None


class _Messages(io.FileIO):
    """Standard error. Messages that cannot be written are lost: the results are not, and a server goes on."""

    def write(self, data, /) -> int | None:
        try:
            return super().write(data)
        except OSError:
            return len(data)


class _Interrupts:
    """Hears Ctrl-C as Python does, and remembers it: libraries turn it into errors of their own."""

    heard = False

    def __call__(self, number: int, frame: object) -> None:
        self.heard = True
        raise KeyboardInterrupt


_interrupts: list[_Interrupts] = []  # of the command that runs


def interrupted() -> bool:
    """Whether Ctrl-C was pressed: an error that follows is of no interest."""
    return any(one.heard for one in _interrupts)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Run a command in this, and the process ends quietly: with 130 after Ctrl-C, with 141 without a reader."""
    if _interrupts:  # within another one
        yield
        return
    before = sys.stdout, sys.stderr
    _interrupts.append(_Interrupts())
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # or it is not to be heard: nohup, `&`
    if hears:
        signal.signal(signal.SIGINT, _interrupts[0])
    try:
        sys.stdout, sys.stderr = _over(sys.stdout, _Output), _over(sys.stderr, _Messages)
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # or the interpreter does so, too late to say anything
    except _Ended as end:
        _drop_output()
        if isinstance(end.error, BrokenPipeError):
            sys.exit(UNREAD)
        print(f"error: cannot write standard output: {end.error.strerror}", file=sys.stderr)
        sys.exit(1)
    except BaseException as error:
        if interrupted() and not (
            isinstance(error, SystemExit) and not error.code
        ):  # or the command took it as its end
            sys.exit(INTERRUPTED)
        raise
    finally:
        if hears:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _interrupts.clear()
        sys.stdout, sys.stderr = before


def _over(stream, kind: type[io.FileIO]):
    """The stream over a file of this kind; characters that it cannot have are replaced."""
    if type(stream) is not io.TextIOWrapper or os.name != "posix":  # not the process's own
        return stream
    errors = "replace" if stream.errors == "strict" else stream.errors
    stream.flush()
    raw = kind(stream.fileno(), "w", closefd=False)
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _drop_output() -> None:
    """Discard the output left in buffers."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
