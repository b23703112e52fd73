"""What evaluations give: a line of JSON a sample and cache as it is measured, tables at the end.

A run that was interrupted goes on where it stopped: what ``samples.jsonl`` holds is not measured again. Lines of it
that are damaged are skipped with a warning, and one run at a time writes to a directory.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import secrets
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hf_sparsekv.results import Row

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

RESAMPLES = 2000
SAMPLES, SETTINGS, LOCK = "samples.jsonl", "settings.json", ".lock"
_NAMED = 5  # damaged lines that a warning names; the others are counted


@dataclass(frozen=True)
class Record:
    """One sample with one cache.

    Args:
        task, length, index: which sample; length in tokens.
        cache: name of the cache.
        values: what was measured.
        output: generated text.
    """

    task: str
    length: int
    index: int
    cache: str
    values: dict[str, float]
    output: str = ""

    @property
    def key(self) -> tuple[str, int, int, str]:
        """What identifies it."""
        return self.task, self.length, self.index, self.cache


@dataclass(frozen=True)
class Measure:
    """A figure over records: ``sum(value) / sum(weight)``.

    Args:
        name: what tables call it.
        value: key of :attr:`Record.values`.
        weight: key of what it is divided by; ``None``: the number of records.
        exponential: e to the power of it (perplexity).
        percent: shown as a percentage.
        beside: name of the measure in whose cells tables of several tasks print it, behind a slash.
    """

    name: str
    value: str
    weight: str | None = None
    exponential: bool = False
    percent: bool = False
    beside: str | None = None

    def of(self, sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The figure from sums ``[...]``; NaN where there is nothing to divide by."""
        mean = np.divide(sums, weights, out=np.full(np.shape(sums), np.nan), where=np.asarray(weights) > 0)
        return np.exp(mean) if self.exponential else mean

    def show(self, value: float, digits: int = 1) -> str:
        """As tables print it."""
        return f"{100 * value:.{digits}f}" if self.percent else f"{value:.4g}"


@dataclass(frozen=True)
class Figure:
    """A measure over the samples of a task and length, with its 95 % bootstrap interval."""

    task: str
    length: int
    cache: str
    measure: str
    value: float
    low: float
    high: float
    samples: int


class Results:
    """The records of a run; close it, or use it in a ``with`` statement.

    Lines of ``samples.jsonl`` that are no records are skipped with a warning that names them: they are measured again.

    Args:
        out: directory; ``None`` keeps records in memory. It is locked until :meth:`close` or the end of the process.
        settings: what the records depend on. A directory with other settings is refused.

    Raises:
        ValueError: another run writes to ``out``, it holds records of another run or a damaged ``settings.json``, or
            it cannot be used.
    """

    def __init__(self, out: Path | None, settings: dict) -> None:
        self.out, self.settings = out, json.loads(json.dumps(settings, default=str))
        self.records: dict[tuple, Record] = {}
        self._file = None
        self._lock = None
        if out is None:
            return
        try:
            self._lock = _Lock(out)
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
                f"{path} is damaged, so nobody knows which settings the records beside it were made with: choose "
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
        if self._file is None:  # not before: a run that fails at once leaves no files behind
            if self._lock is None:
                raise ValueError("these results are closed: open them anew to add records")
            replace(self.out / SETTINGS, json.dumps(self.settings, indent=1) + "\n")
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
        groups: dict[tuple[str, int, str], list[Record]] = {}
        for record in self.records.values():
            groups.setdefault((record.task, record.length, record.cache), []).append(record)
        out = []
        for measure in measures:
            drawn: dict[tuple[int, str], list[tuple[float, np.ndarray, int]]] = {}
            for (task, length, cache), records in groups.items():
                values = _values(records, measure)
                if values is None:
                    continue
                value, resampled = bootstrap(*values, measure, seed)
                drawn.setdefault((length, cache), []).append((value, resampled, len(records)))
                out.append(_figure(task, length, cache, measure.name, value, resampled, len(records)))
            for (length, cache), tasks in drawn.items():
                if len(tasks) > 1:
                    value = float(np.mean([v for v, _, _ in tasks]))
                    mean = np.mean([r for _, r, _ in tasks], axis=0)  # NaN where a task's draw weighs nothing
                    out.append(_figure("average", length, cache, measure.name, value, mean, sum(n for *_, n in tasks)))
        return out

    def rows(self, measures: Iterable[Measure], case: str) -> list[Row]:
        """The figures as rows of the benchmarks' tables; ``case`` is the model."""
        run = self.settings.get("task")
        out = []
        for measure in measures:
            metric = measure.name.lower().replace("-", "").replace(" ", "_")
            unit = "share" if measure.percent else "nats" if metric == "kl" else ""
            for f in self.figures([measure]):
                variant = ":".join(dict.fromkeys(x for x in (run, f.task, f.cache) if x))
                out.append(Row("accuracy", case, variant, 1, f.length, metric, f.value, f.low, f.high, unit))
        return out

    def write(self, measures: list[Measure], title: str) -> str:
        """Write ``results.json``, ``results.csv`` and ``results.md``; returns the tables as markdown."""
        figures = self.figures(measures)
        text = markdown(figures, measures, title)
        if self.out is not None:
            rows = [asdict(figure) for figure in figures]
            whole = {"settings": self.settings, "figures": rows}
            table = io.StringIO(newline="")
            writer = csv.DictWriter(table, list(Figure.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(rows)
            replace(self.out / "results.json", json.dumps(whole, indent=1) + "\n")
            replace(self.out / "results.csv", table.getvalue())
            replace(self.out / "results.md", text)
        return text


class _Lock:
    """The directory ``out``, made if it is not there, for one run; the system frees it when the process dies."""

    def __init__(self, out: Path) -> None:
        self.path = out / LOCK
        self.made = [path for path in (out, *out.parents) if not path.exists()]
        self.held: int | None = None
        for _ in range(100):  # who ends removes its lock file and a directory without results, perhaps just now
            with contextlib.suppress(FileNotFoundError):
                out.mkdir(parents=True, exist_ok=True)
                if fcntl is None or self._take():
                    return
        raise ValueError(f"{out} comes and goes: choose another directory with --out")

    def _take(self) -> bool:
        """Whether the file that was locked is still the one at the path."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ValueError(
                f"another run writes to {self.path.parent}: wait until it has ended, or choose another directory "
                "with --out"
            ) from None
        except OSError as error:  # some network file systems
            warnings.warn(
                f"{self.path.parent} cannot be locked ({error.strerror}): start no second run there", stacklevel=4
            )
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(self.path)):
                self.held = file
                return True
        os.close(file)
        return False

    def release(self) -> None:
        """Unlock, and leave neither a lock nor a directory in which nothing was written."""
        if self.held is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self.held)
        with contextlib.suppress(OSError):  # not empty
            for path in self.made:
                path.rmdir()


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


def replace(path: Path, text: str) -> None:
    """Write ``text`` so that whoever reads ``path``, now or after a crash, finds the old file or the new one, whole.

    Raises:
        OSError: it cannot be written; the old file is still there.
    """
    part = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    with part.open("x", encoding="utf-8", newline="") as file:  # nobody else's
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink()
            raise


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


def _values(records: list[Record], measure: Measure) -> tuple[np.ndarray, np.ndarray] | None:
    held = [r for r in records if measure.value in r.values]
    if not held:
        return None
    for record in held:
        if measure.weight and measure.weight not in record.values:
            raise ValueError(
                f"the record {record.key} has {measure.value!r} but no {measure.weight!r}: delete its line in {SAMPLES}"
            )
    values = np.array([r.values[measure.value] for r in held], dtype=float)
    weights = np.array([r.values[measure.weight] if measure.weight else 1.0 for r in held], dtype=float)
    return (values, weights) if weights.any() else None


def bootstrap(values: np.ndarray, weights: np.ndarray, measure: Measure, seed: int = 0) -> tuple[float, np.ndarray]:
    """The figure, and what it is for samples drawn with replacement (``RESAMPLES`` of them)."""
    at = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    value = measure.of(values.sum(), weights.sum())
    return float(value), measure.of(values[at].sum(-1), weights[at].sum(-1))


def _figure(task, length, cache, name, value, resampled, samples) -> Figure:
    low, high = np.nanpercentile(resampled, (2.5, 97.5))  # NaN: a draw that weighs nothing
    return Figure(task, length, cache, name, value, float(low), float(high), samples)


@dataclass
class _Grid:
    columns: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def put(self, row: str, column: str, text: str) -> None:
        if column not in self.columns:
            self.columns.append(column)
        cells = self.rows.setdefault(row, {})
        cells[column] = f"{cells[column]} / {text}" if column in cells else text

    def text(self) -> str:
        lines = ["| | " + " | ".join(self.columns) + " |", "|---|" + "---|" * len(self.columns)]
        for name, cells in self.rows.items():
            lines.append(f"| {name} | " + " | ".join(cells.get(c, "") for c in self.columns) + " |")
        return "\n".join(lines)


def markdown(figures: list[Figure], measures: list[Measure], title: str) -> str:
    """Tables, one a length: a row a cache; a column a task (several tasks) or a measure (one task)."""
    by_name = {measure.name: measure for measure in measures}
    parts = [f"# {title}"]
    for length in sorted({f.length for f in figures}):
        here = [f for f in figures if f.length == length]
        tasks = list(dict.fromkeys(f.task for f in here))
        several = len(tasks) > 1
        parts.append(f"## {length} tokens" if length else "## all lengths")
        grids: dict[str, _Grid] = {}
        for f in here:
            measure = by_name[f.measure]
            if not math.isfinite(f.value):
                continue
            text = measure.show(f.value)
            if f.high > f.low:
                text += f" ({measure.show(f.low)}-{measure.show(f.high)})"
            name = f.measure
            if several:  # what is printed beside another shares its table, if that has been measured, too
                pair = [m.name for m in measures if m.name == measure.beside or measure.name in (m.name, m.beside)]
                name = " / ".join(one for one in pair if any(g.measure == one for g in here))
            unit = f"{name}, %" if measure.percent else name
            grids.setdefault(unit if several else "", _Grid()).put(f.cache, f.task if several else unit, text)
        for name, grid in grids.items():
            parts += [f"**{name}**"] if name else []
            parts.append(grid.text())
    parts.append(f"In brackets: 95 % intervals, bootstrap over samples ({RESAMPLES} draws).")
    return "\n\n".join(parts) + "\n"
