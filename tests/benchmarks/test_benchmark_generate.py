"""The generate benchmark from its arguments to its rows."""

from __future__ import annotations

import pytest
from models import VOCAB, build
from read_rows import read_rows as rows

from benchmarks import decoding, filling, shapes
from benchmarks import generate as bench_generate
from benchmarks.baselines import VARIANTS, make_cache

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


@pytest.mark.slow
def test_generate_takes_a_shape(monkeypatch, tmp_path):
    monkeypatch.setitem(shapes.SHAPES, "toy", lambda: build("gemma3", "sdpa").config)
    path = tmp_path / "generate.csv"
    args = f"--model toy --device cpu --context 1k --new-tokens 4 --caches two_level --csv {path}"
    assert bench_generate.main(args.split()) == 0
    assert [(row["case"], row["context"]) for row in rows(path)] == [("toy:float32", "1024")]
    assert bench_generate.main(f"{args} --no-csv".split()) == 0
    assert len(rows(path)) == 1


def test_unknown_caches_are_named(capsys):
    for name, message in (("sdpa_best", "sdpa_best is no cache"), ("paged", "no variant 'paged'; known: hf_dynamic")):
        with pytest.raises(SystemExit):
            bench_generate.arguments().parse_args(["--caches", name])
        assert message in capsys.readouterr().err


def test_sampled_tokens_are_drawn():
    model = build("llama", "sparsekv")
    cache = make_cache(model, VARIANTS["hf_dynamic"], None)
    filling.fill_cache(model, cache, 1, 50)
    found = decoding.generate(model, cache, 1, 12, sample=True, eos=True)
    assert found.tokens.shape == (1, 12), "the end of the text never comes"
    assert int(found.tokens.max()) < VOCAB
    assert len(found.tpot_ms) == 6
    assert found.first_ms > 0
