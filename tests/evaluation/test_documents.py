"""Documents that a user gives: which are read, and agreement over their first tokens."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from command_line import error, run
from models import model, prompt

from hf_sparsekv_eval import documents, forced
from hf_sparsekv_eval.cache_specs import parse_caches
from hf_sparsekv_eval.records import Results

SPEC = "token:block_size=16,window=16,token_budget=32,num_blocks=2,dense_layers=0,calibration_tokens=32"
CACHES = ("--cache", "full", "--cache", SPEC, "--cache", "streaming:block_size=16,window=16")


def text(seed: int, length: int) -> str:
    """Letters that the tiny model's tokenizer knows, a token each."""
    ids = torch.randint(0, 26, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(chr(ord("a") + i) for i in ids)


@pytest.fixture
def table(tmp_path):
    """Rows with one document twice, an empty one, and a short one."""
    path = tmp_path / "texts.csv"
    bodies = [text(1, 400), text(1, 400), "", text(2, 90), text(3, 500) + "\n\nline", text(4, 200_000)]
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("name", "body"), *((f"row {i}", body) for i, body in enumerate(bodies))])
    return path, bodies


def test_files_and_columns(table, tmp_path):
    path, bodies = table
    before = csv.field_size_limit()
    assert documents.read(path) == documents.read(path, "body") == [bodies[0], *bodies[3:]]
    assert documents.read(path, "name")[0] == "row 0" and csv.field_size_limit() == before
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("no document")
    assert documents.read(tmp_path) == ["first", "second"]
    assert documents.read(tmp_path / "c.md") == ["no document"]


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.csv", b"x,y\n1,2\n", "z", "has no column 'z'; it has x, y"),
        ("a.csv", b"x,y\n", None, "has no rows under a header"),
        ("a.csv", b"x,y\n , \n", None, "holds no text"),
        ("a.txt", b"\xff\xfe", None, "is not UTF-8 text"),
        ("a.txt", b" \n", None, "holds no text"),
        ("a.txt", b"words", "y", "can only be that of a .csv file"),
        ("", b"", None, r"has no \.txt files"),
        ("none.txt", None, None, "cannot read"),
    ],
)
def test_wrong_documents(name, content, column, message, tmp_path):
    if content and name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message):
        documents.read(tmp_path / name, column)


def test_agreement_over_documents(tiny, table, tmp_path):
    """Three caches, one prefill for each document; a second run measures only what is new."""
    path, _ = table
    args = ("eval", "agreement", tiny, "--documents", path, "--tokens", 12, "--out", tmp_path / "out", *CACHES)
    said = run(*args, "--lengths", "100,200", "--samples", 1)
    assert "KL p95" in said.stdout
    whole = json.loads((tmp_path / "out" / "results.json").read_text())["figures"]
    found = {(f["length"], f["cache"], f["measure"]): f["value"] for f in whole}
    assert {n for n, *_ in found} == {100, 200}
    assert found[200, "full", "KL p95"] == 0 < found[200, SPEC, "KL"] < found[200, SPEC, "KL p95"]
    assert found[200, "full", "attended"] == 1 > found[200, SPEC, "attended"]
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    more = run(*args, "--lengths", "100,200,450", "--samples", 9)
    again = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [json.dumps(record) for record in again[: len(lines)]] == lines
    # Of four texts the third and fourth have 463 tokens.
    assert sorted({(r["length"], r["index"]) for r in again}) == [
        *((n, i) for n in (100,) for i in (0, 2, 3)), *((n, i) for n in (200,) for i in (0, 2, 3)), (450, 2), (450, 3)
    ]  # fmt: skip
    assert "2 passages of 463 tokens are in 4 documents: --samples 9 is more" in more.stderr
    assert "then --tokens 12, now --tokens 200" in error(*(a for a in args if a not in ("--tokens", 12)))


def test_percentile_is_that_of_the_steps():
    """And batches do not change it, nor the numbers that passages are kept under."""
    net, words = model("llama"), prompt(1, 700)["input_ids"][0]
    found = []
    for batch in (1, 3):
        results = Results(None, {})
        args = words, [0, 150, 400], 120, 20, parse_caches(["full", SPEC]), results, "agreement"
        forced.evaluate(net, *args, batch, indices=[4, 7, 9])
        assert {record.index for record in results.records.values()} == {4, 7, 9}
        found.append({key: record.values for key, record in results.records.items()})
    for key, values in found[0].items():
        other = found[1][key]
        del values["attended"], other["attended"]  # a share of the batch
        assert other == pytest.approx(values, rel=1e-3, abs=1e-4)
        assert key[-1] == "full" or values["kl"] / values["tokens"] < values["kl_p95"] < values["kl"]


def test_own_output_over_documents(tiny, table, tmp_path):
    path, _ = table
    args = ("--lengths", "100", "--tokens", "8", "--window", "4", "--samples", "2", *CACHES, "--out", tmp_path / "out")
    said = run("eval", "output", tiny, "--documents", path, *args)
    assert "first difference" in said.stdout
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["index"] for line in lines} == {0, 2}


def test_wrong_options_are_told_before_a_model_is_loaded(tmp_path):
    for task in ("agreement", "output"):
        given = ("--documents", tmp_path, "--text-file", __file__)
        assert "take one of them" in error("eval", task, "smal", *given, status=2)
        assert "--column is of --documents" in error("eval", task, "smal", "--column", "x", status=2)
        assert "--join is of --documents" in error("eval", task, "smal", "--join", status=2)
        assert "has no .txt files" in error("eval", task, "smal", "--documents", tmp_path)
    (tmp_path / "a.txt").write_text("few words")


def test_documents_that_are_too_short(tiny, tmp_path):
    (tmp_path / "a.txt").write_text("few words")
    args = ("--documents", tmp_path / "a.txt", "--lengths", "100", "--out", tmp_path / "out")
    assert "the longest of 1 documents has 9 tokens, and 301 are needed" in error("eval", "agreement", tiny, *args)
    assert "1 documents have 9 tokens together, and 301 are needed" in error("eval", "agreement", tiny, *args, "--join")


def test_short_documents_may_be_joined():
    """A passage has the number of the document that it begins with."""

    def words(text, **_):
        return {"input_ids": torch.tensor([[int(word) for word in text.split()]])}

    texts = ["1 2 3", "4 5", "6", "7 8 9 10", "11"]
    alone, joined = (documents.passages(words, texts, 4, 9, join) for join in (False, True))
    assert (alone.words.tolist(), alone.starts, alone.indices) == ([7, 8, 9, 10], [0], [3])
    assert joined.words.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert (joined.starts, joined.indices) == ([0, 4], [0, 2])
    assert documents.passages(words, texts, 4, 1, True).indices == [0]
