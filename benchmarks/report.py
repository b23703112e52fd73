"""Output of a benchmark: a line per figure, rows on disk after every variant, and the variants that did not run."""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hf_sparsekv import unoptimize
from hf_sparsekv.cli.output import CommandError
from hf_sparsekv.results import Row, append_rows

from .baselines import NotRun


def spread(values: list[float]) -> tuple[float, float | None, float | None]:
    """Median and quartiles; a single value has none."""
    if len(values) < 2:
        return values[0], None, None
    low, _, high = statistics.quantiles(values, n=4)
    return statistics.median(values), low, high


def is_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the device or the host."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error).lower()


class Report:
    """Prints figures, and appends a variant's rows when it is done, whole or not.

    Args:
        benchmark, case: of all rows.
        path: the csv; None writes nothing.
        total: variants to come, for the progress bar on standard error; None: unknown.
    """

    def __init__(self, benchmark: str, case: str, path: Path | None, total: int | None) -> None:
        self.benchmark, self.case, self.path = benchmark, case, path
        self.rows: list[Row] = []  # of the variant being measured
        self.written = 0
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self._where: tuple[int, int, str] | None = None
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Figures belong to standard output even while the bar is shown.
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
        self._task = self._bar.add_task(benchmark, total=total)

    def __enter__(self) -> Report:
        self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        self._bar.stop()

    @contextmanager
    def measuring(self, batch: int, context: int, variant: str, model=None) -> Iterator[None]:
        """One variant. An error is reported, and does not lose its earlier rows or the other variants'.

        Args:
            model: taken out of ``optimize()`` after an error: a runner that has met one does not capture again.
        """
        self._where = (batch, context, variant)
        place = f"{batch:3} x {context:7}  {variant}"
        self._bar.update(self._task, description=f"{batch} x {context} {variant}")
        missing = self.missing
        try:
            yield
        except NotRun as reason:
            self.left_out.append(f"{place}: {reason}")
            print(f"{place}: not run: {reason}", flush=True)
        except CommandError:  # there is no such model: nothing else can be measured either
            raise
        except Exception as error:
            text = (str(error).splitlines() or [type(error).__name__])[0][:300]
            if is_memory(error):
                self.left_out.append(f"{place}: {text}")
                print(f"{place}: not run, out of memory: {text}", flush=True)
            else:
                self.failed.append(f"{place}: {text}")
                print(f"{place}: FAILED: {text}", flush=True)
                traceback.print_exc()
        finally:
            if model is not None and self.missing > missing:
                unoptimize(model)
            self.write()
            self._bar.advance(self._task)

    def add(self, metric: str, values: list[float] | float, unit: str = "ms") -> None:
        """A figure of the variant being measured: a value, or samples of it."""
        batch, context, variant = self._where
        median, low, high = spread(values if isinstance(values, list) else [values])
        self.rows.append(
            Row(self.benchmark, self.case, variant, batch, context, metric, float(median), low, high, unit)
        )
        shown = "" if low is None else f" [{low:.3f}, {high:.3f}]"
        print(f"{batch:3} x {context:7}  {variant:24} {metric:20} {median:9.3f}{shown} {unit}", flush=True)

    def rename(self, variant: str) -> None:
        """Rename the variant that is being measured."""
        self._where = (*self._where[:2], variant)

    def note(self, text: str) -> None:
        """Something to know about the figures above."""
        print(f"      {text}", flush=True)

    @property
    def missing(self) -> int:
        """Variants that did not run to their end."""
        return len(self.failed) + len(self.left_out)

    def write(self) -> None:
        """Append what has been measured since the last time."""
        rows, self.rows = self.rows, []
        if rows and self.path is not None:
            append_rows(self.path, rows)
            self.written += len(rows)

    def close(self) -> int:
        """Say what is missing; the exit status."""
        for text in self.left_out:
            print(f"not run: {text}")
        for text in self.failed:
            print(f"FAILED: {text}")
        if self.written:
            print(f"{self.written} rows appended to {self.path}")
        return 1 if self.failed else 0
