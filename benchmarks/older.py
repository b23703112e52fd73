"""Move the rows of a table's first days out of the file that rows are appended to, before that becomes too large.

    python -m benchmarks.older step 2026-11-21    # to benchmarks/results/until-2026-11-21/step.csv

No row is lost, and none changes: what reads tables reads older rows first (``benchmarks.files_of``).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
from pathlib import Path

from . import OLDER, RESULTS

MOST = 900_000  # bytes of a file; a test reminds of this command


def move(file: Path, last: datetime.date) -> Path:
    """Rows of ``file`` up to the day ``last``, before the first later one, go to a folder beside it.

    Returns:
        The new file.

    Raises:
        ValueError: there are no such rows, no others, or rows of that day were moved before.
    """
    lines = file.read_bytes().splitlines(keepends=True)  # bytes, because rows end with or without a carriage return
    days = [datetime.date.fromisoformat(row["date"]) for row in csv.DictReader(line.decode() for line in lines)]
    if len(lines) != 1 + len(days):
        raise ValueError(f"a row of {file} takes several lines")
    count = next((i for i, day in enumerate(days) if day > last), len(days))
    if not 0 < count < len(days):
        raise ValueError(f"{count} of {len(days)} rows of {file} are of {last} or before")
    target = file.parent / f"{OLDER}{last}" / file.name
    if target.exists():
        raise ValueError(f"{target} is there already: choose another day")
    target.parent.mkdir(exist_ok=True)
    rest = file.with_suffix(".new")
    target.write_bytes(b"".join(lines[: 1 + count]))
    rest.write_bytes(b"".join([lines[0], *lines[1 + count :]]))
    os.replace(rest, file)
    return target


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", help="step, accuracy, ...")
    parser.add_argument("last", type=datetime.date.fromisoformat, help="the last day to move, as 2026-11-21")
    args = parser.parse_args(argv)
    try:
        print(move(RESULTS / f"{args.table}.csv", args.last))
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
