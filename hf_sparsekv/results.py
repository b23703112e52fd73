"""Rows of ``benchmarks/results/<benchmark>.csv``: appended by the tools, never edited by hand."""

from __future__ import annotations

import csv
import datetime
import platform
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import transformers


@dataclass(frozen=True)
class Row:
    """One figure.

    Args:
        benchmark: ``operator``, ``step``, ``generate``, ``transfer``, ``prefill`` or ``accuracy``.
        case: model or transfer size.
        variant: what was measured, ``method:setting=value``.
        batch, context: rows and tokens.
        metric, value, low, high, unit: the figure and its spread (quartiles, or a confidence interval).
    """

    benchmark: str
    case: str
    variant: str
    batch: int
    context: int
    metric: str
    value: float
    low: float | None = None
    high: float | None = None
    unit: str = ""


def device_name() -> str:
    """The GPU's name, or the processor's architecture and the number of threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu-{platform.machine()}-{torch.get_num_threads()}t"


def versions() -> str:
    """Versions that a figure depends on."""
    parts = [f"torch={torch.__version__}", f"transformers={transformers.__version__}"]
    try:
        import triton

        parts.append(f"triton={triton.__version__}")
    except ImportError:
        parts.append("triton=none")
    return ";".join(parts)


def commit() -> str:
    """Short hash of the source tree's commit, with ``+`` if there are changes on top; ``unknown`` elsewhere.

    An archive made by ``git archive`` has its hash in ``commit.txt``. A package that is installed somewhere below
    another project's repository has not that project's hash.
    """
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != here.resolve().parent:
            raise FileNotFoundError
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        archived = here / "commit.txt"
        text = archived.read_text().strip() if archived.exists() else ""
        return "unknown" if not text or "Format" in text else text


def append_rows(path: Path, rows: list[Row]) -> None:
    """Append rows with machine, versions, commit and date; makes the file and its header if need be."""
    names = [field.name for field in fields(Row)]
    tail = [device_name(), versions(), commit(), datetime.date.today().isoformat()]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow([*names, "device", "versions", "commit", "date"])
        for row in rows:
            cells = [getattr(row, name) for name in names]
            writer.writerow([f"{c:.6g}" if isinstance(c, float) else "" if c is None else c for c in cells] + tail)
