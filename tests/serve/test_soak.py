"""The soak of a server and its hostile clients: they run, and the soak says what is wrong."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import forked
import pytest
from models import build
from tokenizers_made import byte_level

from benchmarks.report import Report
from benchmarks.serving import hostile, soak
from benchmarks.serving.soak import Seen, Soak, arguments

STATES = ("running", "waiting", "held", "prefilling")
COUNTS = ("requests", "requests_finished", "requests_cancelled", "requests_failed", "generated_tokens")
IDLE = {**{f"requests_{state}": 0.0 for state in STATES}, **{f"{name}_total": 0.0 for name in COUNTS}}


class Forking:
    """``subprocess`` as the server is begun with it."""

    PIPE, DEVNULL, TimeoutExpired = subprocess.PIPE, subprocess.DEVNULL, subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: list[str], *, env: dict[str, str], **_) -> forked.Popen:
        return forked.Popen(command[1:], env)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "options", "says"),
    [
        (soak.main, "--clients 3 --slow 1 -- PATH --batch-tokens 12k", "'answered'"),
        (hostile.main, "--size 1000000 -- PATH", "longest_gap_alone"),
    ],
    ids=["soak", "hostile"],
)
def test_a_few_seconds_of_it(main, options, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(soak, "subprocess", Forking)
    tokenizer = byte_level()
    build(
        "llama", "sdpa", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=3072
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    command = f"--minutes 0.05 --growth 1 --no-csv {options} --device cpu --context 3k --max-rows 4".split()
    status = main([str(tmp_path) if word == "PATH" else word for word in command])
    said = capsys.readouterr().out
    assert status == 0 and "nothing was wrong" in said and says in said, said


def judged(seen: list[Seen]) -> list[str]:
    judge = Soak("http://127.0.0.1:1", arguments().parse_args([]), random.Random(0))
    judge.seen = seen
    with Report("serving", "tiny", None, None) as report, report.measuring(1, 0, "soak"):
        judge.judge(report)
    return judge.wrong


@pytest.mark.parametrize(
    "more, said",
    [
        ({}, None),
        ({"resident": 10}, "memory grows"),
        ({"threads": 1}, "threads: "),
        ({"files": 1}, "files: "),
        ({"failed": 1}, "requests failed"),
    ],
)
def test_what_grows_is_wrong(more, said):
    seen = []
    for i in range(40):
        metrics = {**IDLE, "requests_failed_total": float(i * more.get("failed", 0))}
        sizes = [start + i * more.get(name, 0) for name, start in (("resident", 1000), ("threads", 8), ("files", 13))]
        seen.append(Seen(float(i), *sizes, metrics))
    wrong = judged(seen)
    assert (wrong == []) if said is None else (len(wrong) == 1 and said in wrong[0])
