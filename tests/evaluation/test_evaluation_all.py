"""Long tasks, long own output, and ``hf-sparsekv eval all`` with its report."""

from __future__ import annotations

import json
import re

import pytest
import torch
from command_line import error, run
from models import model, prompt
from test_evaluation_tasks import letters, probe  # noqa: F401 (fixtures)

from hf_sparsekv_eval import drift, generation, long_tasks, report
from hf_sparsekv_eval.cache_specs import parse_caches
from hf_sparsekv_eval.long_tasks import FIELDS, JsonFields, Keywords, Literal
from hf_sparsekv_eval.measures import Figure, Record
from hf_sparsekv_eval.prefix import Prefix, greedy_rows, prefill
from hf_sparsekv_eval.records import Results
from hf_sparsekv_eval.samples import Sample, found, found_share

TIGHT = "block_size=16,window=16,max_draft=4,dense_layers=0,token_budget=32"
CACHES = ("full", f"two_level:{TIGHT},num_blocks=4,calibration_tokens=32")


# ---------------------------------------------------------------------- tasks


@pytest.mark.parametrize("family", long_tasks.FAMILIES)
def test_long_tasks_fit_and_hold_their_answers(family: str, letters) -> None:  # noqa: F811
    length = 4500
    sample = long_tasks.make_sample(letters, family, length, 0)
    assert 0.8 * length < len(sample.ids) <= length - sample.max_new_tokens
    again = long_tasks.make_sample(letters, family, length, 0)
    assert sample == again != long_tasks.make_sample(letters, family, length, 1)
    assert again.ids != long_tasks.make_sample(letters, family, length, 0, seed=1).ids
    text = letters.decode(sample.ids)
    right, wrong = ANSWERS[family.split("_")[0] if family.startswith("chain") else family](text, sample)
    assert sample.score(right, sample.references) == 1 and set(sample.parts(right)) == {1.0}
    assert sample.score(wrong, sample.references) == 0, "a distractor is no answer"


def _follow_chain(text: str, sample: Sample) -> tuple[str, str]:
    """The answer by following the facts from the lead; another chain's."""
    facts = (
        r"The ([a-z ]+) opens with the ([a-z]+) key\.",
        r"The ([a-z]+) key belongs to (\w+ \w+)\.",
        r"(\w+ \w+) lives in (\w+)\.",
        r"The postal number of (\w+) is (\d{5})\.",
    )
    hops = int(sample.task[-1])
    held = [dict(re.findall(fact, text)) for fact in facts]
    assert [len(each) for each in held] == [0] * (4 - hops) + [5] * hops, "four chains beside the one"
    lead = text[text.index("at the end.") :]
    start = next(name for name in held[-hops] if name in lead)
    other = next(name for name in held[-hops] if name != start)
    answers = []
    for name in (start, other):
        said = []
        for step in held[-hops:]:
            name = step[name]
            said.append(name)
        answers.append(said)
    assert tuple(answers[0]) == sample.references and sample.parts(answers[0][0]) == (1.0, *[0.0] * (hops - 1))
    return ", ".join(answers[0]), ", ".join(answers[1])


def _constants(text: str, sample: Sample) -> tuple[str, str]:
    held = dict(re.findall(r"^([A-Z_]+) = (\d+)$", text, re.MULTILINE))
    name = re.search(r"assert ([A-Z_]+) ==$", text)[1]
    return f" {held[name]}  # as above", f" {next(v for k, v in held.items() if k != name)} or {held[name]}"


def _signatures(text: str, sample: Sample) -> tuple[str, str]:
    held = {name: rest.split(", ") for name, rest in re.findall(r"def (\w+)\(entries, \*, ([\w, ]+)\)", text)}
    name, first = re.search(r"result = (\w+)\(entries, (\w+)=1,$", text).groups()
    assert len(held) == 5 and tuple(held[name]) == (first, *sample.references)
    other = next(v for k, v in held.items() if k != name)
    return (
        " " + ", ".join(f"{a}=max(1, 2)" for a in held[name][1:]) + ")",
        " " + ", ".join(f"{a}=1" for a in other) + f"); f({held[name][1]}=1)",
    )


def _times(text: str, sample: Sample) -> tuple[str, str]:
    held = re.findall(r"my (\w+'s \w+) arrives at (\d\d:\d\d)", text)
    asked = re.search(r"Your (\w+'s \w+) arrives at$", text)[1]
    assert len(held) == 5 and text.index(f"{asked} arrives at") < 0.6 * len(text), "in the first half"
    return f" {dict(held)[asked]} on Friday.", f" {next(time for who, time in held if who != asked)}."


def _ship(text: str, sample: Sample) -> tuple[str, str]:
    patterns = {key: line.replace(".", r"\.").replace("{value}", "(.+?)") for key, line in FIELDS.items()}
    asked = re.search(r"Extract the details of the (\w+)", text)[1]
    other = next(ship for ship in re.findall(r"The (\w+) sails under", text) if ship != asked)
    mine, others = (
        {key: re.search(pattern.replace("{ship}", ship), text)[1] for key, pattern in patterns.items()}
        for ship in (asked, other)
    )
    return tuple(json.dumps(held).removeprefix('{"captain":') for held in (mine, others))


ANSWERS = {
    "chain": _follow_chain,
    "code_constant": _constants,
    "code_call": _signatures,
    "dialogue": _times,
    "extract": _ship,
}


@pytest.mark.quick
def test_dialogues_use_the_chat_template(letters) -> None:  # noqa: F811
    letters.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    try:
        text = letters.decode(long_tasks.make_sample(letters, "dialogue", 3000, 0, chat=True).ids)
    finally:
        letters.chat_template = None
    roles = re.findall(r"\[(user|assistant)\]", text)
    assert len(roles) > 12 and roles == ["user", "assistant"] * (len(roles) // 2)
    assert re.search(r"What time was that\?\[end\]\[assistant\]Your \w+'s \w+ arrives at$", text)


WHOLE = ' "Ilse Varga", "tons": 5410}'


@pytest.mark.parametrize(
    ("output", "right"),
    [
        (WHOLE, (1, 1)),
        (WHOLE + "\nThis is the JSON {as asked}.", (1, 1)),  # text behind it
        (' "ilse  varga ", "tons": "5,410", "colour": "red"}', (1, 1)),  # spelled otherwise, and a field more
        (' "Ilse Varga", "tons": 5410.0}', (1, 1)),
        (' "Ilse Varga", "tonnage": 5410}', (1, 0)),  # another name
        (' "Ilse", "tons": 541}', (0, 0)),
        (' ["Ilse Varga"], "tons": true}', (0, 0)),  # other types
        (' "Ilse Varga",\n "tons": 5410,\n "built": 19', (1, 1)),  # cut off behind them
        (' "Ilse Varga", "tons": 5410', (1, 0)),  # cut off within a number, for all one knows
        (' "Ilse Var', (0, 0)),
        (" Ilse Varga, 5410 tons", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_json_is_scored_field_by_field(output: str, right: tuple) -> None:
    score = JsonFields(("captain", "tons"), '{"captain":')
    assert score(output, ("Ilse Varga", "5410")) == right
    if right == (1, 1):
        whole = "Here it is:\n```json\n" + '{"captain":' + output
        assert JsonFields(("captain", "tons"))(whole, ("Ilse Varga", "5410")) == right


def test_code_is_scored_up_to_the_end_of_the_call() -> None:
    assert Keywords()(" a=f(x, y=2), b=3)\nc=4", ("a", "b", "c")) == (1, 1, 0)
    assert Keywords()(" a == 1, b=2", ("a", "b")) == (0, 1), "cut off, and a comparison"
    assert [Literal()(text, ("4817",))[0] for text in (" 4817", "4_817\n", " 48170", " x 4817", "")] == [1, 1, 0, 0, 0]


# ---------------------------------------------------------------------- both ways, and against full attention


@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "gemma3"])
def test_a_prefix_that_is_cut_answers_as_a_shorter_prefill(name: str) -> None:
    net, inputs = model(name), prompt(2, 100, (0, 11))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    spec = parse_caches(CACHES)[1]
    ways = prefill(net, ids, mask=mask).cut(90), prefill(net, ids[:, :90], mask=mask[:, :90])
    got, expected = (generation.answer(net, way, spec.make(net.config), ids[:, 90:], 8, set()) for way in ways)
    assert got == expected


@pytest.mark.quick
def test_answers_are_compared_with_full_attentions(letters) -> None:  # noqa: F811
    """``kept`` counts parts that both find; agreement is that of teacher forcing."""
    net = model("llama")
    rows = prompt(2, 120)["input_ids"].tolist()
    prefix = prefill(net, torch.tensor(rows))
    truth = greedy_rows(net, prefix, *prefix.start(net, None), 12, set())
    words = [letters.decode(row) for row in truth]
    references = [(text[:3], text[-3:], "never in it") for text in words]
    samples = [
        Sample("t", 120, i, tuple(row), held, 12, found_share, items=found)
        for i, (row, held) in enumerate(zip(rows, references))
    ]
    results = Results(None, {})
    specs = parse_caches([*CACHES, "two_level:token_budget=4096"])
    generation.evaluate(net, letters, samples, specs, results, 2, 5, against=True)
    for i in range(2):
        full, tight, all_of_it = (results.records["t", 120, i, spec.name].values for spec in specs)
        assert full["score"] == full["stepped"] == pytest.approx(2 / 3)
        assert (full["known"], full["kept"], full["kept_stepped"], full["same"], full["tokens"]) == (2, 2, 2, 12, 12)
        assert all_of_it["same"] == 12 and all_of_it["kept"] == 2 and all_of_it["kl"] < 1e-4
        assert tight["same"] < 12 and tight["kl"] > 0.1 and tight["known"] == 2
        assert tight["kept"] <= 3 * tight["score"] + 1e-9
    kept = {f.cache: f.value for f in results.figures(generation.COMPARED) if f.measure == "kept"}
    assert kept["full"] == 1 and kept[specs[1].name] < 1
    only = Results(None, {})
    generation.evaluate(net, letters, samples, specs[1:2], only, steps=5, prefilled=False)
    for i in range(2):
        stepped = {k: v for k, v in results.records["t", 120, i, specs[1].name].values.items() if k == "stepped"}
        assert only.records["t", 120, i, specs[1].name].values.items() >= stepped.items()
        assert set(only.records["t", 120, i, specs[1].name].values) == {"stepped", "attended"}
    with pytest.raises(ValueError, match="nothing to answer"):
        generation.evaluate(net, letters, samples, specs, Results(None, {}), prefilled=False)


def test_figures_need_something_that_full_attention_finds() -> None:
    results = Results(None, {})
    for task, known, kept in (("a", 0, 0), ("b", 2, 1), ("b", 0, 0)):
        results.add(Record(task, 10, known, "full", {"score": 0.5, "stepped": 0.25, "kept": kept, "known": known}))
    figures = results.figures(generation.COMPARED)
    assert [(f.task, f.value) for f in figures if f.measure == "kept"] == [("b", 0.5)]
    assert all(f.low <= f.value <= f.high for f in figures)
    text = results.write(generation.COMPARED, "title")
    assert "**score / score in steps, %**" in text and "| full | 50.0 / 25.0 | 50.0 / 25.0 | 50.0 / 25.0 |" in text


# ---------------------------------------------------------------------- long own output


@pytest.mark.quick
def test_own_output_is_greedy_text_up_to_the_first_difference() -> None:
    net, ids = model("llama"), prompt(1, 100)["input_ids"]
    prefix = prefill(net, ids)
    stop = {greedy_rows(net, prefix, *prefix.start(net, None), 3, set())[0][2]}  # it would end here
    answer, after = drift.own_answer(net, prefix, 40, stop)
    assert answer.shape == (1, 40) and len(after) == 40 and not set(answer[0].tolist()) & stop
    specs, results = parse_caches([*CACHES, "two_level:token_budget=4096"]), Results(None, {})
    for _ in range(2):  # nothing is measured twice
        drift.evaluate(net, ids.tolist(), 100, 40, 16, specs, results, stop)
    tasks = {record.task for record in results.records.values()}
    assert tasks == {"1-16", "17-32", "33-40", "answer"} and len(results.records) == 12

    def of(spec, task: str) -> dict:
        return results.records[task, 100, 0, spec.name].values

    assert [of(specs[0], "answer")[k] for k in ("first", "attended")] == [40, 1]
    assert of(specs[2], "answer")["first"] == 40 and of(specs[2], "17-32")["kl"] < 1e-4
    tight = specs[1]
    assert of(tight, "33-40")["tokens"] == 8 and of(tight, "1-16")["kl"] > 0.1
    # The cache's own greedy text, with the same tokens barred, parts there.
    first = int(of(tight, "answer")["first"])
    assert 0 < first < 40
    own, logits = prefix.start(net, tight.make(net.config))
    for i in range(first + 1):
        logits = logits.float().clone()
        logits[:, sorted(stop)] = float("-inf")
        token = logits.argmax(-1)
        assert (int(token) == int(answer[0, i])) == (i < first)
        (logits,) = drift.forced_steps(net, own, token[:, None], Prefix(ids, [], None, None))
    figures = {(f.task, f.cache, f.measure): f.value for f in results.figures(drift.MEASURES)}
    assert figures["answer", tight.name, "first difference"] == first
    assert figures["average", "full", "KL"] == 0


def test_long_output_prompts_ask_for_a_long_answer(letters) -> None:  # noqa: F811
    words = torch.arange(3, 80).repeat(40)
    assert drift.prompts(letters, words, 500, 2, chat=False)[1] == words[-501:-1].tolist()
    letters.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    try:
        (ids,) = drift.prompts(letters, words, 500, 1, chat=True)
        with pytest.raises(ValueError, match="100 tokens have no room"):
            drift.prompts(letters, words, 100, 1, chat=True)
    finally:
        letters.chat_template = None
    assert 495 < len(ids) <= 500 and letters.decode(ids).endswith("as you can.<assistant>")


# ---------------------------------------------------------------------- the whole table

SMALL = (
    "--samples",
    "1",
    "--depths",
    "2",
    "--passages",
    "1",
    "--tokens",
    "4",
    "--answer-tokens",
    "12",
    "--window",
    "4",
)
SPARSE = ("--cache", CACHES[1])


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> tuple:
    """A text that is tokenized in no time."""
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text("".join(f"The {i} quick foxes jump over {i * i} lazy dogs. " for i in range(60)))
    return "--text-file", path


def test_eval_all_goes_on_after_an_interruption_and_reports(tiny, text, tmp_path, monkeypatch) -> None:
    args = ("eval", "all", tiny, "--lengths", "600", "--only", "ruler,text,output", "--families", "niah_single_1")
    args = (*args, "--question-steps", "4", *SMALL, *text, "--output", tmp_path)
    real = drift.evaluate

    def interrupted(*args, **kwargs):
        raise RuntimeError("the power is out")

    monkeypatch.setattr(drift, "evaluate", interrupted)
    assert "the power is out" in error(*args, *SPARSE)
    before = (tmp_path / "ruler" / "samples.jsonl").read_text()
    assert len(before.splitlines()) == 2
    page = (tmp_path / "report.html").read_text()
    assert "Held-out text" in page and "Long own output" not in page, "what is done is reported"
    monkeypatch.setattr(drift, "evaluate", real)
    result = run(*args, *SPARSE)
    assert (tmp_path / "ruler" / "samples.jsonl").read_text() == before, "nothing is measured twice"
    assert "## 600 tokens (a / b: question prefilled / question in decode steps)" in result.stdout
    assert re.search(r"\| cache \| RULER, % \| text, .*\n\|-.*\n\| full \| 0\.0 / 0\.0 \|", result.stdout)
    assert "## Held-out text" not in result.stdout, "the terminal shows the summary"

    page, told = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    for name in (*CACHES, "RULER", "Held-out text", "Long own output: 12 tokens", "first difference"):
        assert name in page.replace("<wbr>", "") and name in told, name
    assert "Full attention finds nothing in RULER at 600 tokens (niah_single_1)" in told
    assert page.count("<svg") == page.count("<polyline") == 1 and "KL by token of the answer" in page
    assert "hsl(120 60% 86%)" in page, "full attention is green"
    assert not re.search(r"<script|<link|src=|https?:", page), "one file, nothing from elsewhere"
    assert page.count("<table") == page.count("</table>") == 1 + told.count("\n### ")
    assert "holds results of another run (then --seed 0, now --seed 1)" in error(*args, *SPARSE, "--seed", "1")


def test_eval_all_on_a_probe_has_no_texts(probe, tmp_path) -> None:  # noqa: F811
    args = ("eval", "all", probe, "--lengths", "256", "--families", "single", *SMALL, "--out", tmp_path)
    told = run(*args, *SPARSE, "--quick").stderr
    assert "tasks and LongBench are left out" in told
    assert {path.name for path in tmp_path.iterdir()} == {
        "ruler",
        "needle",
        "text",
        "output",
        "report.html",
        "report.md",
    }
    ruler = (tmp_path / "ruler" / "results.md").read_text()
    assert "score, %" in ruler and "score in steps, %" in ruler
    settings = json.loads((tmp_path / "ruler" / "settings.json").read_text())
    assert settings["question_steps"] == 3 and settings["quick"] is True
    assert "has no part but ruler, needle, text and output" in error(*args, "--only", "tasks")
    assert "texts, and a probe model knows no words" in error("eval", "tasks", probe, "--out", tmp_path / "o")


def test_eval_tasks_and_output_have_commands(tiny, text, tmp_path) -> None:
    common = ("--cache", "full", *SPARSE)
    args = (
        "--lengths",
        "700",
        "--families",
        "chain_2",
        "--question-steps",
        "4",
        "--samples",
        "1",
        "--out",
        tmp_path / "tasks",
    )
    told = run("eval", "tasks", tiny, *args, *common).stdout
    assert "score, % | score in steps, %" in told and "top-1 agreement, %" in told
    args = ("--lengths", "200", "--tokens", "12", "--window", "4", "--out", tmp_path / "output")
    told = run("eval", "output", tiny, *args, *text, *common).stdout
    assert "| | 1-4 | 5-8 | 9-12 | average |" in told and "first difference" in told


def test_reports_escape_names_and_draw_scores_by_length() -> None:
    figures = [
        Figure("average", n, cache, m, v, v, v, 3)
        for n in (1024, 2048)
        for m in ("score", "score in steps")
        for cache, v in (("full", 1.0), ("<b>|ours", 0.5))
    ]
    section = report.Section("ruler", "RULER", generation.COMPARED, ("note",), figures)
    page = report.as_html("a & b", {"model": "<m>"}, [section])
    assert "<b>" not in page and "&lt;b&gt;|ours" in page and "<m>" not in page and "a &amp; b" in page
    assert page.count("<svg") == 2 and page.count("<polyline") == 4, "both ways"
    text = report.as_markdown("title", {}, [section])
    assert r"<b>\|ours | 50.0 / 50.0" in text
