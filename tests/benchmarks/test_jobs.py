"""Many measurements in one go: which job begins when, on which GPUs, and how it ends."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import subprocess
import sys

import pytest

from benchmarks import jobs
from benchmarks.jobs import Job, first_that_fits


def job(name: str, gpus: int = 1, run: str = "true", limit: float = 60.0, least: float = 0.0) -> Job:
    return Job(name, gpus, limit, least, run)


def test_which_begins_next():
    one, two, four = job("one"), job("two", 2), job("four", 4)
    assert first_that_fits([four, two, one], 2, busy=True) == 1, "what does not fit lets others pass"
    assert first_that_fits([four, None, one], 2, busy=True) is None, "but nothing passes a barrier"
    assert first_that_fits([None, one], 1, busy=True) is None
    assert first_that_fits([None, one], 4, busy=False) == 0


def test_gpus_rows_and_logs(tmp_path, capsys):
    """Each job has GPUs of its own; what it leaves running is killed; its failure is told."""
    text = "echo $CUDA_VISIBLE_DEVICES $PORT; echo row > $ROWS"
    todo = [
        job("pair", 2, f"{text}; sleep 60 & echo $! > $ROWS.pid"),
        job("single", 1, text),
        None,
        job("bad", 3, "exit 3"),
    ]
    assert not jobs.Jobs(["4", "5", "6"], tmp_path, float("inf"))(todo)
    assert (tmp_path / "pair.txt").read_text() == "4,5 8100\n" and (tmp_path / "single.txt").read_text() == "6 8140\n"
    assert (tmp_path / "pair.csv").read_text() == "row\n"
    assert gone((tmp_path / "pair.csv.pid").read_text().strip())
    assert "bad ended with 3" in capsys.readouterr().out
    assert jobs.Jobs(["4"], tmp_path, float("inf"))([job("good")])


def test_time(tmp_path, capsys):
    assert not jobs.Jobs(["0"], tmp_path, float("inf"))([job("slow", run="sleep 60", limit=0.2)])
    assert not jobs.Jobs(["0"], tmp_path, 0.0)([job("late", least=5.0)])
    told = capsys.readouterr().out
    assert "slow was killed" in told and "late: no time is left" in told and not (tmp_path / "late.txt").exists()


def test_an_interrupt_ends_what_runs(tmp_path, monkeypatch):
    def interrupt(seconds):
        if (tmp_path / "long.csv").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(jobs.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        jobs.Jobs(["0"], tmp_path, float("inf"))([job("long", run="sleep 60 & echo $! > $ROWS; wait")])
    assert gone((tmp_path / "long.csv").read_text().strip())


def gone(process: str) -> bool:
    """It has ended, even if its parent has not waited for it yet."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", process], capture_output=True, text=True).stdout.strip()
    return shown[:1] in ("", "Z")


def test_the_file(monkeypatch, capsys):
    """Its commands are whole, and what they need is asked for before anything runs."""
    for name in jobs.NEEDS:
        monkeypatch.delenv(name, raising=False)
    found = jobs.known()
    for one in found.values():
        assert not {"{", "}"} & set(one.run.replace("${", "")), one.name
        assert one.least < one.limit
        assert subprocess.run(["bash", "-n", "-c", one.run], capture_output=True).returncode == 0, one.name
    assert found["trace-vllm"].missing == ["VLLM"]
    for asked, told in (
        (["new"], "new: one of suite"),
        (["trace-vllm"], "needs VLLM"),
        (["steps-70b-4"], "needs 4 GPUs"),
    ):
        with pytest.raises(SystemExit):
            jobs.main([*asked, "--gpus", "0"])
        assert told in capsys.readouterr().err
    assert jobs.main(["--list"]) == 0


def commands() -> list[tuple[str, str]]:
    """Each Python command of a job, with its job's name."""
    found = []
    for one in jobs.known().values():
        text = re.sub(r"\$\(.*?\)", "1", one.run.replace("\\\n", " "))
        for part in re.split(r"&&|[\n;|]|(?<!>)&", text):
            if (found_command := re.search(r"python3 (-m (?:benchmarks|hf_sparsekv)\b.*)", part)) is not None:
                found.append((one.name, re.split(r"\d?>", found_command[1])[0]))
    return found


def test_commands_are_understood(monkeypatch, capsys):
    """To the last argument: benchmarks end where theirs are parsed, others at a ``--help`` behind them."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser, *given):
        parse(parser, *given)
        parser.exit(message=f"usage: {parser.prog}")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    asked = {command: name for name, command in commands()}
    assert len(asked) > 20 and {"served-by-2-ranks", "prompts-35-sparse"} <= set(asked.values())
    for command, name in asked.items():
        _, module, *rest = shlex.split(command)
        own = " ".join(rest).partition(" -- ")[0].split()
        monkeypatch.setattr(sys, "argv", [module, *own, *(["--help"] if module == "hf_sparsekv" else [])])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        told = "".join(capsys.readouterr())
        assert ended.value.code == 0 and "usage:" in told.lower(), (name, command, told)
