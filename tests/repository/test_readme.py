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
from inside import attention_of
from models import build

from benchmarks import picture, readme
from benchmarks.baselines import VARIANTS, make_cache
from hf_sparsekv import PredictiveConfig, SparseCache, TokenConfig, __version__, cache_source
from hf_sparsekv.policies import crossover
from hf_sparsekv.policies.registry import methods

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SINCE = readme.DATA["since"]["defaults"][0]  # of the first row of today's defaults
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in DOCS)]


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
    assert attention_of(there["model"]) == "sdpa"


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
