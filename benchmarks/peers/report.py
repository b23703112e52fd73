"""The table of docs/compared.md from the newest rows in benchmarks/results/peers.csv.

    python -m benchmarks.peers.report --csv FILE     # print it for other rows

:mod:`..readme` writes it into the page. A table holds only rows of one file of prompts.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .. import files_of

NOTHING = "Not measured yet: there are no rows in `benchmarks/results/peers.csv`."
# Heading, metric, digits.
COSTS = (
    ("first token, s", "ttft_s", 2),
    ("token, ms", "tpot_ms", 1),
    ("KV on the GPU, GB", "kv_gb", 2),
    ("KV in host memory, GB", "host_gb", 2),
    ("peak, GB", "peak_gb", 1),
    ("read a token, MB", "read_mb", 1),
)


@dataclass
class Measured:
    """The newest figures of one system.

    Args:
        inside, after: scores by task, from 0 to 1; ``after`` also of systems that read the question in steps.
        costs: by metric.
        commits: of its rows, each once.
    """

    inside: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    commits: dict[str, None] = field(default_factory=dict)

    def take(self, row: dict) -> None:
        """A row, which is newer than those before."""
        metric, value = row["metric"], float(row["value"])
        if match := re.fullmatch(r"score:(inside|after|steps):(.+)", metric):
            (self.inside if match[1] == "inside" else self.after)[match[2]] = value
        else:
            self.costs[metric] = value
        self.commits[row["commit"]] = None


@dataclass(frozen=True)
class Setting:
    """The setting that systems in one table share. ``prompts`` is the fingerprint of their file."""

    case: str
    context: int
    device: str
    prompts: str

    def __str__(self) -> str:
        return f"{self.case}, prompts of {self.context:,} tokens, {self.device}"


def read(files: Iterable[Path]) -> list[dict]:
    """Rows, oldest first."""
    rows: list[dict] = []
    for path in files:
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
    return rows


def merge(rows: Iterable[dict]) -> dict[Setting, dict[str, Measured]]:
    """Systems of each setting, in the order in which they were first measured."""
    found: dict[Setting, dict[str, Measured]] = {}
    for row in rows:
        held = dict(part.split("=", 1) for part in row["versions"].split(";"))
        setting = Setting(row["case"], int(row["context"]), row["device"], held["prompts"])
        found.setdefault(setting, {}).setdefault(row["variant"], Measured()).take(row)
    return found


def share(scores: dict[str, float], tasks: int) -> str:
    """The mean over tasks in %; of how many, if some are missing."""
    if not scores:
        return "not run"
    text = f"{100 * statistics.fmean(scores.values()):.1f}"
    return text if len(scores) == tasks else f"{text} ({len(scores)} of {tasks} tasks)"


def lines(systems: dict[str, Measured]) -> list[list[str]]:
    """Cells of a table, the first line its head. Costs that no system has are left out."""
    tasks = len({task for one in systems.values() for task in (*one.inside, *one.after)})
    # Host memory of none but zeros says nothing.
    costs = [cost for cost in COSTS if any(one.costs.get(cost[1]) for one in systems.values())]
    made = [["system", "question inside", "question after", *(head for head, *_ in costs), "commit"]]
    for name, one in systems.items():
        figures = (one.costs.get(metric) for _, metric, _ in costs)
        cells = ["" if value is None else f"{value:,.{digits}f}" for value, (*_, digits) in zip(figures, costs)]
        made.append([name, share(one.inside, tasks), share(one.after, tasks), *cells, ", ".join(one.commits)])
    return made


def markdown(found: dict[Setting, dict[str, Measured]]) -> str:
    """A table for each setting."""
    parts = []
    for setting, systems in found.items():
        head, *body = (f"| {' | '.join(cells)} |" for cells in lines(systems))
        parts.append("\n".join([f"{setting}:\n", head, "|---" * (head.count("|") - 1) + "|", *body]))
    return "\n\n".join(parts) or NOTHING


def tables() -> str:
    """The tables of the committed rows."""
    return markdown(merge(read(files_of("peers.csv"))))


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, nargs="+", help="default: peers.csv in benchmarks/results")
    args = parser.parse_args(argv)
    try:
        print(markdown(merge(read(args.csv or files_of("peers.csv")))))
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(f"error: {error}: these are no rows of benchmarks.peers") from None


if __name__ == "__main__":
    main()
