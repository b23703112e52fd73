"""Results of evaluations: a line of JSON for each sample and cache as it is measured, and tables at the end.

An interrupted run continues where it stopped: samples in ``samples.jsonl`` are not measured again. Damaged lines are
skipped with a warning. One run at a time writes to a directory.
"""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from hf_sparsekv.results import Row
from hf_sparsekv.whole_file import replace_text

from .cache_specs import FULL
from .measures import Figure, Measure, Record, figures
from .paired import differences, table
from .run_directory import Lock
from .tables import markdown

SAMPLES, SETTINGS = "samples.jsonl", "settings.json"
_NAMED = 5  # damaged lines that a warning names; the others are counted


class Results:
    """The records of a run; close it, or use it in a ``with`` statement.

    Lines of ``samples.jsonl`` that are no records are skipped with a warning that names them: they are measured again.

    Args:
        out: directory; ``None`` keeps records in memory. It is locked until :meth:`close` or the end of the process.
        settings: what the records depend on. A directory with other settings is refused.

    Attributes:
        shown: numbers of the samples that figures and tables are of; ``None``: all.

    Raises:
        ValueError: another run writes to ``out``, it holds records of another run or a damaged ``settings.json``, or
            it cannot be used.
    """

    def __init__(self, out: Path | None, settings: dict) -> None:
        self.out, self.settings = out, json.loads(json.dumps(settings, default=str))
        self.records: dict[tuple, Record] = {}
        self.shown: range | None = None
        self._file = None
        self._lock = None
        if out is None:
            return
        try:
            self._lock = Lock(out)
            self._compare()
            self._load(out / SAMPLES)
        except OSError as error:
            self.close()
            named = error.filename if error.filename is not None else out
            raise ValueError(f"cannot use {named}: {error.strerror}: choose another directory with --out") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Results:
        """Itself."""
        return self

    def __exit__(self, *error) -> None:
        """Close it."""
        self.close()

    def _compare(self) -> None:
        """Refuse a directory whose records were made with other settings."""
        path = self.out / SETTINGS
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if (self.out / SAMPLES).exists():
                warnings.warn(
                    f"{self.out} has {SAMPLES} but no {SETTINGS}: its records count as made with the settings of now",
                    stacklevel=3,
                )
            return
        except (ValueError, RecursionError) as error:
            before = error
        if not isinstance(before, dict):
            raise ValueError(
                f"{path} is damaged, so it is unknown which settings the records beside it were made with: choose "
                f"another directory with --out, or delete {path} if they are those of now"
            )
        names = sorted({*before, *self.settings})
        other = [name for name in names if before.get(name) != self.settings.get(name)]
        if "task" in other:  # whose options are others
            other = ["task"]
        if other:
            detail = "; ".join(f"then {_spell(n, before)}, now {_spell(n, self.settings)}" for n in other)
            raise ValueError(f"{self.out} holds results of another run ({detail}): choose another directory with --out")

    def _load(self, path: Path) -> None:
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        damaged = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = parse(line)
            except ValueError as error:
                damaged.append(f"line {number} {error}")
            else:
                self.records[record.key] = record
        if damaged:
            count = f"{len(damaged)} damaged line{'s' * (len(damaged) > 1)}"
            more = f"; and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
            warnings.warn(
                f"{path}: {count} skipped ({'; '.join(damaged[:_NAMED])}{more}); what they held is measured again. "
                "Delete them to be rid of this warning",
                stacklevel=3,
            )

    def has(self, task: str, length: int, index: int, cache: str) -> bool:
        """This sample has been measured with this cache."""
        return (task, length, index, cache) in self.records

    def add(self, record: Record) -> None:
        """Keep a record, on disk at once."""
        self.records[record.key] = record
        if self.out is None:
            return
        if self._file is None:  # created late: a run that fails at once leaves no files
            if self._lock is None:
                raise ValueError("these results are closed: open them again to add records")
            replace_text(self.out / SETTINGS, json.dumps(self.settings, indent=1) + "\n")
            self._file = (self.out / SAMPLES).open("ab+", buffering=0)
        line = json.dumps(asdict(record)).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        if size:
            self._file.seek(size - 1)
            if self._file.read(1) != b"\n":  # a line that an interruption or a full disk cut off stays alone
                line = b"\n" + line
        left = memoryview(line)
        while left:
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Close the file and unlock the directory. Again does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def figures(self, measures: Iterable[Measure], seed: int = 0) -> list[Figure]:
        """All measures of all tasks, lengths and caches, in the order of the records; an ``average`` over tasks."""
        return figures(self._shown(), measures, seed)

    def _shown(self) -> list[Record]:
        return [r for r in self.records.values() if self.shown is None or r.index in self.shown]

    def rows(self, measures: Iterable[Measure], case: str) -> list[Row]:
        """The figures as rows of the benchmarks' tables; ``case`` is the model."""
        run = self.settings.get("task")
        out = []
        for measure in measures:
            metric = measure.name.lower().replace("-", "").replace(" ", "_")
            unit = "share" if measure.percent else "nats" if metric in ("kl", "kl_p95") else ""
            for f in self.figures([measure]):
                variant = ":".join(dict.fromkeys(x for x in (run, f.task, f.cache) if x))
                out.append(Row("accuracy", case, variant, 1, f.length, metric, f.value, f.low, f.high, unit))
        return out

    def write(self, measures: list[Measure], title: str, paired: Iterable[Measure] = ()) -> str:
        """Write ``results.json``, ``results.csv`` and ``results.md``; returns the tables as markdown.

        Args:
            paired: measures whose differences from full attention on the same samples are reported, too.
        """
        figures = self.figures(measures)
        text = markdown(figures, measures, title)
        pairs = differences(self._shown(), paired, FULL)
        if pairs:
            text += "\n" + table(pairs)
        if self.out is not None:
            rows = [asdict(figure) for figure in figures]
            whole = {"settings": self.settings, "figures": rows}
            if pairs:
                whole["differences"] = [asdict(pair) for pair in pairs]
            sheet = io.StringIO(newline="")
            writer = csv.DictWriter(sheet, list(Figure.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(rows)
            replace_text(self.out / "results.json", json.dumps(whole, indent=1) + "\n")
            replace_text(self.out / "results.csv", sheet.getvalue())
            replace_text(self.out / "results.md", text)
        return text


def parse(line: bytes) -> Record:
    """The record in a line of ``samples.jsonl``.

    Raises:
        ValueError: it is none; the message says why, as what is said of a line.
    """
    try:
        held = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("is not JSON, or cut off") from None
    if not isinstance(held, dict):
        raise ValueError("is no record")
    fields = Record.__dataclass_fields__
    if unknown := sorted(set(held) - set(fields)):
        raise ValueError(f"has the unknown field {unknown[0][:40]!r}")
    if missing := [name for name in fields if name not in held and name != "output"]:
        raise ValueError(f"has no {missing[0]}")
    for name in ("length", "index"):
        if type(held[name]) is not int or not 0 <= held[name] < 1 << 63:
            raise ValueError(f"has {name}={held[name]!r:.40}, which is no count")
    for name in ("task", "cache", "output"):
        text = held.get(name, "")
        if not isinstance(text, str) or text != text.encode(errors="replace").decode():  # half of a surrogate pair
            raise ValueError(f"has {name}={text!r:.40}, which is no text")
    values = held["values"]
    if not isinstance(values, dict) or not values or not all(map(_is_number, values.values())):
        raise ValueError("has values that are no numbers")
    return Record(**held)


def _is_number(value: object) -> bool:
    # Not every integer of JSON is a float.
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _spell(name: str, settings: dict) -> str:
    """A setting as it was written on the command line."""
    value = settings.get(name)
    if name in ("task", "model"):
        return f"{name} {value}"
    option = "--" + {"text": "text-file"}.get(name, name).replace("_", "-")
    if value is None:
        return f"no {option}"
    if isinstance(value, bool):
        return option if value else option.replace("--", "--no-", 1)
    return f"{option} {value}"
