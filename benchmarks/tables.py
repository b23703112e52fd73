"""Parts of tables on several pages: their data, rows of benchmarks/results, cells."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import yaml

from . import files_of

DATA = yaml.safe_load(Path(__file__).with_name("readme.yaml").read_text(encoding="utf-8"))
CASE, GPUS, SYSTEMS = DATA["case"], DATA["gpus"], DATA["systems"]
GPU = GPUS["H200"]  # of times
K = 1024
NONE, UNKNOWN = "not run", "not measured"


def shape(text: str) -> tuple[int, int]:
    """Rows and tokens of ``8x32k``."""
    batch, context = text.split("x")
    return int(batch), int(context.removesuffix("k")) * K


def spelled(text: str) -> str:
    """``8x32k`` as tables say it."""
    return text.replace("x", " x ")


def table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    heads = list(heads)
    top = f"| {' | '.join(heads)} |".replace("|  |", "| |")
    return "\n".join([top, "|---" * len(heads) + "|", *(f"| {' | '.join(cells)} |" for cells in lines)])


def read(name: str, device: str | None = None) -> list[dict]:
    """Rows of a table in benchmarks/results, oldest first; of all machines, or of one ``device``."""
    rows: list[dict] = []
    for path in files_of(name):
        with path.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if device in (None, row["device"])]
    return rows


def newest_row(
    rows: list[dict], variants: str | Iterable[str], metric: str, batch: int, context: int, case: str = CASE
) -> dict | None:
    """The newest row of one cell, of any of the ``variants``."""
    variants = (variants,) if isinstance(variants, str) else variants
    wanted = (case, metric, str(batch), str(context))
    for row in reversed(rows):
        if (row["case"], row["metric"], row["batch"], row["context"]) == wanted and row["variant"] in variants:
            return row
    return None


def newest(
    rows: list[dict], variants: str | Iterable[str], metric: str, batch: int, context: int, case: str = CASE
) -> float | None:
    """The newest figure of one cell, of any of the ``variants``."""
    row = newest_row(rows, variants, metric, batch, context, case)
    return None if row is None else float(row["value"])


def cell_of(value: float | None, bold: bool = False, none: str = NONE) -> str:
    if value is None:
        return none
    text = f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"
    return f"**{text}**" if bold else text


def fixed(value: float | None, digits: int, none: str = UNKNOWN) -> str:
    return none if value is None else f"{value:,.{digits}f}"


def commits_of(rows: Iterable[dict | None]) -> str:
    """Those that rows are of, each once, in the order of the columns."""
    return ", ".join(dict.fromkeys(row["commit"] for row in rows if row is not None))


def served() -> Iterable[tuple[dict, str, set[str], dict[str, str]]]:
    """Rows of serving: with the system, the words of its variant, and what they set."""
    for row in read("serving.csv"):
        system, *parts = row["variant"].split(":")
        if row["case"] == CASE:
            yield row, system, set(parts), dict(part.split("=", 1) for part in parts if "=" in part)
