"""Shared parts of the benchmarks' tests: a tiny model, rows read back, captured steps without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from captured import Imitation
from models import build
from read_rows import read_rows

from benchmarks import baselines
from benchmarks import step as bench_step
from benchmarks.report import Report
from hf_sparsekv import unoptimize


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A saved model."""
    path = tmp_path_factory.mktemp("model") / "Tiny"
    build("llama", "sdpa", eos_token_id=2, max_position_embeddings=4096).save_pretrained(path)
    return path


@pytest.fixture
def imitated_gpu(monkeypatch):
    """Captured steps without a GPU: each replay runs the step anew."""

    def prepare(model, variant, fused, capture=True):
        unoptimize(model)
        model.set_attn_implementation("sparsekv" if variant.ours else "sdpa")
        if variant.ours:
            Imitation(model).install()

    monkeypatch.setattr(bench_step, "prepare", prepare)
    monkeypatch.setattr(bench_step, "replay_ms", lambda model, cache: [1.0, 2.0])
    for name in ("synchronize", "reset_peak_memory_stats", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10**9)
    allocated = itertools.count()
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocation.all.allocated": next(allocated)})
    monkeypatch.setattr(bench_step, "COUNTED", 8)


@pytest.fixture
def stepped(tmp_path, imitated_gpu, monkeypatch):
    """Runs ``benchmarks step`` on a model; the rows. Variants whose names begin so get these settings."""
    path = tmp_path / "step.csv"

    def run(model, command: str, prefix: str = "none", **settings) -> list[dict]:
        small = {
            n: dataclasses.replace(v, settings=settings) for n, v in baselines.VARIANTS.items() if n.startswith(prefix)
        }
        monkeypatch.setattr(baselines, "VARIANTS", {**baselines.VARIANTS, **small})
        args = bench_step.arguments().parse_args(f"{command} --no-fused --csv {path}".split())
        with Report("step", "tiny", path, 8) as report:
            bench_step.run(bench_step.Bench(model, report, args), args, rate=1e12)
        assert report.close() == 0, report.failed
        return read_rows(path)

    return run
