"""Tasks of ``hf-sparsekv eval``: prompts, answers, scores, and the commands on tiny models."""

from __future__ import annotations

import json
import random
import re
import string
import sys
from collections import Counter
from pathlib import Path

import pytest
from command_line import error, run
from inside import other_texts
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from probe_training import network

from hf_sparsekv_eval import longbench, needles, ruler, ruler_probe
from hf_sparsekv_eval import probe_language as lang
from hf_sparsekv_eval.measures import Figure
from hf_sparsekv_eval.records import Results
from hf_sparsekv_eval.samples import exact, found_share

SETTINGS = "block_size=16,window=16,max_draft=4,dense_layers=0,token_budget=32"
CACHES = ("--cache", "full", "--cache", f"two_level:{SETTINGS},num_blocks=4,calibration_tokens=32")


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of characters: a token is a letter."""
    signs = ["<unk>", "</s>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(WordLevel({c: i for i, c in enumerate(signs)}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> Path:
    """A probe model of toy size that was never trained."""
    path = tmp_path_factory.mktemp("probe")
    size = network.Size(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, ffn=48)
    network.build("gqa", size, seed=0).save_pretrained(path)
    lang.build_tokenizer(network.MAX_LENGTH).save_pretrained(path)
    return path


# ---------------------------------------------------------------------- ruler


@pytest.fixture(autouse=True, scope="module")
def essay():
    """A text with sentences of some eighty letters: those of Python's language reference change with its version, and
    are up to 3,000 letters long, so that a prompt that has no room for the next one may be a quarter too short."""
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randrange(4, 11))) for _ in range(3000)]
    text = " ".join(" ".join(rng.sample(words, 10)) + "." for _ in range(3000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ruler, "python_reference", lambda: text)
        other_texts()
        yield
    other_texts()


def words_of(tokenizer, sample) -> str:
    return tokenizer.decode(sample.ids)


@pytest.mark.parametrize("family", ruler.FAMILIES)
def test_ruler_prompts_fit_and_hold_their_answers(family: str, letters) -> None:
    length = 7_000
    sample = ruler.make_sample(letters, family, length, 0)
    assert 0.9 * length - 600 < len(sample.ids) <= length - sample.max_new_tokens
    assert sample == ruler.make_sample(letters, family, length, 0) != ruler.make_sample(letters, family, length, 1)
    text = words_of(letters, sample)
    low = [reference.lower() for reference in sample.references]
    several = {"vt": 5, "cwe": 10, "fwe": 3, "niah_multivalue": 4, "niah_multiquery": 4}
    assert len(set(low)) == len(low) == several.get(family, 1)
    if family == "vt":
        first, *_ = re.findall(r"have the value (\d+)", text)
        given = dict(re.findall(r"VAR (\w{5}) = (?:VAR )?(\w+)", text))
        held = first
        for name in sample.references:  # in the order of the chain
            assert given[name] == held
            held = name
    elif family in ("cwe", "fwe"):
        found = re.findall(r"\d+\. (\w+)", text) if family == "cwe" else re.findall(r"\b[a-z]{6}\b", text)
        best = [word for word, _ in Counter(found).most_common(len(sample.references))]
        assert set(best) == set(sample.references)
    else:
        facts = re.findall(r"magic (?:number|uuid) for ([\w-]+) is: ([\w-]+)\.", text)
        asked = re.findall(r"magic (?:number|uuid)s? for ([\w, -]+) mentioned", text)[-1]
        keys = re.split(r", and |, ", asked)
        assert sorted(v for k, v in facts if k in keys) == sorted(sample.references)
        needle = ruler.NEEDLES[family]
        assert len(facts) >= needle.facts * needle.per_key and (needle.haystack == "needles") == (len(facts) > 4)


def test_ruler_says_what_is_wrong(letters) -> None:
    with pytest.raises(ValueError, match="no family 'niah'"):
        ruler.make_sample(letters, "niah", 4096, 0)
    with pytest.raises(ValueError, match="does not fit into 200 tokens"):
        ruler.make_sample(letters, "niah_single_1", 200, 0)
    assert found_share("the numbers are 12 and 34", ("12", "34", "56", "78")) == 0.5
    assert exact(" a  b ", ("a b",)) == 1 and exact("a b c", ("a b",)) == 0


@pytest.mark.parametrize("family", ruler_probe.FAMILIES)
def test_probe_answers_follow_from_the_text(family: str) -> None:
    tokenizer = lang.build_tokenizer(65536)
    sample = ruler_probe.make_sample(tokenizer, family, 1024, 3)
    assert sample == ruler_probe.make_sample(tokenizer, family, 1024, 3)
    words = words_of(tokenizer, sample).split()
    assert len(sample.ids) + sample.max_new_tokens == 1024
    answer = sample.references[0].split()
    facts: dict[tuple, list] = {}
    for i, word in enumerate(words):
        if word == "fact":
            facts.setdefault(tuple(words[i + 1 : i + 3]), []).append(words[i + 3 : i + 5])
    if family == "vt":
        held, expected = {tuple(words[-2:])}, []
        for i, word in enumerate(words):
            if word == "var" and tuple(words[i + 4 : i + 6]) in held:
                held.add(tuple(words[i + 1 : i + 3]))
                expected += words[i + 1 : i + 3]
    elif family == "multiquery":
        keys = [tuple(words[i : i + 2]) for i in range(len(words) - 9, len(words) - 1, 2)]
        expected = [part for key in keys for part in (*key, *facts[key][0])]
    else:
        expected = [part for value in facts[tuple(words[-2:])] for part in value]
    assert answer == expected
    assert len(facts) >= (15 if family.startswith("multikey") else 0)


def test_needles_lie_where_they_are_asked_to(letters) -> None:
    tokenizer = lang.build_tokenizer(65536)
    for depth, place in ((0.0, 1), (0.5, 251), (1.0, 500)):
        sample = needles.make_sample(tokenizer, 512, depth, 0)
        words = words_of(tokenizer, sample).split()
        at = words.index("fact")
        assert (len(words), at) == (509, place)
        assert words[at + 1 : at + 3] == words[-2:] and sample.references == (" ".join(words[at + 3 : at + 5]),)
    sample = needles.make_sample(letters, 2000, 0.5, 0)
    text = words_of(letters, sample)
    assert 1500 < len(sample.ids) < 2100 and 0.3 < text.index(sample.references[0]) / len(text) < 0.7


# ---------------------------------------------------------------------- longbench


def test_longbench_metrics() -> None:
    score = longbench.score_answer
    assert score("hotpotqa", "The Eiffel Tower.", ("eiffel tower", "x")) == 1
    assert score("qasper", "a red fox ran", ("red fox",)) == pytest.approx(0.8)
    assert score("triviaqa", "\nParis\nQuestion: more Rome", ("Paris",)) == 1
    assert score("passage_count", "5 or 7", ("7",)) == 0.5 and score("passage_count", "none", ("7",)) == 0
    assert score("passage_retrieval_en", "Paragraph 12", ("Paragraph 12",)) == 1
    classes = ("Date", "Other entity", "Entity")
    assert score("trec", "Date", ("Date",), classes) == 1
    assert score("trec", "Date, or Entity", ("Date",), classes) == 0.5
    assert score("trec", "Other entity", ("Other entity",), (*classes, "entity")) == 1
    assert score("lcc", "# no\n    return x\n}", ("    return x",)) == 1
    assert score("lcc", "# no", ("return x",)) == 0
    pytest.importorskip("rouge", reason="the package rouge is not installed")
    assert score("gov_report", "the cat sat on the mat", ("the cat sat on the mat",)) == pytest.approx(1)
    assert 0.4 < score("gov_report", "the cat sat", ("the cat sat on a mat",)) < 0.9
    assert score("gov_report", " ", ("x",)) == 0


@pytest.fixture(scope="module")
def local_longbench(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("longbench")
    row = {
        "context": "fox and dog " * 400,
        "input": "who?",
        "answers": ["the fox"],
        "all_classes": None,
        "length": 1200,
    }
    (path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "context": "short"}) + "\n")
    row = {"context": "Question: x\nType: Date\n", "question": "Question: y\nType:", "answers": ["Date"]}
    (path / "trec.jsonl").write_text(json.dumps({**row, "all_classes": ["Date", "Entity"]}) + "\n")
    (path / "qasper.jsonl").write_text('{"context": "x"}\n')
    return path


def test_longbench_prompts_lose_their_middle(local_longbench, letters) -> None:
    rows = longbench.load_rows("hotpotqa", str(local_longbench))
    long, short = (longbench.make_sample(letters, "hotpotqa", row, i, 1000) for i, row in enumerate(rows))
    assert len(long.ids) == 1000 - 32 and len(short.ids) < len(long.ids)
    assert words_of(letters, long).startswith("Answer the question based on the given passages. Only")
    assert words_of(letters, long).endswith("Question: who?\nAnswer:")
    assert len(longbench.tasks()) == 16
    for task, about in longbench.tasks().items():
        assert "{context}" in about["prompt"] and about["metric"] in longbench.METRICS, task
    with pytest.raises(ValueError, match="no task 'dureader'"):
        longbench.load_rows("dureader", str(local_longbench))
    with pytest.raises(ValueError, match="there is no"):
        longbench.load_rows("lcc", str(local_longbench))
    with pytest.raises(ValueError, match="has no input, answers"):
        longbench.load_rows("qasper", str(local_longbench))


# ---------------------------------------------------------------------- commands


def figures(out: Path) -> list[Figure]:
    return [Figure(**f) for f in json.loads((out / "results.json").read_text())["figures"]]


def test_eval_ruler_on_a_probe_goes_on_where_it_stopped(probe, tmp_path) -> None:
    args = ("eval", "ruler", probe, "--lengths", "256", "--batch", "2", "--question-steps", "3", "--out", tmp_path)
    result = run(*args, *CACHES, "--samples", "2", "--families", "single,vt")
    assert "| full |" in result.stdout and "average" in result.stdout and "## 256 tokens" in result.stdout
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(lines) == 8
    run(*args, *CACHES, "--cache", f"random:{SETTINGS}", "--samples", "2", "--families", "single,vt")
    again = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert again[:8] == lines and len(again) == 12
    assert {f.task for f in figures(tmp_path)} == {"single", "vt", "average"}
    attended = {f.cache: f.value for f in figures(tmp_path) if f.measure == "attended" and f.task == "vt"}
    assert attended["full"] == 1 and all(v < 0.6 for name, v in attended.items() if name != "full")
    assert "holds results of another run (then --seed 0, now --seed 1)" in error(*args, "--seed", "1", *CACHES)


def test_eval_goes_on_over_damaged_files_or_says_what_to_do(probe, tmp_path) -> None:
    args = ("eval", "ruler", probe, "--lengths", "256", "--samples", "2", "--families", "single", "--cache", "full")
    args = (*args, "--out", tmp_path / "out")
    held, settings = tmp_path / "out" / "samples.jsonl", tmp_path / "out" / "settings.json"
    assert "no family" in error(*args, "--families", "cwe", status=2)
    assert not list(tmp_path.iterdir()), "a run that fails at once leaves nothing behind, and no lock"
    run(*args)
    lines = held.read_bytes().splitlines(keepends=True)
    held.write_bytes(lines[0] + bytes(64) + b"\n\xff\n" + lines[1][:-9])
    told = " ".join(run(*args).stderr.split())
    assert "warning:" in told and f"{held}: 3 damaged lines skipped (line 2 is not JSON, or cut off; line 3 is" in told
    assert [f.samples for f in figures(tmp_path / "out")] == [2, 2, 2]
    assert held.read_bytes().endswith(lines[1][:-9] + b"\n" + lines[1])
    with Results(tmp_path / "out", json.loads(settings.read_text())):
        assert f"another run writes to {tmp_path / 'out'}: wait until it has ended" in error(*args)
    settings.write_bytes(settings.read_bytes()[:20])
    assert f"{settings} is damaged" in error(*args)


def test_eval_reads_a_file(probe, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"lengths: [256, 320]\nsamples: 1\nfamilies: single\nout: {tmp_path}/out\n"
        f"caches:\n- full\n- {{name: ours, cache: random, {SETTINGS.replace('=', ': ').replace(',', ', ')}}}\n"
    )
    run("eval", "ruler", probe, "--config", file, "--samples", "2")
    records = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert Counter((r["cache"], r["length"]) for r in records) == {
        (c, n): 2 for c in ("full", "ours") for n in (256, 320)
    }
    file.write_text("lenghts: 256\n")
    assert "no option 'lenghts'" in error("eval", "ruler", probe, "--config", file, status=2)
    file.write_text("- full\n")
    assert "must hold a mapping" in error("eval", "ruler", probe, "--config", file, status=2)


@pytest.mark.few(which=("tiny",))
@pytest.mark.parametrize("which", ["probe", "tiny"])
def test_eval_needle_draws_a_heat_map(which: str, request, tmp_path) -> None:
    model = request.getfixturevalue(which)
    lengths = "256,320" if which == "probe" else "900"
    run("eval", "needle", model, "--lengths", lengths, "--depths", "3", "--out", tmp_path, *CACHES)
    assert (tmp_path / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert {f.task for f in figures(tmp_path)} == {"depth 0.00", "depth 0.50", "depth 1.00", "average"}


@pytest.mark.quick
@pytest.mark.parametrize(("which", "task"), [("tiny", "perplexity"), ("probe", "agreement")])
def test_eval_of_held_out_text(which: str, task: str, request, tmp_path) -> None:
    model = request.getfixturevalue(which)
    run("eval", task, model, "--lengths", "200", "--tokens", "8", "--samples", "2", "--out", tmp_path, *CACHES)
    found = {(f.cache, f.measure): f.value for f in figures(tmp_path)}
    assert found["full", "perplexity"] > 1 and found["full", "attended"] == 1
    if task == "agreement":
        assert found["full", "KL"] == 0 and found["full", "top-1 agreement"] == 1
        assert max(v for (_, m), v in found.items() if m == "KL") > 0


def test_eval_longbench_reads_local_files(tiny, local_longbench, tmp_path) -> None:
    args = ("eval", "longbench", tiny, "--data", local_longbench, "--tasks", "hotpotqa,trec", "--max-length", "600")
    result = run(*args, "--out", tmp_path, *CACHES)
    assert "## all lengths" in result.stdout
    assert {f.task: f.samples for f in figures(tmp_path)} == {"hotpotqa": 2, "trec": 1, "average": 3}


def test_eval_says_what_is_wrong(probe, tiny, tmp_path) -> None:
    out = ("--out", tmp_path / "out")
    assert "unknown method" in error("eval", "ruler", probe, "--cache", "nothing", *out, status=2)
    assert "no family 'cwe'" in error("eval", "ruler", probe, "--families", "cwe", *out, status=2)
    assert "is no length" in error("eval", "ruler", probe, "--lengths", "long", *out, status=2)
    assert "no chat template" in error("eval", "ruler", tiny, "--chat", "--lengths", "1k", *out)
    assert "no task" in error("eval", "longbench", probe, "--tasks", "x", *out, status=2)
    assert "needs a GPU" in error("eval", "agreement", probe, "--capture", "--device", "cpu", *out)
    data = ("--data", tmp_path, "--max-length", "4k,8k", "--out", tmp_path / "o4")
    assert "'4k,8k' is no length" in error("eval", "longbench", tiny, *data, status=2)
    short = tmp_path / "short.txt"
    short.write_text("few words")
    assert "longer text" in error(
        "eval", "agreement", tiny, "--lengths", "1k", "--text-file", short, "--out", tmp_path / "o2"
    )
    assert "cannot read" in error("eval", "agreement", tiny, "--text-file", tmp_path / "no", "--out", tmp_path / "o3")
