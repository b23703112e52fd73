"""Commands: declared without torch, checked, and only then done by a function that needs it.

The evaluation declares its commands in another file.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import get_type_hints

from .options import spelling


def command(place: str) -> Callable[[Callable], Callable]:
    """Make a declaration a command: its body checks the arguments, then the function at ``place`` gets them.

    Args:
        place: ``"module:function"``, imported when the arguments are known to be right. The function has the same
            parameters. A parameter whose type is a dataclass stands for the dataclass's fields.
    """

    def decorate(declaration: Callable) -> Callable:
        declared = inspect.signature(declaration, eval_str=True)
        groups = {one.name: one.annotation for one in declared.parameters.values() if is_dataclass(one.annotation)}

        @functools.wraps(declaration)
        def run(**given: object) -> None:
            for name, group in groups.items():
                given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
            declaration(**given)
            do(place, given, spelling(run))

        run.__signature__ = declared.replace(parameters=list(_flat(declared, groups)))  # type: ignore[attr-defined]
        return run

    return decorate


def _flat(declared: inspect.Signature, groups: dict[str, type]):
    """The parameters of a command line: those of groups come last."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    for one in declared.parameters.values():
        if one.name not in groups:
            yield one.replace(kind=keyword)
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            yield inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])


def do(place: str, given: dict, spelled: Callable[[str], str] = str) -> None:
    """Call the function at ``place``; any error of it is told in one line."""
    if sys.stderr is None or not sys.stderr.isatty():  # the bars of transformers would fill a log; ours are lines there
        os.environ.setdefault("TQDM_DISABLE", "1")
    output = import_module("hf_sparsekv.cli.output")
    module, _, function = place.partition(":")
    output.one_line_errors(getattr(import_module(module), function), spelled)(**given)
