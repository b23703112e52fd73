"""Values of options, as text, and what is wrong with them.

:mod:`.checks` compares several options.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import typer

from hf_sparsekv_config.audit import AuditConfig
from hf_sparsekv_config.options import guess

OTHER_DEVICES = ("mps", "xpu", "hpu", "xla", "npu", "mtia", "meta", "vulkan", "hip", "opencl")  # torch's, not ours


def parse_tokens(text: str) -> int:
    """``4k`` (4,096) or a plain number of tokens."""
    match = re.fullmatch(r"\s*(\d+)(k?)\s*", text, re.IGNORECASE)
    if not match or not int(match[1]):
        raise typer.BadParameter(f"{text!r} is no length; write for example 4k or 16384")
    return int(match[1]) * (1024 if match[2] else 1)


def parse_bytes(text: str) -> int:
    """``24GiB``, ``80GB``, ``512MiB`` or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if not match:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 24GiB or 80GB")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def parse_memory(text: str, least: int = 1 << 20, unit: str = "GiB") -> int:
    """A size of memory in bytes; a number alone below ``least`` is a ``unit`` forgotten, but for 0."""
    size_in_bytes = parse_bytes(text)
    alone = re.fullmatch(r"[\d.]+", text.strip())
    if alone and 0 < float(text) < least:
        raise typer.BadParameter(f"{text} bytes? Write the unit, too: {text}{unit}")
    return size_in_bytes


def parse_loss(text: str) -> float | str:
    """``--max-loss``: a share, or ``top``."""
    try:
        loss: float | str = text if text == "top" else float(text)
        return AuditConfig(max_loss=loss).max_loss  # type: ignore[arg-type, return-value]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number from 0 to 1, and not top") from None


def parse_body(text: str) -> int:
    """``serve --max-body`` in bytes."""
    size_in_bytes = parse_memory(text, 1000, "MiB")
    if not size_in_bytes:
        raise typer.BadParameter("no request would be taken")
    return size_in_bytes


def check_device(name: str) -> None:
    """``--device`` names a kind of device that sparse caches run on; whether it is there, torch knows."""
    kind = re.fullmatch(r"([a-z]+)(?::\d+)?", name)
    if name == "auto" or (kind and kind[1] in ("cpu", "cuda")):
        return
    if kind and kind[1] in OTHER_DEVICES:
        raise typer.BadParameter(f"{name!r} is not supported: sparse caches run on cpu and cuda")
    raise typer.BadParameter(f"{name!r} is no device; write for example cpu, cuda or cuda:1")


def parse_heads(text: str) -> tuple[int, int]:
    """``--heads`` of a layer, ``32x8``: query and KV heads."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    q_heads, kv_heads = (int(n) for n in match.groups()) if match else (0, 0)
    if not kv_heads or q_heads % kv_heads or not q_heads:
        raise typer.BadParameter(f"--heads {text}: write for example 32x8, query heads a multiple of KV heads")
    return q_heads, kv_heads


def parse_lengths(text: str) -> list[int]:
    """``--lengths`` in tokens."""
    return [parse_tokens(part) for part in str(text).split(",")]


def parse_samples(text: str) -> range:
    """``--samples`` as numbers of samples: ``50`` is 0 to 49, ``25:50`` is 25 to 49."""
    first, colon, last = str(text).partition(":")
    try:
        chosen = range(int(first), int(last)) if colon else range(int(first))
    except ValueError:
        chosen = range(0)
    if not chosen or chosen.start < 0:
        raise typer.BadParameter(
            f"--samples {text}: give how many, as 50, or FIRST:LAST, as 25:50 for those with the numbers 25 to 49"
        )
    return chosen


def parse_names(text: str | None, known: Sequence[str], what: str) -> list[str]:
    """A comma-separated choice of ``known`` names; ``None``: all of them."""
    if text is None:
        return list(known)
    known = tuple(dict.fromkeys(known))
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"no {what} {name!r}{guess(name, known)}; there are {', '.join(known)}")
    return names


def defaults_from_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take defaults of the other options from a YAML file (``eval --config``)."""
    if path is None:
        return None
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must hold a mapping of options")
    known = {p.name for p in context.command.params}
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    if "caches" in values:
        entries = values.pop("caches")
        if not isinstance(entries, list):
            raise typer.BadParameter(f"{path}: caches must be a list")
        values["cache"] = [
            yaml.safe_dump(e, default_flow_style=True, sort_keys=False, width=10**6).strip()
            if isinstance(e, dict)
            else str(e)
            for e in entries
        ]
    for key, value in values.items():
        if key not in known:
            there = sorted({p.name for p in context.command.params if not getattr(p, "hidden", False)} - {"config"})
            raise typer.BadParameter(f"{path}: no option {key!r}{guess(key, there)}; there are {', '.join(there)}")
        if key != "cache" and isinstance(value, list):
            values[key] = ",".join(map(str, value))
    context.default_map = {**(context.default_map or {}), **values}
    return path
