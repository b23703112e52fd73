"""The commands' arguments, read from a file: help and wrong usage are told before torch is imported.

Importing anything of ``hf_sparsekv`` imports torch and transformers, which takes seconds. The commands declare their
arguments there, beside what they do. ``arguments.json`` holds the same declarations as data, and a test keeps them the
same (``python tests/helpers/command_arguments.py`` writes them again).
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from . import elsewhere
from .checks import check
from .names import HELP, NAME, Group

FILE = Path(__file__).with_name("arguments.json")
KINDS = {"str": str, "int": int, "float": float, "bool": bool, "path": Path}


@functools.lru_cache(1)
def data() -> dict[str, Any]:
    """The file's content: ``commands``, and ``facts`` about the names that options take."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def command(words: Sequence[str]) -> dict[str, Any]:
    """What the file says of a command, by its words: ``["eval", "needle"]``."""
    found = data()
    for word in words:
        found = found["commands"][word]
    return found


def app(run: Callable[[], None] = lambda: None) -> typer.Typer:
    """The whole command line; ``run`` is called once the arguments are known to be right."""
    made = typer.Typer(name=NAME, cls=Group, help=HELP, no_args_is_help=True, pretty_exceptions_enable=False)

    @made.callback()
    def _common(
        debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
        version: Annotated[
            bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        pass

    _add(made, (), run)
    return made


def _version(value: bool) -> None:
    if value:
        from . import version

        typer.echo(f"{NAME} {version()}")
        raise typer.Exit


def _add(group: typer.Typer, words: tuple[str, ...], run: Callable[[], None]) -> None:
    for name, about in command(words)["commands"].items():
        if "commands" in about:
            inner = typer.Typer(name=name, help=about["help"], no_args_is_help=True)
            _add(inner, (*words, name), run)
            group.add_typer(inner)
        else:
            function = _command((*words, name), about, run)
            group.command(name, help=about["help"], context_settings=about.get("context"))(function)


def _command(words: tuple[str, ...], about: dict[str, Any], run: Callable[[], None]) -> Callable[..., None]:
    def call(**given: Any) -> None:
        check(" ".join(words), given, data()["facts"])
        run()

    if words == ("bench",):
        return elsewhere.bench
    if "context" in about:  # the arguments belong to lm-eval
        return lambda: _to_lm_eval(run)
    keyword, none = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(one["name"], keyword, annotation=_type(one), default=one.get("default", none))
            for one in about["parameters"]
        ]
    )
    return call


def _to_lm_eval(run: Callable[[], None]) -> None:
    elsewhere.needs_lm_eval()
    run()


def _type(parameter: dict[str, Any]) -> Any:
    """A parameter's type, with what typer is told of it."""
    if parameter["kind"] == "choice":
        choices = {name: name for name in parameter["choices"]}
        kind: Any = enum.Enum("Choice", choices, type=str)
    else:
        kind = KINDS[parameter["kind"]]
    given = dict(parameter["given"])
    for name in ("parser", "callback"):
        if name in given:
            module, function = given[name].split(":")
            given[name] = getattr(import_module(module), function)
    make = typer.Argument if parameter["info"] == "argument" else typer.Option
    return Annotated[list[kind] if parameter.get("several") else kind, make(*parameter.get("names", ()), **given)]
