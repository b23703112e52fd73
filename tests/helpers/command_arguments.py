"""The arguments of all commands as data, as ``hf_sparsekv_cli/arguments.json`` holds them.

``python tests/helpers/command_arguments.py`` writes that file again.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import sys
import types
import typing
from pathlib import Path

import typer

from hf_sparsekv_cli import arguments

CALLS = ("parser", "callback")  # attributes that are functions of hf_sparsekv_cli, named in the data
KINDS = {str: "str", int: "int", float: "float", bool: "bool", Path: "path"}
MADE_OF = {
    kind: inspect.signature(made).parameters for kind, made in (("option", typer.Option), ("argument", typer.Argument))
}
USUAL = {"option": vars(typer.Option()), "argument": vars(typer.Argument())}


def described(app: typer.Typer) -> dict:
    """A command with subcommands, as :mod:`hf_sparsekv_cli.arguments` reads it."""
    found = {}
    for info in app.registered_commands:
        name = info.name or info.callback.__name__.replace("_", "-")
        found[name] = {"help": inspect.getdoc(info.callback), "parameters": list(parameters(info.callback))}
        if info.context_settings:
            found[name] = {**found[name], "context": dict(info.context_settings)}
    for group in app.registered_groups:
        inner = group.typer_instance
        found[inner.info.name] = {"help": inner.info.help, "commands": described(inner)}
    return found


def parameters(command) -> typing.Iterator[dict]:
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.annotation is typer.Context:
            continue
        kind, info = parameter.annotation, None
        if typing.get_origin(kind) is typing.Annotated:
            kind, info = typing.get_args(kind)
        yield {"name": parameter.name, **of_type(kind), **default(parameter), **of_info(info)}


def of_type(kind) -> dict:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = [one for one in typing.get_args(kind) if one is not type(None)]
    several = typing.get_origin(kind) is list
    if several:
        (kind,) = typing.get_args(kind)
    if issubclass(kind, enum.Enum):
        found = {"kind": "choice", "choices": [one.value for one in kind]}
    else:
        found = {"kind": KINDS[kind]}
    return {**found, "several": True} if several else found


def default(parameter) -> dict:
    value = parameter.default
    if value is inspect.Parameter.empty:
        return {}
    value = value.value if isinstance(value, enum.Enum) else list(value) if isinstance(value, tuple) else value
    return {"default": value}


def of_info(info) -> dict:
    if info is None:
        return {"info": "option", "given": {}}
    kind = "argument" if isinstance(info, typer.models.ArgumentInfo) else "option"
    given = {
        name: getattr(info, name)
        for name, usual in USUAL[kind].items()
        if name not in ("default", "param_decls") and getattr(info, name) != usual and name in MADE_OF[kind]
    }
    for name in CALLS:
        if name in given:
            function = given[name]
            assert getattr(sys.modules[function.__module__], function.__name__) is function
            assert function.__module__.startswith("hf_sparsekv_cli."), f"{function} would import torch"
            given[name] = f"{function.__module__}:{function.__name__}"
    names = [] if info.default is ... else [info.default]
    names += info.param_decls or ()
    return {"info": kind, **({"names": names} if names else {}), "given": given}


def facts() -> dict:
    """Names that values of options are compared with."""
    from hf_sparsekv.policies.ahead.predictive_config import PREDICTORS
    from hf_sparsekv.policies.registry import called
    from hf_sparsekv_eval import long_tasks, longbench, ruler, ruler_paper, ruler_probe, whole_table
    from hf_sparsekv_eval.cache_specs import known

    return {
        "methods": {
            name: {
                "config": method.config.__name__,
                "fields": _fields(method.config),
                "presets": list(method.config.PRESETS),
            }
            for name, method in called().items()
            if _ours(method)
        },
        "specs": {
            name: sorted(
                {*(field.name for field in dataclasses.fields(method.config)), "offload", "kv_dtype", "preset"}
            )
            for name, (method, _) in known().items()
            if _ours(method)
        },
        "predictors": list(PREDICTORS),
        "families": list(ruler.FAMILIES),
        "probe families": list(ruler_probe.FAMILIES),
        "paper families": list(ruler_paper.FAMILIES),
        "long tasks": list(long_tasks.FAMILIES),
        "longbench tasks": list(longbench.tasks()),
        "parts": list(whole_table.PARTS),
    }


def _ours(method) -> bool:
    """Not one that a test has registered."""
    return method.config.__module__.startswith("hf_sparsekv")


def _fields(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def whole() -> str:
    from hf_sparsekv.cli.app import app

    return _lines({"commands": described(app), "facts": facts()}) + "\n"


def _lines(value: object, depth: int = 0) -> str:
    """JSON with a parameter, or a fact, a line."""
    inner = "\n" + " " * (depth + 1)
    if isinstance(value, dict) and "name" not in value and any(isinstance(one, dict | list) for one in value.values()):
        made = [f"{json.dumps(name)}: {_lines(one, depth + 1)}" for name, one in value.items()]
        return "{" + inner + f",{inner}".join(made) + "\n" + " " * depth + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + inner + f",{inner}".join(map(json.dumps, value)) + "\n" + " " * depth + "]"
    return json.dumps(value)


if __name__ == "__main__":
    arguments.FILE.write_text(whole(), encoding="utf-8")
