"""Peers on the same prompts: the file of prompts, the loop that answers them, rows, and their table."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch
from inside import attention_of
from models import build
from read_rows import read_rows
from tokenizers_made import byte_level
from transformers import DynamicCache

from benchmarks.peers import (
    answering,
    measuring,
    prompt_file,
    prompts,
    report,
    row_file,
    run_kvpress,
    run_ours,
)
from benchmarks.peers.prompt_file import Prompt
from hf_sparsekv.results import Row
from hf_sparsekv_eval.samples import Sample, found_share

ROOT = Path(__file__).parents[2]
TEXT = "A text.\nWith lines.\nWhat is there?<|assistant|>There is"


def sample(references=("one", "two"), score=found_share, text: str = TEXT) -> Sample:
    return Sample("task", 100, 0, tuple(byte_level()(text)["input_ids"]), references, 8, score, frozenset({7}))


def prompt(length: int = 60, question: int = 50, **other) -> Prompt:
    ids = tuple(torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(1)).tolist())
    return Prompt("task", 0, 64, ids, question, ("no such thing",), "share", 8, **other)


# ---------------------------------------------------------------------- the file


def test_the_question_is_the_last_line_of_the_users_turn():
    tokenizer, made = byte_level(), sample()
    suffix = prompts.chat_suffix(tokenizer)
    assert suffix == "<|assistant|>"
    begin = prompts.question_begins(tokenizer, made.ids, suffix)
    assert tokenizer.decode(made.ids[begin:]) == "What is there?<|assistant|>There is"
    plain = byte_level()("A text.\nWhat is there? There is")["input_ids"]
    assert tokenizer.decode(plain[prompts.question_begins(tokenizer, tuple(plain)) :]) == "What is there? There is"
    with pytest.raises(ValueError, match="a single line"):
        prompts.question_begins(tokenizer, tuple(tokenizer("one line")["input_ids"]))


@pytest.mark.parametrize("chat", [True, False])
def test_rulers_prompts_are_written_and_read(tmp_path, chat):
    tokenizer, path = byte_level(), tmp_path / "prompts.jsonl"
    made = list(prompts.make(tokenizer, ["niah_single_1", "vt"], 3000, range(2), 0, chat))
    assert prompt_file.write(path, made) == 4 and prompt_file.read(path) == made
    for one in made:
        ask = tokenizer.decode(one.ids[one.question :])
        assert ask.startswith(("What is the special magic number", "Question: which variables"))
        assert one.scored(" ".join(one.references).upper()) == 1 and one.scored("") == 0
    assert [one.task for one in prompt_file.read(path, ["vt"], 1)] == ["vt"]
    with pytest.raises(ValueError, match="no task 'fwe'; it has niah_single_1, vt"):
        prompt_file.read(path, ["fwe"])
    before = prompt_file.fingerprint(path)
    prompt_file.write(path, made[:3])
    assert prompt_file.fingerprint(path) != before


# ---------------------------------------------------------------------- answers


@pytest.fixture(scope="module")
def model():
    return build("llama", "sdpa")


def tokens(model, system, one: Prompt, question: str, count: int = 12) -> list[int]:
    for answer in answering.decode(model, system, one, question):
        if len(answer.tokens) == count:
            return answer.tokens


@pytest.mark.parametrize("name", ["full", "mine=token:token_budget=4096", "offloaded", "quest:4096"])
def test_every_way_to_ask_gives_the_tokens_of_generate(model, name):
    one = prompt(300, 280)
    wanted = model.generate(torch.tensor([one.ids]), max_new_tokens=12, do_sample=False)[0, 300:].tolist()
    with run_ours.make(name, model) as system:
        for question in ("inside", "after", "steps"):
            assert tokens(model, system, one, question) == wanted
    assert attention_of(model) == "sdpa"


def test_bytes_of_what_is_held_masked_and_quantised(model):
    cache = DynamicCache()
    model(torch.tensor([prompt().ids]), past_key_values=cache)
    every = 2 * 2 * 60 * 2 * 16 * 4  # keys and values of two layers, 60 tokens, two heads of 16, fp32
    assert run_kvpress.sizes(model, cache) == answering.Sizes(every, 0, every) == run_ours.sizes(cache)
    model.model.layers[0].self_attn.masked_key_indices = (torch.zeros(10), torch.zeros(10), torch.arange(10))
    try:
        assert run_kvpress.sizes(model, cache).read == every - 10 * 2 * 16 * 4
    finally:
        del model.model.layers[0].self_attn.masked_key_indices
    codes = {"codes": torch.zeros(8, dtype=torch.uint8), "meta": {"scale": torch.zeros(2)}, "nbits": 4}
    assert run_kvpress.tensor_bytes([codes, None]) == 8 + 8


# ---------------------------------------------------------------------- rows


def test_what_kvpress_runs_in_imports_nothing_of_ours():
    files = ("__init__", "answering", "measuring", "prompt_file", "row_file", "run_kvpress")
    for path in (ROOT / "benchmarks/__init__.py", *(ROOT / f"benchmarks/peers/{name}.py" for name in files)):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("hf_sparsekv") for name in names), path
    assert [*row_file.HEADER[:10]] == [field.name for field in dataclasses.fields(Row)]


@pytest.mark.slow
def test_both_runs_append_rows_that_one_table_shows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measuring, "TIMED", 2)
    where, file, rows = tmp_path / "Tiny", tmp_path / "prompts.jsonl", tmp_path / "peers.csv"
    tokenizer = byte_level()
    tiny = build("llama", "sdpa", vocab_size=len(tokenizer), max_position_embeddings=4096)
    tiny.save_pretrained(where)
    tokenizer.save_pretrained(where)
    made = prompts.make(tokenizer, ["niah_single_1", "vt"], 1000, range(1), 0, True)
    prompt_file.write(file, [dataclasses.replace(one, max_new_tokens=4) for one in made])
    shared = (
        f"--model {where} --prompts {file} --csv {rows} --device cpu --dtype float32 --timed 1 --commit abc".split()
    )
    answers = tmp_path / "answers.jsonl"
    assert run_kvpress.main([*shared, "--systems", "full", "--answers", str(answers)]) == 0
    assert run_ours.main([*shared, "--systems", "default", "offloaded", "--no-scores"]) == 0
    assert run_ours.main([*shared, "--systems", "default", "--timed", "0", "--tasks", "vt"]) == 0
    with pytest.raises(SystemExit, match="write full, NAME=SPEC, or one of default"):
        run_ours.main([*shared, "--systems", "snap"])
    assert len(answers.read_text().splitlines()) == 4
    assert {row["case"] for row in read_rows(rows)} == {"Tiny"}
    capsys.readouterr()
    report.main(["--csv", str(rows)])
    table = capsys.readouterr().out
    assert table.startswith("Tiny, prompts of 1,000 tokens, cpu") and table.count("| abc |") == 3
    full, default, offloaded = (line for line in table.splitlines() if "abc" in line)
    assert full.startswith("| transformers:full | 0.0 | 0.0 |")
    assert default.startswith("| hf-sparsekv:default | 0.0 (1 of 2 tasks) | 0.0 (1 of 2 tasks) |")
    assert offloaded.startswith("| hf-sparsekv:offloaded | not run | not run |")


def row(variant: str, metric: str, value: float, prompts: str = "aa", commit: str = "c1") -> dict:
    about = {"case": "m", "context": "16384", "device": "GPU", "versions": f"torch=2;prompts={prompts}"}
    return {**about, "variant": variant, "metric": metric, "value": str(value), "commit": commit}


def test_newest_rows_of_the_same_prompts_are_merged():
    rows = [
        row("a", "score:inside:vt", 0.1),
        row("a", "score:inside:vt", 0.5, commit="c2"),
        row("a", "score:inside:fwe", 1.0),
        row("a", "score:steps:vt", 0.25),
        row("b", "score:after:vt", 0.75),
        row("b", "read_mb", 12.34),
        row("b", "host_gb", 0.0),
        row("a", "score:inside:vt", 1.0, prompts="bb"),
    ]
    found = report.merge(rows)
    assert [setting.prompts for setting in found] == ["aa", "bb"]
    first = next(iter(found))
    assert report.lines(found[first]) == [
        ["system", "question inside", "question after", "read a token, MB", "commit"],
        ["a", "75.0", "25.0 (1 of 2 tasks)", "", "c1, c2"],
        ["b", "not run", "75.0 (1 of 2 tasks)", "12.3", "c1"],
    ]
    assert str(first) == "m, prompts of 16,384 tokens, GPU" and report.markdown({}) == report.NOTHING
