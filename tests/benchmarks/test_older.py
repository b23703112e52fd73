"""Rows of a table's first days move to another file; readers see the same rows in the same order."""

from __future__ import annotations

import datetime

import pytest

import benchmarks
from benchmarks import older, readme

DAYS = [datetime.date(2026, 11, day) for day in range(1, 5)]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Two rows a day, of values 0 to 7, which end in two ways; a name holds a comma and quotes."""
    monkeypatch.setattr(benchmarks, "RESULTS", tmp_path)
    monkeypatch.setattr(older, "RESULTS", tmp_path)
    file = tmp_path / "step.csv"
    rows = [f'"two_level:a=""1"",b=2",{2 * i + j},gpu,{day}' for i, day in enumerate(DAYS) for j in range(2)]
    file.write_bytes(
        b"variant,value,device,date\n" + "".join(row + "\r\n"[i % 2 :] for i, row in enumerate(rows)).encode()
    )
    return file


def values() -> list[int]:
    return [int(row["value"]) for row in readme.read("step.csv", "gpu")]


def test_nothing_is_lost_and_the_order_stays(table, capsys):
    before, written = readme.read("step.csv"), table.read_bytes()
    older.main(["step", "2026-11-02"])
    older.main(["step", "2026-11-03"])
    first, second = (table.parent / f"until-2026-11-0{day}" / "step.csv" for day in (2, 3))
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    assert benchmarks.files_of("step.csv") == [first, second, table]
    assert readme.read("step.csv") == before and values() == list(range(8))
    heads, rows = zip(*(file.read_bytes().split(b"\n", 1) for file in (first, second, table)))
    assert [part.count(b"\n") for part in rows] == [4, 2, 2] and b"".join([heads[0], b"\n", *rows]) == written
    assert set(heads) == {b"variant,value,device,date"}
    assert [path.name for path in table.parent.iterdir() if path.is_file()] == ["step.csv"]


def test_files_of_rows_are_small():
    large = [path for path in benchmarks.RESULTS.rglob("*.csv") if path.stat().st_size > older.MOST]
    assert not large, "run: python -m benchmarks.older NAME DAY"
