"""README.md says what is so: its snippet runs, its pictures are of the newest rows, its links lead somewhere.

Its tables: test_docs.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from models import build

from benchmarks import picture, readme, tables
from benchmarks.baselines import VARIANTS, make_cache
from hf_sparsekv import PredictiveConfig, SparseCache, TokenConfig, __version__, cache_source
from hf_sparsekv.policies import crossover
from hf_sparsekv.policies.registry import methods

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SINCE = readme.DATA["since"]["defaults"][0]  # of the first row of today's defaults
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in DOCS)]
FIRST = TEXT.partition("<details>")[0]


def test_the_table_of_presets(monkeypatch):
    """A line for each; a cell without a row says so, and rows of earlier defaults and of other GPUs do not count."""
    row = {"case": "qwen3-8b", "batch": "1", "context": str(32 << 10), "metric": "tpot_ms", "device": readme.GPU}
    row |= {"variant": "token_only+fused", "commit": "old", "value": "9"}
    now = {**row, "commit": SINCE}
    small = {
        **now,
        "case": "small",
        "context": "4096",
        "variant": "agreement:two_level",
        "metric": "kl",
        "value": ".25",
    }
    facts = [
        {**small, "variant": f"needle:average:{name}", "context": str(n << 10), "metric": "score", "value": value}
        for name, lengths in (("two_level", (1, 3, 5, 7)), ("token:preset=fast", (1, 3)))
        for n, value in zip(lengths, ("1", "1", "0.8", "0.6"))
    ]
    tables = {
        "step.csv": [
            row,
            now | {"variant": "two_level:paper+fused", "value": "8"},
            {**now, "device": "x", "value": "7"},
        ],
        "accuracy.csv": [small, *facts],
    }
    monkeypatch.setattr(
        readme, "read", lambda name, device=None: [r for r in tables[name] if device in (None, r["device"])]
    )
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme.all_presets().splitlines()]
    assert {len(line) for line in lines} == {9} and len(lines) == 2 + len(readme.DATA["all_presets"])
    found, nothing = dict(enumerate(lines[2:])), [readme.UNKNOWN]
    assert found[3][1:] == nothing * 6 + ["17", "0.25000"], "times of earlier defaults are not today's"
    assert found[4][1:] == nothing * 8, "no length may be missing"
    assert found[6][1:] == ["8.0", *nothing * 7]
    tables["step.csv"].append(now | {"value": "6"})
    assert "| 6.0 | not measured |" in readme.all_presets()


def test_every_preset_is_in_the_table():
    """With the name under which `benchmarks step` measures it."""
    timed = {name.split("+")[0] for _, _, names in readme.DATA["all_presets"] for name in names}
    assert timed <= set(VARIANTS)
    for method in methods().values():
        name = (*method.aliases, method.name)[0]  # as they were recorded
        for preset, settings in method.config.PRESETS.items():
            assert f"{name}:{preset}" in timed or (name == "progressive" and "estimate" in settings)  # plain torch
    lines = {variant: names[0].split("+")[0] for _, variant, names in readme.DATA["all_presets"]}
    for spec, config in (("token", TokenConfig()), ("predictive:mass=0.9", PredictiveConfig())):
        measured = make_cache(build("llama", "sparsekv"), VARIANTS[lines[spec]], None).config
        assert replace(measured, mass=None, dense_below="auto") == config and measured.threshold == config.threshold
    default = make_cache(build("llama", "sparsekv"), VARIANTS["token_only"], None).config
    assert replace(default, level="auto") == TokenConfig(token_budget=1024, dense_below=None)


@pytest.mark.parametrize("path", picture.files())
def test_pictures_are_those_of_the_newest_rows(path):
    drawn = (ROOT / path).read_text()
    assert drawn == picture.files()[path], "run: python -m benchmarks.readme --write"
    ElementTree.fromstring(drawn)
    assert len(drawn) < 10_000 and "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


def test_the_picture_has_the_figures_of_the_tables():
    """Times of docs/speed.md, and the score of the same settings below it in README."""
    left, right, _ = picture.panels()
    *times, score = (*left, *right)
    assert all(f"**{dict(panel.bars)['hf-sparsekv']:.1f}**" in readme.speed() for panel in times)
    line = readme.models().splitlines()[2]
    assert all(f"| {value:.1f} / " in line for _, value in score.bars) and score.note.partition(",")[0] in line
    assert all(f"{value:.1f}" in picture.said() for _, value in score.bars)


def test_the_first_screen_is_short():
    assert len(FIRST.splitlines()) <= 90
    code = re.search(r"```python\n(.*?)```", FIRST, re.S).group(1)
    assert max(map(len, code.splitlines())) <= 80
    for name, value in picture.needed():
        assert name in FIRST.lower() or value in FIRST, f"the badges' text lacks {name}"
    assert all(value.split()[0] in FIRST for _, value in picture.needed())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    whole = re.sub(r"<!-- only on GitHub -->.*?<!-- /only on GitHub -->", "", (ROOT / page).read_text(), flags=re.S)
    headings = {
        re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", whole, re.M)
    }
    text = re.sub(r"```.*?```|`[^`\n]+`(?!\])", "", whole, flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}, which is not there"
    for anchor in re.findall(r"\]\(#([^)]+)\)", text):
        assert anchor in headings, f"{page} has no heading #{anchor}"


def test_the_citation_is_of_this_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.small_model
def test_the_snippet_runs_as_it_stands(small_model_dir, monkeypatch, capsys):
    """On another model, and over a shorter text; nothing else is changed."""
    code = re.search(r"```python\n(.*?)```", TEXT, re.S).group(1)
    assert code.count('"Qwen/Qwen3-8B"') == code.count("length=32_000") == 1
    code = code.replace('"Qwen/Qwen3-8B"', repr(str(small_model_dir))).replace("length=32_000", "length=2_000")
    made: list[SparseCache] = []
    new_cache = cache_source.new_cache
    monkeypatch.setattr(cache_source, "new_cache", lambda *given: made.append(new_cache(*given)) or made[-1])
    monkeypatch.setattr(crossover, "ON_CPU", {})  # so short a text is read whole otherwise
    there: dict = {}
    exec(compile(code, "README.md", "exec"), there)
    out, (cache,) = capsys.readouterr().out, made
    with capsys.disabled():
        print(f"\n{out.strip()}\n{cache}")
    answer, right, read = out.strip().splitlines()[-3:]
    assert right.removeprefix("right: ") in answer
    assert 0 < float(re.fullmatch(r"\d+ steps .*: attended to ([\d.]+)%, read .*", read)[1]) < 90
    assert cache.config == TokenConfig()
    assert cache.stats().sparse_calls > 0
    assert there["model"].config._attn_implementation == "sdpa"


def test_the_snippet_shows_a_share_and_not_everything(monkeypatch):
    """Its model and length lie above the crossover of README's GPU, which a model of 0.5B reaches later."""
    length = int(re.search(r"length=(\d+_\d+)", TEXT)[1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: readme.GPU)
    monkeypatch.setattr(crossover, "table_path", lambda: Path("nothing"))
    width = {"8B": 2 * 8 * 128 * 2, "0.5B": 2 * 2 * 64 * 2}
    below = {
        name: crossover.dense_tokens("auto", "progressive", torch.device("cuda"), False, 1, each)
        for name, each in width.items()
    }
    assert below["8B"] < length / 2 and "below 15k tokens" in TEXT and below["8B"] // 1000 == 15
    assert "a model of 0.5B: 120k" in TEXT and below["0.5B"] // 10_000 == 12


def test_the_ladder_is_of_the_newest_rows_of_each_seed(monkeypatch):
    """What was measured again stands for all of what it was before.

    Other tokens a step are another system. Other GPUs, kinds of traces, and sparse prompts are not in it.
    """
    gpu, output, most = readme.DATA["ladder"]["kind"]

    def rows(system: str, seed: int, commit: str, context: int = 32768, gpu=gpu, out=output, **metrics) -> list[dict]:
        of = {"case": tables.CASE, "device": gpu, "context": str(context), "commit": commit}
        variant = f"{system}:gpu=24gb:rate=0.5:out={out}:most={most}:seed={seed}"
        usual = {"requests": 9, "failed": 0, "ttft_s:mean": 1, "ttft_s:p99": 2, "between_ms:p50": 3}
        usual |= {"between_ms:p99": 250, "queued_s:mean": 2, "tokens_per_s": 100}
        named = {name.replace("__", ":"): value for name, value in metrics.items()}
        return [{**of, "variant": variant, "metric": name, "value": str(n)} for name, n in (usual | named).items()]

    made = [
        *rows("dense", 1, "old", tokens_per_s=500, ttft_s__mean=7),
        *rows("dense", 1, "new"),
        *rows("dense", 2, "new", tokens_per_s=300, ttft_s__mean=3, queued_s__mean=2.1),
        *rows("vllm", 1, "new", failed=5),
        *rows("segments:budget=1024", 1, "new"),
        *rows("segments:budget=2048", 1, "newer", tokens_per_s=900),
        *rows("dense", 1, "newest", context=131072),
        *rows("dense", 1, "newest", gpu="another GPU", tokens_per_s=700),
        *rows("dense", 1, "newest", out=1, tokens_per_s=700),
        *rows("segments:budget=1024:prompts=0.3", 1, "newest", tokens_per_s=700),
    ]
    monkeypatch.setattr(tables, "read", lambda name: made)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme.ladder().splitlines()[2:]]
    assert [line[:2] for line in lines] == [["32k", "0.5"]] * 3 + [["128k", "0.5"]]
    found = [line[2:] for line in lines[:3]]
    assert lines[3][2:5] == ["our engine, dense", "1", "100"]
    assert found == [
        ["vLLM 0.26.0", "1", "100 (5 of 9 not finished)", "", "", "", "no", "new"],
        ["our engine, dense", "2", "200 (100 to 300)", "2.00 (1.00 to 3.00), 2.0", "3.0, 250", "2.05", "1 of 2", "new"],
        ["+ layer segments (offloaded, as it comes)", "1", "100", "1.00, 2.0", "3.0, 250", "2.00", "yes", "new"],
    ]
