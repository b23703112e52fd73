"""Rows as hf_sparsekv.results writes them, without importing it.

kvpress's environment has another transformers, with which hf-sparsekv may not run.
"""

from __future__ import annotations

import csv
import datetime
import platform
import subprocess
from pathlib import Path

import torch
import transformers

from .. import ROOT

HEADER = (
    *("benchmark", "case", "variant", "batch", "context", "metric", "value", "low", "high", "unit"),
    *("device", "versions", "commit", "date"),
)


def commit() -> str:
    """Short hash of the checkout, with ``+`` if it has changes; ``unknown`` outside of one."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device() -> str:
    """The GPU's name, or the processor's architecture and the number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu-{platform.machine()}-{torch.get_num_threads()}t"


def versions(**more: str) -> str:
    """Versions of torch, transformers, and the other measured packages."""
    found = {"torch": torch.__version__, "transformers": transformers.__version__, **more}
    return ";".join(f"{name}={version}" for name, version in found.items())


class RowFile:
    """Rows of one model, length and environment, appended system by system.

    Args:
        path: the table; None: rows are printed only.
        case, context: of all rows.
        versions, commit: likewise.
    """

    def __init__(self, path: Path | None, case: str, context: int, versions: str, commit: str) -> None:
        self.path, self.case, self.context = path, case, context
        self.tail = (device(), versions, commit, datetime.date.today().isoformat())

    def append(self, variant: str, rows: list[tuple]) -> None:
        """Rows of one system: ``(metric, value, low, high, unit)`` each; low and high may be None."""
        for metric, value, _, _, unit in rows:
            print(f"{variant:28} {metric:28} {value:10.4f} {unit}", flush=True)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(HEADER)
            for metric, *numbers, unit in rows:
                cells = ["" if number is None else f"{number:.6g}" for number in numbers]
                writer.writerow(["peers", self.case, variant, 1, self.context, metric, *cells, unit, *self.tail])
