"""Wrong usage that several options show together.

A whole configuration or a model shows more errors (a budget that does not fit the blocks). These report them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

import typer

from .options import CacheKind, CacheOptions

KEY = "HF_SPARSEKV_API_KEY"
SEEDS = -(2**63), 2**64 - 1  # that torch takes


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise typer.BadParameter(message)


def compared(cache: CacheKind, compare: CacheKind | None) -> None:
    """``generate --cache`` and ``--compare``."""
    other = compare and compare.value
    _require(compare is None or compare != cache, f"--compare {other} is the cache itself: name the other one")
    _require(
        compare is None or CacheKind.dense in (cache, compare),
        "--compare takes dense here: options of two sparse caches would be mixed up",
    )


def seeded(seed: int | None, temperature: float) -> None:
    """``generate --seed`` and ``--temperature``."""
    _require(math.isfinite(temperature), f"--temperature must be a finite number, got {temperature}")
    _require(seed is None or temperature > 0, "--seed has no meaning without a --temperature above 0")
    low, high = SEEDS
    _require(seed is None or low <= seed <= high, f"--seed must have 64 bits, from {low} to {high}, got {seed}")


def exact_mode(exact: bool, sparse: bool, offload: bool) -> None:
    """``--exact``; ``offload``: an option asks for host memory."""
    _require(not exact or sparse, "--exact has no meaning with --cache dense: it is full attention already")
    _require(
        not exact or not offload,
        "--exact reads all keys and values in each verification, and would read them over the link: leave --offload "
        "and --kv-dtype out",
    )


def audited(audit: bool, exact: bool, sparse: bool) -> None:
    """``generate --audit`` and ``--max-loss``."""
    _require(not audit or sparse, "--audit and --max-loss have no meaning with --cache dense: it is full attention")
    _require(not (audit and exact), "--exact gives full attention's text, which needs no --audit and no --max-loss")


def prompted(prompt: object, prompt_file: object, demo: bool) -> None:
    """``generate`` reads one text."""
    given = sum((prompt is not None, prompt_file is not None, demo))
    _require(given == 1, "give either --prompt or --prompt-file, or --demo, which has a text of its own")


def served(cache: CacheKind, options: CacheOptions, api_key: Sequence[str] | None, model_id: str | None) -> None:
    """``serve``."""
    _require(cache is not CacheKind.dense, "serve has sparse caches only: leave --cache dense out")
    _require(
        "max_length" not in options.given, "--max-length has no meaning here: --context says how long requests may be"
    )
    _require(
        all(key.strip() for key in api_key or ()) and (not (kept := os.environ.get(KEY, "")) or bool(kept.strip())),
        f"--api-key (or {KEY}) is empty: give a key, or leave it out",
    )
    _require(model_id is None or bool(model_id.strip()), "--model-id is empty: give a name, or leave it out")


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


def coded(options: CacheOptions) -> None:
    """``--kv-dtype`` of blocks that stay on the device."""
    _require(
        options.kv_dtype is None or options.offload is not False,
        "--kv-dtype is of keys and values in host memory: leave --no-offload out",
    )


def planned(cache: CacheKind) -> None:
    """``plan --cache``."""
    sparse = ", ".join(kind.value for kind in CacheKind if kind is not CacheKind.dense)
    _require(
        cache is not CacheKind.dense,
        f"plan compares a sparse cache with the dense one: --cache takes {sparse} here",
    )


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
