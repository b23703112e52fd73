"""Rows that benchmarks have written."""

from __future__ import annotations

import csv
from pathlib import Path


def read_rows(path: Path) -> list[dict]:
    with path.open() as file:
        return list(csv.DictReader(file))
