"""The pages of docs/ say what is so: their code runs, their tables are those of the newest rows, the site builds.

A block of Python that cannot run here has ``<!-- not run: WHY -->`` on the line above, and is compiled all the same.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from inside import own_methods
from models import VOCAB, build, prompt

import hf_sparsekv
from benchmarks import readme
from hf_sparsekv import OffloadedSparseCache, TokenConfig
from hf_sparsekv_eval.samples import Sample, found_share

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```python\n(?P<code>.*?)^```", re.M | re.S)
SITE = (
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
)


@dataclass(frozen=True)
class Block:
    """A block of Python in a page; the blocks of one page follow each other and share their names."""

    page: str
    line: int
    code: str
    why: str | None

    def compiled(self):
        return compile("\n" * self.line + self.code, self.page, "exec", flags=0, dont_inherit=True)


def blocks() -> list[Block]:
    found = []
    for page in SITE:
        text = (ROOT / page).read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start("code")].count("\n")
            found.append(Block(page, line, match["code"], match["why"]))
        assert text.count("```python") == sum(block.page == page for block in found), page
    return found


BLOCKS = blocks()
RUN = sorted({block.page for block in BLOCKS if block.why is None})


def tokenizer_of(vocab: int) -> transformers.PreTrainedTokenizerFast:
    """Whole words, ``w2`` to ``w96``."""
    words = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, vocab)}}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>")
    made.padding_side = "left"
    return made


def words(count: int, seed: int = 0) -> str:
    return " ".join(f"w{token}" for token in prompt(1, count, seed=seed)["input_ids"][0].tolist())


def quickstart() -> dict:
    tokenizer = tokenizer_of(VOCAB)
    tokenizer.chat_template = "{{ messages[0].content }}"
    return {"hf_sparsekv": hf_sparsekv, "model": build("llama", "sdpa"), "tokenizer": tokenizer, "text": words(40)}


def generating() -> dict:
    model = build("llama", "sdpa")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer_of(VOCAB))
    return {"hf_sparsekv": hf_sparsekv, "pipe": pipe, "model": model, "inputs": prompt(1, 40)}


def sparse_prompts() -> dict:
    return {"model": build("llama", "sdpa"), "inputs": prompt(1, 40)}


def saving() -> dict:
    questions = [words(5, seed=1), words(7, seed=2)]
    return {
        "model": build("llama", "sparsekv"),
        "tokenizer": tokenizer_of(VOCAB),
        "text": words(150),
        "questions": questions,
        "prompts": [words(60), words(40)],
        "OffloadedSparseCache": OffloadedSparseCache,
        "TokenConfig": TokenConfig,
    }


def monitoring() -> dict:
    document = prompt(1, 90)["input_ids"]
    ids = torch.cat((document, prompt(1, 6, seed=1)["input_ids"]), dim=1)
    return {"model": build("llama", "sparsekv"), "inputs": prompt(1, 80), "document": document, "ids": ids}


def rows() -> dict:
    names = {"OffloadedSparseCache": OffloadedSparseCache, "TokenConfig": TokenConfig, "torch": torch}
    return {**names, "model": build("llama", "sparsekv"), "ids": prompt(1, 120)["input_ids"]}


def exact() -> dict:
    return {"hf_sparsekv": hf_sparsekv, "inputs": prompt(1, 300), **serving()}


def audit() -> dict:
    return {"hf_sparsekv": hf_sparsekv, "model": build("llama", "sdpa"), "inputs": prompt(1, 300)}


def drafts() -> dict:
    names = {"OffloadedSparseCache": OffloadedSparseCache, "torch": torch}
    return {**names, "model": build("llama", "sparsekv"), "ids": prompt(1, 120)["input_ids"]}


def serving() -> dict:
    model, plain = build("llama", "sdpa"), tokenizer_of(VOCAB)

    class Tokenizer(type(plain)):
        """Takes any words."""

        def __call__(self, text, **given):
            return super().__call__(words(len(text.split())), **given)

    plain.__class__ = Tokenizer
    return {"model": model, "tokenizer": plain}


def evaluation() -> dict:
    ids = tuple(prompt(1, 90)["input_ids"][0].tolist())
    samples = [Sample("mine", 90, i, ids, ("w2",), 4, found_share) for i in range(2)]
    return {"model": build("llama", "sparsekv"), "tokenizer": tokenizer_of(VOCAB), "samples": samples}


def extending() -> dict:
    return {"model": build("llama", "sdpa"), "inputs": prompt(1, 200)}


# What a page's blocks may use, and what in them is replaced to run here: lengths that a tiny model has, no hub.
NAMES: dict[str, Callable[[], dict]] = {
    f"docs/{made.__name__.replace('_', '-')}.md": made
    for made in (
        quickstart,
        generating,
        sparse_prompts,
        saving,
        monitoring,
        rows,
        drafts,
        exact,
        audit,
        serving,
        evaluation,
        extending,
    )
}
REPLACED = {
    "docs/generating.md": (("you/sparse-generate", str(ROOT)),),
    "docs/rows.md": (("max_length=131072", "max_length=512"),),
    "docs/exact.md": (("token_budget=256", "token_budget=16, dense_below=0, block_size=16, window=16"),),
}
AGAIN = ("docs/generating.md",)  # tests/test_generating.py runs its blocks in each `make test`
BY_ANOTHER_TEST = ("README.md",)  # tests/repository/test_readme.py runs its snippet on the small model


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.line}")
def test_every_block_compiles(block):
    block.compiled()
    assert block.why is None or len(block.why.split()) > 2, "say why it is not run"


def test_every_block_runs_or_says_why_not():
    assert set(RUN) == {*NAMES, *BY_ANOTHER_TEST}
    assert [(block.page, block.why) for block in BLOCKS if block.why] == [
        ("docs/mla.md", "a model of 30B parameters from the hub"),
        ("docs/serving-http.md", "asks a server"),
        ("docs/serving-http.md", "makes an engine that nobody closes"),
        ("docs/serving-scale.md", "starts a cluster and a large model"),
        ("docs/sparse-prompts.md", "needs a Hopper GPU and flash-attn-4"),
    ]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page in AGAIN else page for page in NAMES],
)
def test_the_blocks_run_in_their_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.import_module("hf_sparsekv_eval.cache_specs")  # registers yardsticks, once: they are to stay
    own_methods(monkeypatch)
    torch.manual_seed(0)
    there = {"__name__": "docs", **NAMES[page]()}
    for block in BLOCKS:
        if block.page == page and block.why is None:
            for old, new in REPLACED.get(page, ()):
                block = Block(page, block.line, block.code.replace(old, new), None)
            exec(block.compiled(), there)
    printed = capsys.readouterr().out
    if page == "docs/monitoring.md":
        assert "MB a step" in printed
    if page == "docs/evaluation.md":
        assert "two_level:token_budget=512" in printed
    if page == "docs/extending.md":
        assert there["cache"].stats().sparse_calls > 0 and there["again"].config == there["cache"].config
        assert (tmp_path / "strided.safetensors").exists()
    if page == "docs/saving.md":
        assert (tmp_path / "document.safetensors").exists() and printed.count("w") > 20
    if page == "docs/drafts.md":
        assert there["logits"].shape == (1, 6, VOCAB) and there["cache"].get_seq_length() == 122
    if page == "docs/exact.md":
        assert "drafts accepted" in printed and there["stats"].drafted > 0
    if page == "docs/audit.md":
        assert printed.startswith("199 tokens audited: ") and printed.split()[-1].isdecimal()
    if page == "docs/rows.md":
        assert there["logits"].shape == (1, VOCAB) and len(there["rows"].rows) == 1
    if page == "docs/serving.md":
        assert len(there["answers"]) == 2 and all(there["answers"]) and printed


COMMAND = re.compile(r"^    (?:hf-sparsekv|python|make|pip|torchrun|curl) .*", re.M)


def test_code_is_as_wide_as_a_page_shows():
    """docs/ruff.toml lets ruff break Python; comments and commands it leaves as they are."""
    lines = [(block.page, line) for block in BLOCKS for line in block.code.splitlines()]
    lines += [(page, line) for page in SITE for line in COMMAND.findall((ROOT / page).read_text())]
    assert not [one for one in lines if len(one[1]) > 80]


# ---------------------------------------------------------------------- tables and links


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, tables in readme.PAGES.items() for name in tables])
def test_tables_are_those_of_the_newest_rows(page, name):
    text = (ROOT / page).read_text()
    start, stop = readme.between(text, name, page)
    assert text[start:stop] == readme.PAGES[page][name](), "run: python -m benchmarks.readme --write"
    assert text[start:stop].count("\n") >= 3 or text[start:stop].startswith("Not measured yet")


def test_pages_are_few_and_short():
    """Without the list of models, which is generated."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "models.md"]
    assert len(pages) <= 35, "merge pages: one place for each fact"
    assert sum(len(path.read_text().split()) for path in pages) <= 45_000


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Pages in the navigation, links and anchors, references of docstrings; the notebooks as pages."""
    if not importlib.util.find_spec("material"):
        pytest.skip("needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    caches = (tmp_path / "site/api/caches/index.html").read_text()
    assert 'id="hf_sparsekv.SparseCache.save"' in caches and ":class:" not in caches
    assert "find_spec" in (tmp_path / "site/notebooks/first_steps/index.html").read_text()
    home = (tmp_path / "site/index.html").read_text()
    assert 'src="first-light.svg"' in home and (tmp_path / "site/first-light.svg").exists()
    assert "only on GitHub" not in home and "<summary>What works</summary>" in home


def test_every_public_name_has_its_place_in_the_api():
    shown = [
        name
        for path in (ROOT / "docs/api").glob("*.md")
        for name in re.findall(r"^::: hf_sparsekv\.(\w+)$", path.read_text(), re.M)
    ]
    assert sorted(shown) == sorted(set(hf_sparsekv.__all__) - {"__version__"})


@pytest.mark.parametrize(
    ("text", "message"),
    [("[a](../nowhere.py)", "which is not there"), ("[a](../LICENSE)", None), ("`[a](../nowhere.py)`\n", None)],
    ids=["nowhere", "elsewhere", "code"],
)
def test_links_to_files_that_are_not_on_the_site(text, message):
    pytest.importorskip("mkdocs")
    from types import SimpleNamespace

    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import Files

    spec = importlib.util.spec_from_file_location("pages", ROOT / "tools/site/pages.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="x.md"))
    address = "https://example.org/p"
    if message:
        with pytest.raises(PluginError, match=message):
            pages.on_page_markdown(text, page, SimpleNamespace(repo_url=address), Files([]))
        return
    found = pages.on_page_markdown(text, page, SimpleNamespace(repo_url=address), Files([]))
    assert found == (text if text.startswith("`") else f"[a]({address}/blob/main/LICENSE)")
    assert text.startswith("`") or pages.on_page_markdown(text, page, SimpleNamespace(repo_url=""), Files([])) == "a"
