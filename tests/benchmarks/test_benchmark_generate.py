"""The generate benchmark from its arguments to its rows."""

from __future__ import annotations

import pytest
from read_rows import read_rows as rows

from benchmarks import generate as bench_generate

CACHES = ("hf_dynamic", "hf_static", "hf_offloaded", "two_level", "two_level:lag", "two_level:lag+offload")


@pytest.mark.slow
def test_generate(tiny, tmp_path, capsys):
    path = tmp_path / "generate.csv"
    args = ["--model", tiny, "--device", "cpu", "--context", "1500", "--new-tokens", "6", "--csv", path]
    assert bench_generate.main([str(arg) for arg in args] + ["--caches", *CACHES]) == 0
    out = capsys.readouterr().out
    assert "hf_offloaded: not run: transformers' offloaded cache needs a CUDA device" in out
    assert "6 steps over 1506 cached tokens" in out
    assert "5 rows appended" in out
    found = rows(path)
    assert [row["variant"] for row in found] == [name for name in CACHES if name != "hf_offloaded"]
    for row in found:
        about = [row[name] for name in ("benchmark", "case", "metric", "unit")]
        assert about == ["generate", "tiny:float32", "tpot_ms", "ms"]
        assert (row["batch"], row["context"]) == ("1", "1500")
        assert 0 < float(row["low"]) <= float(row["value"]) <= float(row["high"])


def test_generate_reads_and_samples(tiny, tmp_path):
    path = tmp_path / "generate.csv"
    args = ["--model", tiny, "--device", "cpu", "--context", 300, "--new-tokens", 4, "--batch", 2, "--csv", path]
    args += ["--caches", "two_level", "--prefill", "--sample"]
    assert bench_generate.main([str(arg) for arg in args]) == 0
    assert [(r["variant"], r["metric"], r["unit"]) for r in rows(path)] == [
        ("two_level:sample", "tpot_ms", "ms"),
        ("two_level:sample", "ttft_s", "s"),
    ]
