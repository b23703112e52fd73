"""All model types of transformers with an indexer of their own: served, or refused with a text that says so."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import model_list
import pytest
import torch
import transformers as tf
from models import INDEXED, REFERENCE, build, prompt, qwen4_exp
from transformers import CONFIG_MAPPING, DynamicCache

from hf_sparsekv import OffloadConfig, SparseCache, TokenConfig
from hf_sparsekv.bookkeeping.indexers import SERVED
from hf_sparsekv.cache_name import over

BY_CONFIG = r"of such models axk2, .*, qwen4_exp_text are served"
OWN_ATTENTION = "compute their attention themselves"
BLOCKS = "chooses blocks by an indexer of its own"
# By the folder in transformers: what makes a model of an attention function, or the text of a refusal.
FAMILIES = {
    **{config.model_type: partial(build, name) for name, (_, config, _) in INDEXED.items()},
    "qwen4_exp": partial(qwen4_exp, kinds=["linear_attention", "qwen_sparse_attention"] * 2),
    **dict.fromkeys(("dots3_note", "glm5_next", "hy_v4_vl", "mistral_large4"), BY_CONFIG),
    "deepseek_v4": OWN_ATTENTION,
    "minimax_m3_vl": BLOCKS,
}
LATER = ("dots3_note", "hy_v4_vl", "mistral_large4")  # than transformers 5.17
DECODER = {"qwen4_exp": "qwen4_exp_text", "minimax_m3_vl": "minimax_m3_vl_text"}  # in docs/models.md
HERE = [name for name in FAMILIES if name in CONFIG_MAPPING]
GO = {"do_sample": False, "max_new_tokens": 20}
DOCS = Path(__file__).parents[2] / "docs/mla.md"


def test_these_are_all():
    """A new release with another one asks what is to be done with it."""
    files = (Path(tf.__file__).parent / "models").glob("*/modeling_*.py")
    found = {file.parent.name for file in files if re.search(r"class \w*Indexer\b", file.read_text())}
    assert found == {*HERE}
    assert {*FAMILIES} - found <= {*LATER}
    assert {DECODER.get(name, name) for name, made in FAMILIES.items() if callable(made)} == {*SERVED}


@pytest.mark.few
@pytest.mark.parametrize("name", [name for name in HERE if callable(FAMILIES[name])])
@pytest.mark.parametrize("offload", [OffloadConfig(), None], ids=["host", "device"])
def test_served(name, offload, monkeypatch):
    """In float32 the tokens of transformers' own cache: padded, another turn, in chunks."""
    for module in (torch, torch.nn.functional):  # else several scores are 0, and any of them may be chosen
        monkeypatch.setattr(module, "relu", torch.nn.functional.softplus)
    made = FAMILIES[name]
    net, stock = made(attn="sparsekv"), made(attn=REFERENCE.get(name.replace("_", "-"), "sdpa"))
    config = TokenConfig(block_size=16, window=16, max_draft=4)
    cache, theirs = SparseCache(config, offload, net.config), DynamicCache(config=stock.config)
    inputs = prompt(2, 90, (0, 30))
    text = stock.generate(**inputs, **GO, **over(stock, theirs))
    assert torch.equal(net.generate(**inputs, **GO, **over(net, cache)), text)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 40), value=1)
    turn = {"input_ids": torch.cat((text, prompt(2, 20, seed=5)["input_ids"]), 1), "attention_mask": mask}
    expected = stock.generate(**turn, **GO, **over(stock, theirs))
    assert torch.equal(net.generate(**turn, **GO, **over(net, cache)), expected)
    assert cache.stats().sparse_calls == 2 * 19 * len(cache.sparse_layers)
    cache.reset()
    assert torch.equal(net.generate(**inputs, **GO, prefill_chunk_size=40, **over(net, cache)), text)


@pytest.mark.parametrize("name", [name for name in HERE if FAMILIES[name] == BY_CONFIG])
def test_refused_by_their_configuration(name):
    with pytest.raises(ValueError, match=BY_CONFIG):
        SparseCache(TokenConfig(), model_config=CONFIG_MAPPING[name]())


@pytest.mark.parametrize("name", [name for name in HERE if FAMILIES[name] in (OWN_ATTENTION, BLOCKS)])
def test_refused_by_their_attention(name):
    """With our cache, and without one, where attention to everything would be other text."""
    net = model_list.build(DECODER.get(name, name))
    net.set_attn_implementation("sparsekv")
    for given in ({}, over(net, SparseCache(TokenConfig()))):
        with pytest.raises(ValueError, match=FAMILIES[name]):
            net.generate(**prompt(1, 30), **GO, **given)


def test_the_pages_say_the_same():
    """docs/mla.md of all, docs/models.md of those in its list."""
    said = {}
    for row in DOCS.read_text().partition("## Models with an indexer")[2].partition("\n## ")[0].splitlines():
        if row.startswith("| `") and not row.startswith("| `model_type`"):
            kinds, _, what = row.strip("|").partition("|")
            said |= {kind: "refused" in what.split(":")[0] for kind in re.findall(r"`(\w+)`", kinds)}
    assert said == {("qwen4_exp_text" if n == "qwen4_exp" else n): not callable(made) for n, made in FAMILIES.items()}
    lines = model_list.lines_of(model_list.PAGE.read_text())
    for name, made in FAMILIES.items():
        if (line := lines.get(DECODER.get(name, name))) is not None:
            assert line.result == (model_list.WORKS if callable(made) else model_list.REFUSED)
            assert callable(made) or re.search(made, line.why)
