"""The records of an evaluation: damaged files, writes that are cut off, two runs in one directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import time
import warnings

import pytest

from hf_sparsekv_eval.measures import Measure, Record
from hf_sparsekv_eval.records import Results

SCORE = Measure("score", "score", percent=True)


def a_record(index: float = 0, **changes) -> dict:
    return {"task": "a", "length": 10, "index": index, "cache": "full", "values": {"score": 1.0}, **changes}


def lines_of(*records: dict | bytes) -> bytes:
    return b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records)


DAMAGED = {
    "NUL": (json.dumps(a_record(1)).encode().replace(b"full", b"fu\0ll"), "is not JSON"),
    "zeros": (bytes(512), "is not JSON"),
    "bytes": (b"\xff\xfe\x80", "is not UTF-8"),
    "cut": (json.dumps(a_record(1)).encode()[:-20], "is not JSON, or cut off"),
    "two in one": (json.dumps(a_record(1)).encode()[:-20] + json.dumps(a_record(1)).encode(), "is not JSON"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "many digits": (json.dumps(a_record(1)).encode().replace(b"10", b"1" * 5000), "is not JSON"),
    "list": ([1], "is no record"),
    "null": (None, "is no record"),
    "unknown field": (a_record(1, colour="red"), "has the unknown field 'colour'"),
    "no values": ({k: v for k, v in a_record(1).items() if k != "values"}, "has no values"),
    "no task": ({k: v for k, v in a_record(1).items() if k != "task"}, "has no task"),
    "length of text": (a_record(1, length="10"), "has length="),
    "length of bool": (a_record(1, length=True), "has length="),
    "negative index": (a_record(-1), "has index="),
    "index of float": (a_record(1.0), "has index="),
    "task of list": (a_record(1, task=["a"]), "has task="),
    "cache of null": (a_record(1, cache=None), "has cache="),
    "half a pair": (a_record(1, output="\ud800"), "has output="),
    "values of text": (a_record(1, values={"score": "1.0"}), "has values that are no numbers"),
    "values of list": (a_record(1, values=[1.0]), "has values that are no numbers"),
    "no value": (a_record(1, values={}), "has values that are no numbers"),
    "value too large": (a_record(1, values={"score": 10**400}), "has values that are no numbers"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_lines_are_skipped_and_told(what: str, tmp_path) -> None:
    line, reason = DAMAGED[what]
    damaged = line if isinstance(line, bytes) else json.dumps(line).encode()
    whole = lines_of(a_record(0), damaged, a_record(2))
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "samples.jsonl").write_bytes(whole)
    message = rf"{re.escape(str(tmp_path))}/samples.jsonl: 1 damaged line skipped \(line 2 {re.escape(reason)}"
    with pytest.warns(UserWarning, match=message), Results(tmp_path, {}) as results:
        assert [r.index for r in results.records.values()] == [0, 2]
        results.add(Record("a", 10, 1, "full", {"score": 0.0}))
        assert "66.7" in results.write([SCORE], "title")
    assert (tmp_path / "samples.jsonl").read_bytes().startswith(whole), "nothing is thrown away"
    with pytest.warns(UserWarning, match="1 damaged line"), Results(tmp_path, {}) as results:
        assert [r.index for r in results.records.values()] == [0, 2, 1]


@pytest.mark.parametrize("cut", [1, 2, 30, 60])
def test_a_line_that_was_cut_off_does_not_damage_the_next(cut: int, tmp_path) -> None:
    with Results(tmp_path, {}) as results:
        results.add(Record("a", 10, 0, "full", {"score": 1.0}))
        results.add(Record("a", 10, 1, "full", {"score": 1.0}))
        with (tmp_path / "samples.jsonl").open("ab") as file:  # a full disk, say, while the run goes on
            file.truncate(file.tell() - cut)
        results.add(Record("a", 10, 2, "full", {"score": 1.0}))
    with warnings.catch_warnings(record=True) as told, Results(tmp_path, {}) as results:
        kept = [r.index for r in results.records.values()]
    assert kept == ([0, 1, 2] if cut == 1 else [0, 2]), "what only lacks its line end is whole"
    assert [str(w.message).count("line 2 is not JSON, or cut off") for w in told] == [1] * (cut > 1)


@pytest.mark.parametrize("held", [b"", b'{"seed": ', b"[1]", b"null", b"\xff", b'{"seed": 0\0}', b"[" * 100_000])
def test_damaged_settings_are_refused(held: bytes, tmp_path) -> None:
    (tmp_path / "settings.json").write_bytes(held)
    (tmp_path / "samples.jsonl").write_bytes(lines_of(a_record()))
    with pytest.raises(ValueError, match=r"settings\.json is damaged.*--out, or delete .*/settings\.json") as error:
        Results(tmp_path, {"seed": 0})
    assert not isinstance(error.value, UnicodeDecodeError | json.JSONDecodeError)
    assert (tmp_path / "settings.json").read_bytes() == held
    (tmp_path / "settings.json").unlink()  # as the message says
    with pytest.warns(UserWarning, match=r"samples\.jsonl but no settings\.json"):
        results = Results(tmp_path, {"seed": 0})
    assert len(results.records) == 1
    results.close()


def test_settings_and_tables_are_the_old_or_the_new(tmp_path, monkeypatch) -> None:
    with Results(tmp_path, {"seed": 0}) as results:
        results.add(Record("a", 10, 0, "full", {"score": 1.0}))
        results.write([SCORE], "old")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"settings.json", "samples.jsonl", "results.json", "results.csv", "results.md"}

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with Results(tmp_path, {"seed": 0}) as results:
        with pytest.raises(OSError, match="No space"):
            results.add(Record("a", 10, 1, "full", {"score": 0.0}))
        with pytest.raises(OSError, match="No space"):
            results.write([SCORE], "new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_second_run_in_a_directory_is_refused(tmp_path) -> None:
    out = tmp_path / "new" / "out"
    first = Results(out, {})
    for _ in range(2):  # before and after the first record
        with pytest.raises(ValueError, match=rf"another run writes to {out}: wait until .* --out"):
            Results(out, {})
        first.add(Record("a", 10, 0, "full", {"score": 1.0}))
    first.close()
    with Results(out, {}) as second:
        assert second.has("a", 10, 0, "full")
    assert {path.name for path in out.iterdir()} == {"settings.json", "samples.jsonl"}, "no lock stays behind"
    with pytest.raises(ValueError, match="closed"):
        second.add(Record("a", 10, 1, "full", {"score": 1.0}))


def test_a_run_without_results_leaves_no_directory(tmp_path) -> None:
    with Results(tmp_path / "new" / "out", {}):
        assert (tmp_path / "new" / "out").is_dir()
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_killed_process_is_free(tmp_path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            held = Results(tmp_path, {})
            os.write(write, b"held" if held else b"")
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 4) == b"held"
        with pytest.raises(ValueError, match="another run writes to"):
            Results(tmp_path, {})
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
    assert (tmp_path / ".lock").exists()
    Results(tmp_path, {}).close()


def test_a_lock_file_that_is_replaced_while_it_is_taken_is_taken_anew(tmp_path, monkeypatch) -> None:
    """The other run ends, and removes its lock file, between our opening and our locking it."""
    real, calls = fcntl.flock, []

    def late(file: int, how: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            os.unlink(tmp_path / ".lock")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with Results(tmp_path, {}):
        assert len(calls) == 2
        with pytest.raises(ValueError, match="another run"):
            Results(tmp_path, {})


def test_a_directory_that_cannot_be_locked_or_used_is_told(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot use .*/file: File exists: choose another directory with --out"):
        Results(tmp_path / "file", {})
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"cannot use .*/linked/.lock"):
        Results(tmp_path / "linked", {})
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "odd" / "samples.jsonl").mkdir(parents=True)
    (tmp_path / "odd" / "settings.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot use .*/samples.jsonl: Is a directory"):
        Results(tmp_path / "odd", {})

    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="cannot be locked .No locks available.: start no second run"):
        Results(tmp_path / "network", {}).close()


def test_a_record_without_its_weight_is_told() -> None:
    results = Results(None, {})
    results.add(Record("a", 10, 0, "full", {"nll": 1.0}))
    with pytest.raises(ValueError, match=r"has 'nll' but no 'tokens': delete its line"):
        results.figures([Measure("perplexity", "nll", "tokens")])
