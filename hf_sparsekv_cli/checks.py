"""Wrong usage that several options show together, or the names that there are: found before torch is imported.

The commands call the functions for pairs of options, too. Single values of a cache's options are checked by its
configuration, which needs torch; :data:`_VALUES` says the same here, and a test compares the two. What only a whole
configuration or a model shows (a budget that does not fit the blocks) is told by them, later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import typer

from . import values
from .values import guess

DENSE = "dense"
SEEDS = -(2**63), 2**64 - 1  # that torch takes


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise typer.BadParameter(message)


def spell(name: str) -> str:
    """A field's name as the command line spells it."""
    return "--" + name.replace("_", "-")


# ---------------------------------------------------------------------- of several options


def compared(cache: str, compare: str | None) -> None:
    """``generate --cache`` and ``--compare``."""
    _require(compare is None or compare != cache, f"--compare {_text(compare)} is the cache itself: name the other one")
    _require(
        compare is None or DENSE in (cache, compare),
        "--compare takes dense here: options of two sparse caches would be mixed up",
    )


def seeded(seed: int | None, temperature: float) -> None:
    """``generate --seed`` and ``--temperature``."""
    _require(math.isfinite(temperature), f"--temperature must be a finite number, got {temperature}")
    _require(seed is None or temperature > 0, "--seed has no meaning without a --temperature above 0")
    low, high = SEEDS
    _require(seed is None or low <= seed <= high, f"--seed must have 64 bits, from {low} to {high}, got {seed}")


def exact_mode(exact: bool, sparse: bool, offload: bool | None, kv_dtype: str | None) -> None:
    """``generate --exact``."""
    _require(not exact or sparse, "--exact has no meaning with --cache dense: it is full attention already")
    _require(
        not exact or not (offload or kv_dtype is not None),
        "--exact reads all keys and values in each verification, and would read them over the link: leave --offload "
        "and --kv-dtype out",
    )


def exact_requests(given: Mapping[str, Any]) -> None:
    """``serve --exact``."""
    offload = given["offload"] or given["device_kv"] is not None or given["host_kv"] is not None
    exact_mode(given["exact"], True, offload, given["kv_dtype"])
    _require(
        not (given["exact"] and given["tensor_parallel"]),
        "--exact is not for tensor parallel models: leave --tensor-parallel out",
    )


def prompted(prompt: object, prompt_file: object, demo: bool) -> None:
    """``generate`` reads one text."""
    given = sum((prompt is not None, prompt_file is not None, demo))
    _require(given == 1, "give either --prompt or --prompt-file, or --demo, which has a text of its own")


def served(cache: str, max_length: int | None, api_key: str | None, model_id: str | None) -> None:
    """``serve``."""
    _require(cache != DENSE, "serve has sparse caches only: leave --cache dense out")
    _require(max_length is None, "--max-length has no meaning here: --context says how long requests may be")
    _require(
        api_key is None or bool(api_key.strip()),
        "--api-key (or HF_SPARSEKV_API_KEY) is empty: give a key, or leave it out",
    )
    _require(model_id is None or bool(model_id.strip()), "--model-id is empty: give a name, or leave it out")


def sizes(device_kv: str | None, host_kv: str | None, max_body: str) -> tuple[int | None, int | None, int]:
    """``serve``'s sizes in bytes."""
    memory = {"--device-kv": device_kv, "--host-kv": host_kv}
    device, host = (None if given is None else values.memory(name, given) for name, given in memory.items())
    body = values.memory("--max-body", max_body, 1000, "MiB")
    _require(body > 0, "--max-body is nothing: no request would be taken")
    return device, host, body


def origins(given: Sequence[str] | None) -> None:
    """``serve --cors-origin``."""
    for one in given or ():
        _require(
            one == "*" or bool(re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", one)),
            f"{one!r} is no origin of web pages: give it as https://chat.example.org, or '*' for all",
        )


def host_kept(offload: bool | None, device_kv: str | None, host_kv: str | None) -> None:
    """Sizes of memory for blocks that stay on the device."""
    name = "--device-kv" if device_kv is not None else "--host-kv" if host_kv is not None else None
    _require(
        name is None or offload is not False,
        f"{name} is for keys and values in host memory: leave --no-offload out",
    )


def coded(kv_dtype: str | None, offload: bool | None) -> None:
    """``--kv-dtype`` of blocks that stay on the device."""
    _require(
        kv_dtype is None or offload is not False,
        "--kv-dtype is of keys and values in host memory: leave --no-offload out",
    )


def planned(cache: str, kinds: Sequence[str]) -> None:
    """``plan --cache``."""
    sparse = ", ".join(kind for kind in kinds if kind != DENSE)
    _require(cache != DENSE, f"plan compares a sparse cache with the dense one: --cache takes {sparse} here")


def paper_tasks(families: str | None, data: object) -> None:
    """``eval ruler``: tasks that are made from data which this package does not have."""
    asked = set((families or "").replace(" ", "").split(","))
    _require(
        bool(data) or not asked & {"qa_1", "qa_2"},
        "qa_1 and qa_2 are made from RULER's own data: give --data DIRECTORY",
    )


def longbench_part(only: str | None, wanted: Sequence[str], longbench: str | None) -> None:
    """``eval all --longbench`` and ``--only``."""
    named = only is not None and "longbench" in wanted
    _require(
        not named or longbench is not None,
        "LongBench's data are not part of this package: give --longbench DATASET_OR_DIRECTORY",
    )
    _require(
        only is None or named or longbench is None,
        "--longbench is given, but --only leaves it out: add longbench to it",
    )


def documents(documents: object, column: str | None, join: bool, text_file: object) -> None:
    """``--documents`` of an evaluation, and the options that belong to it."""
    option = "--column" if column is not None else "--join" if join else None
    _require(documents is not None or option is None, f"{option} is of --documents: give that, too")
    _require(documents is None or text_file is None, "--documents and --text-file are both given: take one of them")


# ---------------------------------------------------------------------- of a cache


def _positive(name: str, value: Any) -> str | None:
    return None if value > 0 else f"{name} must be a positive integer, got {value!r}"


def _even(name: str, value: Any) -> str | None:
    return _positive(name, value) or (None if value % 2 == 0 else f"{name} must be even, got {value}")


def _not_negative(name: str, value: Any) -> str | None:
    return None if value >= 0 else f"{name} must be an integer >= 0, got {value!r}"


def _block(name: str, value: Any) -> str | None:
    if wrong := _positive(name, value):
        return wrong
    if value & (value - 1):
        return f"{name} must be a power of two, got {value}"
    return None if 16 <= value <= 128 else f"{name} must lie in [16, 128], got {value}"


def _window(name: str, value: Any) -> str | None:
    if wrong := _not_negative(name, value):
        return wrong
    return None if value else f"{name} must be at least 1: the newest token is always attended"


def _share(name: str, value: Any) -> str | None:
    return None if 0 < value <= 1 else f"{name} must lie in (0, 1], got {value!r}"


def _cache_rank(name: str, value: str) -> str | None:
    if value in ("stream", "host") or re.fullmatch(r"[a-z]+(:\d+)?", value):
        return None
    return f"{name} must be 'stream', 'host', a device such as 'cuda:1' or None, got {value!r}"


_VALUES: dict[str, Callable[[str, Any], str | None]] = {
    "token_budget": _positive,
    "mass": _share,
    "num_blocks": _positive,
    "block_size": _block,
    "start_length": _not_negative,
    "cache_rank": _cache_rank,
    "sinks": _not_negative,
    "window": _window,
    "dense_layers": _not_negative,
    "label_channels": _even,
    "max_length": _positive,
}


def cache_options(kind: str, given: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Options that describe a sparse cache: those that its kind has, with values that they may have."""
    methods = facts["methods"]
    known = {field for method in methods.values() for field in method["fields"]}
    named = {name: value for name, value in given.items() if name in known and value is not None}
    if kind == DENSE:
        for name in (*named, "preset", "kv_dtype"):
            _require(given.get(name) is None, f"{spell(name)} has no meaning without a sparse cache")
        if (offload := given.get("offload")) is not None:
            raise typer.BadParameter(f"--{'' if offload else 'no-'}offload has no meaning without a sparse cache")
        return
    method = methods[kind]
    for name in named:
        _require(name in method["fields"], f"{spell(name)} has no meaning with --cache {kind}")
    preset, presets = given.get("preset"), method["presets"]
    offered = ", ".join(map(repr, presets)) or "none"
    _require(
        preset is None or preset in presets,
        f"{method['config']} has no preset {preset!r}{guess(str(preset), presets)}; it has {offered}",
    )
    for name, value in named.items():
        if name in _VALUES and (wrong := _VALUES[name](spell(name), value)):
            raise typer.BadParameter(wrong)
    predictor, predictors = named.get("predictor"), facts["predictors"]
    _require(
        predictor is None or predictor in predictors,
        f"--predictor must be one of {', '.join(map(repr, predictors))}{guess(str(predictor), predictors)}, "
        f"got {predictor!r}",
    )
    coded(given.get("kv_dtype"), given.get("offload"))


def specs(given: Sequence[str], facts: Mapping[str, Any]) -> None:
    """``--cache`` of an evaluation: names of methods, and of their options."""
    known = facts["specs"]
    for spec in map(str.strip, given):
        if spec.startswith("{") or spec.endswith((".yaml", ".yml")):
            continue
        method, _, rest = spec.partition(":")
        about = f"cache {spec!r}"
        hint = guess("full" if method == DENSE else method, ("full", *known))
        _require(
            method in known or method == "full",
            f"{about}: unknown method {method!r}{hint}; known: {', '.join(('full', *known))}",
        )
        _require(method != "full" or not rest, f"{about}: full attention takes no options")
        there = known.get(method, [])
        for part in rest.split(",") if rest else ():
            option, equals, _ = part.partition("=")
            option = option.strip()
            _require(bool(equals and option), f"{about}: write options as name=value, got {part!r}")
            _require(
                option in there,
                f"{about}: {method} has no option {option!r}{guess(option, there)}; it has {', '.join(there)}",
            )
    for spec in given:
        _require(list(given).count(spec) == 1, f"cache {spec!r} is given twice")


# ---------------------------------------------------------------------- of a command


def check(command: str, given: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise BadParameter for what is wrong about the arguments of a command.

    Args:
        command: its words, as ``"eval needle"``.
        given: its arguments by name.
        facts: of ``arguments.json``.
    """
    given = {name: _text(value) for name, value in given.items()}
    if "device" in given and command != "demo":
        values.check_device(given["device"])
    if command == "generate":
        compared(given["cache"], given["compare"])
        sparse = [kind for kind in (given["cache"], given["compare"]) if kind not in (None, DENSE)]
        cache_options(sparse[0] if sparse else DENSE, given, facts)
        exact_mode(given["exact"], bool(sparse), given["offload"], given["kv_dtype"])
        seeded(given["seed"], given["temperature"])
        prompted(given["prompt"], given["prompt_file"], given["demo"])
    elif command == "serve":
        served(given["cache"], given["max_length"], given["api_key"], given["model_id"])
        cache_options(given["cache"], given, facts)
        host_kept(given["offload"], given["device_kv"], given["host_kv"])
        exact_requests(given)
        origins(given["cors_origin"])
        sizes(given["device_kv"], given["host_kv"], given["max_body"])
    elif command == "plan":
        planned(given["cache"], (*facts["methods"], DENSE))
        cache_options(given["cache"], given, facts)
        for name in ("gpu_memory", "host_memory"):
            if given[name]:
                values.memory(spell(name), given[name])
    elif command == "calibrate-device":
        values.parse_heads(given["heads"])
    elif command.startswith("eval "):
        _evaluation(command.removeprefix("eval "), given, facts)


def _evaluation(task: str, given: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    if given.get("lengths") is not None:
        values.parse_lengths(given["lengths"])
    if isinstance(given.get("samples"), str):
        values.parse_samples(given["samples"])
    both = (*facts["families"], *facts["probe families"])
    if task == "ruler":
        paper_tasks(given["families"], given["data"])
        values.parse_names(given["families"], facts["paper families"] if given["data"] else both, "family")
    elif task == "tasks":
        values.parse_names(given["families"], facts["long tasks"], "task")
    elif task == "longbench":
        values.parse_names(given["tasks"], facts["longbench tasks"], "task")
    elif task == "output":
        values.parse_tokens(given["tokens"])
    elif task == "all":
        wanted = values.parse_names(given["only"], facts["parts"], "part")
        longbench_part(given["only"], wanted, given["longbench"])
        values.parse_names(given["families"], both, "family")
        if given["answer_tokens"] is not None:
            values.parse_tokens(given["answer_tokens"])
    if "documents" in given:
        documents(given["documents"], given["column"], given["join"], given["text_file"])
    specs(given["cache"], facts)


def _text(value: Any) -> Any:
    """A choice as its text."""
    return value.value if isinstance(value, Enum) else value
