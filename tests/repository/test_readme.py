"""README.md says what is so: its snippet runs, its links lead somewhere (its tables: test_docs.py)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from models import build

from benchmarks import readme, tables
from benchmarks.baselines import VARIANTS, make_cache
from hf_sparsekv import PredictiveConfig, SparseCache, TokenConfig, __version__, cache_source
from hf_sparsekv.policies import crossover
from hf_sparsekv.policies.registry import methods
from hf_sparsekv_eval.text import python_reference

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SINCE = readme.DATA["since"]["defaults"][0]  # of the first row of today's defaults
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("generating", "speed", "presets"))]


def test_newest_rows_and_marks():
    row = {"case": "m", "variant": "v", "metric": "tpot_ms", "batch": "1", "context": "8"}
    rows = [{**row, "value": "3"}, {**row, "value": "2"}, {**row, "batch": "2", "value": "1"}]
    assert readme.newest(rows, "v", "tpot_ms", 1, 8, "m") == 2
    assert readme.newest(rows, "v", "tpot_ms", 1, 16, "m") is None
    rows.append({**row, "variant": "w", "value": "7"})
    assert readme.newest(rows, ("v", "w"), "tpot_ms", 1, 8, "m") == 7, "of any of the names"
    with pytest.raises(ValueError, match="lacks the marks <!-- speed -->"):
        readme.between("no marks", "speed")


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
        "step.csv": [row, now | {"variant": "two_level:lag+fused", "value": "8"}, {**now, "device": "x", "value": "7"}],
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


def test_steps_of_other_defaults_are_not_beside_todays(monkeypatch):
    """A GPU whose rows of the defaults are all older has none; dense steps are what they were."""
    row = {"case": "qwen3-8b", "batch": "1", "context": str(8 << 10), "metric": "step_ms", "device": readme.GPU}
    row |= {"variant": "token_only+fused", "commit": "old", "value": "5"}
    rows = [
        row,
        row | {"variant": "captured_dense+fused", "value": "4"},
        row | {"commit": SINCE, "batch": "9"},
    ]
    rows.append(row | {"device": readme.GPUS["H100"], "value": "6"})  # since then, on the other GPU
    monkeypatch.setattr(readme, "read", lambda name, device=None: [r for r in rows if device in (None, r["device"])])
    lines = [line for line in readme.gpus().splitlines() if "| 1 x 8k |" in line]
    none = readme.UNKNOWN
    assert lines == [
        f"| H200 | 1 x 8k | {none} | 4.00 | {none} | {none} |",
        f"| H100 | 1 x 8k | {none} | {none} | 6.00 | {none} |",
    ]


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


def test_the_accuracy_beside_the_speed_is_of_the_same_settings():
    """The sentence below the first table, in the words of the second."""
    lines = {line.split(" | ")[0][2:]: re.findall(r"[\d.]+ / [\d.]+", line) for line in readme.presets().splitlines()}
    found = [pair.split(" / ")[0] for pair in lines["the default: 90 %"]]
    full = [pair.split(" / ")[0] for pair in lines["full attention"]]
    assert f"{found[0]} and {found[1]} %, full attention {full[0]} and {full[1]} %" in TEXT


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}, which is not there"
    for anchor in re.findall(r"\]\(#([^)]+)\)", text):
        assert re.search(rf"^#+ {anchor.replace('-', ' ')}$", text, re.M | re.I), f"{page} has no heading #{anchor}"


def test_the_citation_is_of_this_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.small_model
def test_the_snippet_runs_as_it_stands(small_model_dir, tmp_path, monkeypatch, capsys):
    """On another model and file, and not for so long; nothing else is changed."""
    code = re.search(r"```python\n(.*?)```", TEXT, re.S).group(1)
    assert code.count('"Qwen/Qwen3-8B"') == code.count('"long.txt"') == code.count("max_new_tokens=200") == 1
    text = python_reference()
    told = "It was decided that the harvest festival moves to the town of Brindlewick.\n\n"
    (tmp_path / "long.txt").write_text(text[5000:8000] + "\n\n" + told + text[9000:12_000])
    code = code.replace('"Qwen/Qwen3-8B"', repr(str(small_model_dir))).replace(
        "max_new_tokens=200", "max_new_tokens=30"
    )
    made: list[SparseCache] = []
    new_cache = cache_source.new_cache
    monkeypatch.setattr(cache_source, "new_cache", lambda *given: made.append(new_cache(*given)) or made[-1])
    monkeypatch.setattr(crossover, "ON_CPU", {})  # so short a text is read whole otherwise
    monkeypatch.chdir(tmp_path)
    there: dict = {}
    exec(compile(code, "README.md", "exec"), there)
    out, (cache,) = capsys.readouterr().out, made
    with capsys.disabled():
        print(f"\n  {out.strip()!r}, {cache.stats().attended_share:.0%} attended, {cache}")
    assert len(out.split()) > 3
    assert cache.config == TokenConfig()
    assert cache.stats().sparse_calls > 0
    assert there["model"].config._attn_implementation == "sdpa"


def test_the_ladder_is_of_the_newest_rows_of_each_seed(monkeypatch):
    """What was measured again stands for all of what it was before; other tokens a step are another system."""

    def rows(system: str, seed: int, commit: str, context: int = 32768, **metrics: float) -> list[dict]:
        of = {"case": tables.CASE, "device": "a GPU", "context": str(context), "commit": commit}
        variant = f"{system}:gpu=24gb:rate=0.5:out=256:seed={seed}"
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


def test_rows_that_fit_and_do_not_stand_side_by_side(monkeypatch):
    def rows(
        system: str, batch: int, commit: str, *values: float, rest: str = readme.DATA["working_sets"]
    ) -> list[dict]:
        of = {"case": tables.CASE, "context": "8192", "commit": commit, "batch": str(batch)}
        of["variant"] = f"{system}:{rest}"
        return [{**of, "metric": n, "value": str(v)} for n, v in zip(("tokens_per_s", "between_ms", "host_mb"), values)]

    made = [
        *rows("offload", 16, "old", 1, 1, 1),
        *rows("offload", 16, "new", 600, 25.6, 850),
        *rows("offload", 2, "new", 277, 7.2, 11),
        *rows("working-set", 16, "newer", 1798, 7.4, 29),
        *rows("working-set", 16, "newest", 1, 1, 1, rest="gpu=24gb:budget=2048:kv=replayed"),
    ]
    monkeypatch.setattr(tables, "read", lambda name: made)
    assert readme.working_sets().splitlines()[2:] == [
        "| 2 | 277 | 7.2 | 11 | not run | not run | not run | new |",
        "| 16 | 600 | 25.6 | 850 | 1,798 | 7.4 | 29 | new, newer |",
    ]
