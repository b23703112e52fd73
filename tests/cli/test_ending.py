"""How a command's process ends: interrupted, unread, or with output that cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_sparsekv.cli import output
from hf_sparsekv_cli.ending import ending, interrupted
from hf_sparsekv_eval.cli import evaluate_run

ROOT = Path(__file__).parents[2]
BODY = """
import os, signal, sys
from hf_sparsekv_cli.ending import ending
with ending():
    {}
"""
MAIN = "import sys, hf_sparsekv_cli; sys.argv = ['hf-sparsekv', {!r}]; hf_sparsekv_cli.main()"
RICH = "from rich.console import Console; Console().print('result')"
HANDLED = """
    try:
        print('result', flush=True)
    except Exception:
        print('a library goes on')
"""
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"
CONVERTED = f"""
    try:
        {INTERRUPT}
    except KeyboardInterrupt as error:
        raise RuntimeError('could not import') from error
"""
TAKEN = f"""
    try:
        {INTERRUPT}
    except KeyboardInterrupt:
        print('result')
"""


def end(code: str, stdout=subprocess.PIPE, stderr=subprocess.PIPE, options=(), **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *options, "-c", code], stdout=stdout, stderr=stderr, env=env, timeout=120)


@pytest.fixture(autouse=True)
def heeded():
    """Interrupts: tests that a shell runs in the background, and all that these start, would ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def unread():
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


PRINTS = {
    "print": BODY.format("print('result')"),
    "flushed": BODY.format("print('result', flush=True)"),
    "handled by a library": BODY.format(HANDLED),
    "rich": BODY.format(RICH),
    "--version": MAIN.format("--version"),
    "--help": MAIN.format("--help"),
}


@pytest.mark.parametrize("code", PRINTS.values(), ids=PRINTS)
def test_output_that_nobody_reads_ends_the_command_as_other_tools(code, unread):
    done = end(code, stdout=unread)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("code", PRINTS.values(), ids=PRINTS)
def test_output_that_cannot_be_written_is_one_line(code):
    with open("/dev/full", "wb") as full:
        done = end(code, stdout=full)
    assert (done.returncode, done.stderr) == (1, b"error: cannot write standard output: No space left on device\n")


def test_unbuffered_output(unread):
    assert end(PRINTS["print"], options=["-u"]).stdout == b"result\n"
    assert end(PRINTS["print"], stdout=unread, options=["-u"]).returncode == 141


def test_messages_that_nobody_reads_are_lost_and_results_are_not(unread):
    done = end(BODY.format("print('progress', file=sys.stderr, flush=True); print('result')"), stderr=unread)
    assert (done.returncode, done.stdout) == (0, b"result\n")


@pytest.mark.parametrize(
    ("encoding", "written"), [("ascii", b"a?b?c\n"), ("latin-1", b"a\xb7b\xd7c\n"), ("ascii:strict", b"a?b?c\n")]
)
def test_characters_that_the_output_cannot_have_are_replaced(encoding, written):
    done = end(BODY.format(r"print('a\xb7b\xd7c')"), PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout, done.stderr) == (0, written, b"")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (INTERRUPT, 130),
        (CONVERTED, 130),
        (TAKEN, 0),  # as the command wants it: a server drains
        ("raise SystemExit(2)", 2),
    ],
)
def test_an_interrupt_ends_the_command_quietly(body, status):
    done = end(BODY.format(body))
    assert (done.returncode, done.stderr) == (status, b"")


def test_a_command_in_the_background_hears_no_interrupt():
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + BODY.format(f"{INTERRUPT}; print('on')")
    done = end(code)
    assert (done.returncode, done.stdout) == (0, b"on\n")


def test_an_interrupt_while_the_commands_are_imported_is_quiet():
    """The signal comes with the first import of what is heavy."""
    code = f"""
import builtins, os, signal, sys
import hf_sparsekv_cli
before = builtins.__import__
def first(name, *args, **kwargs):
    if name.partition(".")[0] in {{"typer", "torch"}}:
        {INTERRUPT}
    return before(name, *args, **kwargs)
builtins.__import__ = first
sys.argv = ["hf-sparsekv", "doctor"]
hf_sparsekv_cli.main()
"""
    done = end(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_an_error_that_an_interrupt_becomes_is_not_told(capsys):
    def command():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ImportError("half a module") from error

    with pytest.raises(SystemExit) as end, ending(), ending():
        output.one_line_errors(command)()
    assert end.value.code == 130 and not interrupted()
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_run_found_is_kept_before_it_is_printed(monkeypatch, tmp_path):
    """Printing ends the command if nobody reads it."""
    run = object.__new__(evaluate_run.Run)
    run.title = run.short = "tiny"
    run.rows = tmp_path / "rows.csv"
    run.results = SimpleNamespace(write=lambda *args: "table", rows=lambda *args: ["a row"])
    kept = []
    monkeypatch.setattr(evaluate_run, "append_rows", lambda path, rows: kept.append((path, rows)))

    def unread(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate_run.results, "print", unread)
    with pytest.raises(KeyboardInterrupt):
        run.report(())
    assert kept == [(run.rows, ["a row"])]
