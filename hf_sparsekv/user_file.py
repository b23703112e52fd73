"""The user's cache directory, and files of measurements in it: JSON, an entry for each device, read with care.

``{"format": n, "devices": {name: entry}}``; what an entry holds is the business of those who use this.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .whole_file import replacing

T = TypeVar("T")

# Errors of reading a broken file: RecursionError for deep JSON, OverflowError for numbers that no float holds.
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


def cache_directory() -> Path:
    """``hf-sparsekv`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. RuntimeError: there is no home directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hf-sparsekv"


def read(path: Path, version: int, parse: Callable[[dict], T]) -> dict[str, T]:
    """All entries, parsed by ``parse``. Empty if there is no file, or, with a warning, if it cannot be used."""
    try:
        return {name: parse(entry) for name, entry in _entries(path, version).items()}
    except FileNotFoundError:
        return {}
    except _UNUSABLE as error:
        warnings.warn(
            f"{path} cannot be used ({type(error).__name__}: {error}), built-in values are: "
            "`hf-sparsekv calibrate-device` writes it again",
            stacklevel=3,
        )
        return {}


def save(path: Path, version: int, parse: Callable[[dict], object], name: str, entry: dict) -> None:
    """Write the entry of one device; what the file says of others stays.

    Raises:
        OSError: the file cannot be written.
    """
    devices = {}
    with contextlib.suppress(*_UNUSABLE):  # unusable entries are dropped
        for other, there in _entries(path, version).items():
            parse(there)
            json.dumps(there, indent=1)  # its recursion limit is lower than that of reading
            devices[other] = there
    devices[name] = entry
    text = json.dumps({"format": version, "devices": devices}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:  # readers never see a partial file
        file.write(text.encode() + b"\n")


def _entries(path: Path, version: int) -> dict[str, dict]:
    whole = json.loads(path.read_text(encoding="utf-8"))
    if whole["format"] != version:
        raise ValueError(f"format {whole['format']!r}, expected {version}")
    return whole["devices"]
