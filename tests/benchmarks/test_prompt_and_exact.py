"""The benchmarks of prompts and of exact mode: arguments, and rows of a tiny model."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest
from models import build
from read_rows import read_rows

from benchmarks import audit, exact, prompt
from benchmarks.arguments import parse_kv


@pytest.mark.parametrize(
    ("text", "place"),
    [("32k", (1, 32768, None)), ("8k:0.5", (1, 8192, 0.5)), ("4x16k", (4, 16384, None))],
)
def test_places_of_prompts(text, place):
    assert prompt.parse_place(text) == place


@pytest.mark.parametrize("text", ["32k:", "32k:much", "32k:0", "32k:1.5", "2x8k:0.5", "0x4k", "x"])
def test_wrong_places(text):
    with pytest.raises(ArgumentTypeError):
        prompt.parse_place(text)


@pytest.mark.parametrize("text", ["replayed:", "replayed:0", "replayed:3", "random:1", "recorded", "replayed:nan"])
def test_wrong_keys(text):
    with pytest.raises(ArgumentTypeError, match="SPREAD"):
        parse_kv(text)


@pytest.mark.parametrize("text", ["random", "replayed", "replayed:0.5"])
def test_keys(text):
    assert parse_kv(text) == text


@pytest.mark.slow
def test_rows_of_exact_mode(tmp_path, monkeypatch):
    monkeypatch.setattr(exact, "known_config", lambda *_: None)
    monkeypatch.setattr(exact, "random_model", lambda *_: build("llama", "sparsekv"))
    path = tmp_path / "exact.csv"
    given = ["--shapes", "2x300", "--tokens", "24", "--lead", "8", "--repeats", "2", "--acceptance", "0.9"]
    assert exact.main([*given, "--budget", "64", "--csv", str(path)]) == 0
    rows = read_rows(path)
    assert {row["variant"] for row in rows} == {"token_only:budget=64"}
    assert {row["metric"] for row in rows} == {
        *("dense_step_ms", "sparse_step_ms", "verify_4_ms", "verify_8_ms", "verify_16_ms", "dense:tpot_ms"),
        *("exact:accepted=0.9:first:tpot_ms", "exact:accepted=0.9:later:tpot_ms"),
    }


@pytest.mark.slow
def test_rows_of_audits(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "known_config", lambda *_: None)
    monkeypatch.setattr(audit, "random_model", lambda *_: build("llama", "sparsekv"))
    path = tmp_path / "audit.csv"
    given = ["--shapes", "2x300", "--tokens", "8", "--lead", "4", "--interval", "4", "--repeats", "1", "--kv", "random"]
    assert audit.main([*given, "--csv", str(path)]) == 0
    assert {row["metric"] for row in read_rows(path)} == {
        f"{name}:interval=4:tpot_ms" for name in ("without", "audit", "max_loss=1")
    }


@pytest.mark.slow
def test_rows_of_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt, "known_config", lambda *_: None)
    monkeypatch.setattr(prompt, "random_model", lambda *_: build("llama", "sdpa"))
    path = tmp_path / "prompt.csv"
    assert prompt.main(["--at", "900:0.5", "2x200", "--chunk", "512", "--csv", str(path)]) == 0
    rows = {(row["variant"], row["batch"], row["context"], row["metric"]) for row in read_rows(path)}
    exact = {
        (name, batch, context, metric)
        for name, batch, context in (("exact:chunk=512", "1", "900"), ("exact", "2", "200"))
        for metric in ("prompt_s", "prompt_s:first")
    }
    assert exact <= rows and ("density=0.5:chunk=512", "1", "900", "density") in rows
