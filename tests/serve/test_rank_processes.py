"""Ranks that rank 0 starts itself: the tokens of one process, and nobody is left when one of them ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import forked
import psutil
import pytest
import torch
from models import build
from tokenizers_made import byte_level
from waiting import wait_until

from hf_sparsekv_serve import rank_processes as module

ROOT = Path(__file__).parents[2]

# What all scripts begin with.
BEGIN = """
import os, sys, time
from caches import FULL, SMALL
from models import prompt
from hf_sparsekv import OffloadConfig, Sampling, ServingConfig, TokenConfig, optimize
from hf_sparsekv.serving.engine import Engine
from hf_sparsekv_serve.loading import load
from hf_sparsekv_serve.rank_processes import RankProcesses, Served

path, gpus = sys.argv[1], sys.argv[2:] == ["gpus"]
serving = ServingConfig(max_rows=3, max_length=300, chunk=64, prefill_ms=0.5)
budget = TokenConfig(**{**SMALL, "dense_below": 0, "token_budget": 32})
served = Served(path, "float32", budget, OffloadConfig(), serving)
ids = lambda n, seed: prompt(1, n, seed=seed)["input_ids"][0].tolist()
"""

ANSWERS = """
asked = [(ids(n, n), Sampling(max_tokens=new, temperature=0)) for n, new in ((150, 12), (20, 9), (201, 20), (65, 1))]
asked += [(ids(40, 3), Sampling(max_tokens=15, seed=seed)) for seed in (5, 6)]

def answers(engine):
    with engine:
        handles = [engine.submit(*one) for one in asked]
        found = [handle.result(60).token_ids for handle in handles]
        return found, engine._cache.sparse_layers[0].store.heads

ranks = RankProcesses(2, served, gpus)
print("child", ranks.children[0].pid, flush=True)
both, share = answers(ranks.engine())
while ranks.children[0].poll() is None:
    time.sleep(0.01)
time.sleep(0.2)  # the engine is closed: nobody misses the child
assert ranks.lost is None
ranks.close()
assert [process.returncode for process in ranks.children] == [0] and ranks.lost is None
tokenizer, whole = load(path, "float32", "cuda" if gpus else "cpu")
if gpus:
    whole.set_attn_implementation("sparsekv")
    optimize(whole, fused=False)  # no share of a model is fused, which rounds otherwise
one, heads = answers(Engine(whole, tokenizer, budget, OffloadConfig(), serving))
assert both == one, (both, one)
assert (share, heads) == (1, 2)
print("the same", flush=True)
os._exit(0)
"""

# It answers until it is told to end, or a rank is lost.
RUNS = """
ranks = RankProcesses(2, served, gpus)
print("child", ranks.children[0].pid, flush=True)
told = []
ranks.when_lost(lambda error: told.append(print(f"lost: {error}", flush=True)))
engine = ranks.engine()
handle = engine.submit(ids(20, 1), Sampling(max_tokens=270, temperature=0))
for piece, _ in zip(handle, range(3)):
    pass
print("it runs", flush=True)
try:
    while True:
        engine.submit(ids(20, 1), Sampling(max_tokens=270, temperature=0)).result(60)
except RuntimeError as error:
    print(f"asked: {error}", flush=True)  # in one piece, for two threads say something now
while not told:  # known before it is told
    time.sleep(0.01)
ranks.close(0)
os._exit(3)
"""

# A child that ends while all begin.
BEGINS = """
ranks = RankProcesses(2, served, gpus)
print("child", ranks.children[0].pid, flush=True)
ranks.children[0].kill()
try:
    ranks.engine()
except RuntimeError as error:
    print("begun:", error, flush=True)
os._exit(3)
"""

# All ranks fail for the same reason.
NO_MODEL = """
from dataclasses import replace

ranks = RankProcesses(2, replace(served, model=path + "/not-there"), gpus)
print("child", ranks.children[0].pid, flush=True)
try:
    ranks.engine()
except OSError as error:
    print("begun:", error, flush=True)
os._exit(3)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer of bytes, whose words two ranks can share."""
    path, tokenizer = tmp_path_factory.mktemp("models") / "tiny-llama", byte_level()
    build("llama", "sdpa", vocab_size=len(tokenizer) + len(tokenizer) % 2).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


class Rank0:
    """A process of a script's, and what it says."""

    def __init__(self, script: str, model: Path, *args: str) -> None:
        paths = os.pathsep.join((str(ROOT), str(ROOT / "tests/helpers")))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        if not args:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self.said = ""
        argv = ["-c", BEGIN + script, str(model), *args]
        if args:
            told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            self.process = subprocess.Popen([sys.executable, *argv], env=environment, **told)
        else:
            self.process = forked.merged(argv, environment)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self.said += line

    def __enter__(self) -> Rank0:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def until(self, words: str, seconds: float = 60) -> None:
        """It has said that."""
        wait_until(lambda: words in self.said or self.process.poll() is not None, seconds)
        wait_until(lambda: words in self.said, 2)

    def ends(self, seconds: float) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it has not ended: {self.said}")

    @property
    def child(self) -> int:
        """Process id of rank 1."""
        self.until("child ")
        return int(re.search(r"^child (\d+)$", self.said, re.M)[1])


def gone(pid: int) -> bool:
    """There is no such process, or only its exit code."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_two_ranks_answer_as_one_process(model):
    """Greedy and seeded, offloaded; the child ends with the engine."""
    with Rank0(ANSWERS, model) as rank0:
        assert rank0.ends(120) == 0 and "the same" in rank0.said, rank0.said
        assert gone(rank0.child)


@pytest.mark.gpu
def test_two_gpus_answer_as_one(model):
    """The same over NCCL, each rank with a GPU of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with Rank0(ANSWERS, model, "gpus") as rank0:
        assert rank0.ends(300) == 0 and "the same" in rank0.said, rank0.said
        assert gone(rank0.child)


def test_a_child_that_is_killed_is_told(model):
    """With the reason, and to those who wait for answers."""
    with Rank0(RUNS, model) as rank0:
        rank0.until("it runs")
        os.kill(rank0.child, signal.SIGKILL)
        assert rank0.ends(20) == 3
        rank0.until("asked: ")
        lost = "lost: rank 1 of the model has been killed by SIGKILL, and with it the replica: start it again"
        assert lost in rank0.said, rank0.said
        assert gone(rank0.child)


@pytest.mark.slow
def test_no_child_outlives_rank_0(model):
    """Killed, it cannot tell anybody."""
    with Rank0(RUNS, model) as rank0:
        rank0.until("it runs")
        child = rank0.child
        assert not gone(child)
        rank0.process.kill()
        wait_until(lambda: gone(child), 5)


def test_no_child_outlives_a_rank_0_that_is_killed_at_once(model):
    with Rank0(RUNS, model) as rank0:
        child = rank0.child
        rank0.process.kill()
        wait_until(lambda: gone(child), 5)


def test_a_child_that_ends_at_the_beginning_is_told_at_once(model):
    with Rank0(BEGINS, model) as rank0:
        child = rank0.child
        assert rank0.ends(30) == 3
        assert "begun: rank 1 of the model has been killed by SIGKILL" in rank0.said, rank0.said
        assert gone(child)


@pytest.mark.slow
def test_what_fails_on_all_ranks_is_told_as_on_one(model):
    with Rank0(NO_MODEL, model) as rank0:
        assert rank0.ends(60) == 3
        assert "begun: " in rank0.said and "not-there" in rank0.said, rank0.said
        assert gone(rank0.child)


@pytest.mark.parametrize(
    ("given", "size", "found"), [("3, 5,7", 2, ["3", "5"]), ("GPU-a,GPU-b", 2, ["GPU-a", "GPU-b"])]
)
def test_each_rank_has_a_gpu_of_those_that_rank_0_sees(monkeypatch, given, size, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert module.gpus_of_ranks(size) == found


@pytest.mark.parametrize("given", ["", "4"])
def test_too_few_gpus_are_told(monkeypatch, given):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises(ValueError, match=f"2 ranks need a GPU each, and this process sees .: {given or 'none'}"):
        module.RankProcesses(2, module.Served("m"), gpus=True)


def test_gpus_that_nobody_hides_are_all_seen(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert module.gpus_of_ranks(3) == ["0", "1", "2"]


def test_one_rank_needs_no_processes():
    with pytest.raises(ValueError, match="size must be at least 2"):
        module.RankProcesses(1, module.Served("m"), gpus=False)


def test_the_cpu_is_not_taken_where_there_are_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="hide them with CUDA_VISIBLE_DEVICES="):
        module.RankProcesses(2, module.Served("m"), gpus=False)


def test_a_child_that_cannot_be_started_is_told_at_once(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no more processes")

    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(OSError, match="no more processes"):
        module.RankProcesses(2, module.Served("m"), gpus=False)
