"""The benchmark of spread models, on a CPU: two ranks by gloo, and captured steps that are imitated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from captured import Imitation
from models import build
from read_rows import read_rows

from benchmarks import parallel
from benchmarks.kernels import Kernel
from benchmarks.report import Report
from hf_sparsekv import unoptimize

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_two_ranks(tmp_path):
    """Their heads, their prompts; rows of rank 0 alone."""
    build("llama", "sdpa", vocab_size=96).save_pretrained(tmp_path / "tiny")
    command = f"--ranks 2 --model {tmp_path / 'tiny'} --device cpu --shapes 2x300 --prompts 200 --chunk 128 --tokens 4"
    command += f" --variants hf_dynamic token_only+offload --kv random --csv {tmp_path / 'rows.csv'}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "parallel", *command.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {(row["variant"], row["metric"]) for row in read_rows(tmp_path / "rows.csv")}
    names = {"hf_dynamic:ranks=2", "token_only+offload+eager:ranks=2"}
    assert {name for name, metric in found if metric == "tpot_ms"} == names
    assert {(f"{name}", f"peak_gb:rank{rank}") for name in names for rank in (0, 1)} <= found
    assert ("token_only+offload+eager:ranks=2:prompt:chunk=128", "ttft_s") in found


@pytest.fixture
def imitated(monkeypatch):
    """Captured steps without a GPU."""

    def prepare(model, variant, fused, capture=True):
        unoptimize(model)
        model.set_attn_implementation("sparsekv" if variant.ours else "sdpa")
        if variant.ours:
            Imitation(model).install()

    monkeypatch.setattr(parallel, "prepare", prepare)
    monkeypatch.setattr(parallel, "_gpus", lambda model: {0})
    monkeypatch.setattr(parallel, "replay_ms", lambda model, cache: [1.0, 2.0])
    names = "ncclDevKernel_AllReduce_X", "_zeros", "gemv_bf16", "mass_select_cluster_kernel"
    kernels = [Kernel(name, at, 1e3) for at, name in enumerate(names)]
    monkeypatch.setattr(parallel, "launched", lambda step: [step(), kernels][1])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *args: 10**9)


def test_captured_steps_and_where_their_time_goes(imitated, tmp_path):
    path, model = tmp_path / "rows.csv", build("llama", "sparsekv", max_position_embeddings=4096)
    command = f"--device cpu --shapes 1x600 --tokens 4 --variants token_only --profile --csv {path}"
    args = parallel.arguments().parse_args(command.split())
    with Report("parallel", "tiny", path, 2) as report:
        parallel.measure(parallel.Spread(model), report, args, 1e12)
    assert report.close() == 0, report.failed
    rows = {row["metric"]: float(row["value"]) for row in read_rows(path) if row["variant"].startswith("token_only")}
    assert {"capture_s", "steps_ms", "tpot_ms", "step_ms", "peak_gb:rank0"} <= set(rows)
    kinds = "sums", "linear", "other", "selection", "attention"
    assert [rows[f"{kind}_ms"] for kind in kinds] == [1.0, 1.0, 1.0, 1.0, 0.0]
