"""All model types of transformers with an indexer of their own: served, or refused with a text that says so."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import model_list
import pytest
import torch
import transformers as tf
from captured import Imitation
from inside import chosen_pieces, score_calls, score_pieces
from models import INDEXED, REFERENCE, SHARING, build, dots3_note, minimax_m3, mistral_large4, prompt, qwen4_exp
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedConfig

from hf_sparsekv import Engine, OffloadConfig, Sampling, ServingConfig, SparseCache, TokenConfig
from hf_sparsekv.cache_name import over
from hf_sparsekv.layers.indexed import IndexedLayer
from hf_sparsekv.transformers_compat import SERVED
from hf_sparsekv.tuning.plan import model_shape, plan_memory

BY_CONFIG = r"of such models axk2, .*, qwen4_exp_text are served"
OWN_ATTENTION = "compute their attention themselves"
# By the folder in transformers: what makes a model of an attention function, or the text of a refusal.
FAMILIES = {
    **{config.model_type: partial(build, name) for name, (_, config, _) in INDEXED.items()},
    "qwen4_exp": partial(qwen4_exp, kinds=["linear_attention", "qwen_sparse_attention"] * 2),
    "dots3_note": dots3_note,
    "minimax_m3_vl": minimax_m3,
    "mistral_large4": mistral_large4,
    **dict.fromkeys(("glm5_next", "hy_v4_vl"), BY_CONFIG),
    "deepseek_v4": OWN_ATTENTION,
}
LATER = ("dots3_note", "hy_v4_vl", "mistral_large4")  # than transformers 5.17
DECODER = {name: f"{name}_text" for name in ("dots3_note", "minimax_m3_vl", "mistral_large4", "qwen4_exp")}
HERE = [name for name in FAMILIES if name in CONFIG_MAPPING]
MADE = {name: made for name, made in FAMILIES.items() if callable(made)}
UNPADDED = "minimax_m3_vl"  # its indexer counts blocks from the first column
MADE["mistral_large4, sharing"] = partial(mistral_large4, **SHARING)
GO = {"do_sample": False, "max_new_tokens": 20}
DOCS = Path(__file__).parents[2] / "docs/mla.md"


def test_these_are_all():
    """A new release with another one asks what is to be done with it."""
    files = (Path(tf.__file__).parent / "models").glob("*/modeling_*.py")
    found = {file.parent.name for file in files if re.search(r"class \w*Indexer\b", file.read_text())}
    assert found == {*HERE}
    assert {*FAMILIES} - found <= {*LATER}
    assert {DECODER.get(name, name) for name, made in FAMILIES.items() if callable(made)} == {*SERVED}


def models_of(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same model for our caches and for transformers' own."""
    if (family := name.partition(",")[0]) not in HERE:
        pytest.skip(f"{family} is not in transformers {tf.__version__}")
    return MADE[name](attn="sparsekv"), MADE[name](attn=REFERENCE.get(name.replace("_", "-"), "sdpa"))


@pytest.fixture
def different_scores(monkeypatch):
    """Else several scores are 0, and any of them may be chosen."""
    for module in (torch, torch.nn.functional):
        monkeypatch.setattr(module, "relu", torch.nn.functional.softplus)


def new_cache(offload: OffloadConfig | None, config: PreTrainedConfig | None = None) -> SparseCache:
    return SparseCache(TokenConfig(block_size=16, window=16, max_draft=4), offload, config)


@pytest.mark.few
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("offload", [OffloadConfig(), None], ids=["host", "device"])
def test_served(name, offload, different_scores):
    """In float32 the tokens of transformers' own cache: padded, another turn, in chunks."""
    net, stock = models_of(name)
    cache, theirs = new_cache(offload, net.config), DynamicCache(config=stock.config)
    inputs = prompt(2, 90, None if name == UNPADDED else (0, 30))
    text = stock.generate(**inputs, **GO, **over(stock, theirs))
    assert torch.equal(net.generate(**inputs, **GO, **over(net, cache)), text)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 40), value=1)
    turn = {"input_ids": torch.cat((text, prompt(2, 20, seed=5)["input_ids"]), 1), "attention_mask": mask}
    expected = stock.generate(**turn, **GO, **over(stock, theirs))
    assert torch.equal(net.generate(**turn, **GO, **over(net, cache)), expected)
    choosing = [layer for layer in cache.sparse_layers if isinstance(layer, IndexedLayer)]
    assert cache.stats().sparse_calls == 2 * 19 * len(choosing)
    cache.reset()
    assert torch.equal(net.generate(**inputs, **GO, prefill_chunk_size=40, **over(net, cache)), text)


OF_THEIR_OWN = ["dots3_note", "minimax_m3_vl", "mistral_large4", "mistral_large4, sharing"]


@pytest.mark.few
@pytest.mark.parametrize("name", OF_THEIR_OWN)
@pytest.mark.parametrize("offload", [OffloadConfig(), None], ids=["host", "device"])
def test_other_ways(name, offload, different_scores, tmp_path):
    """Without a configuration: beams, drafts, a copy, a file."""
    net, stock = models_of(name)
    inputs = prompt(1, 100)
    for how in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        text = stock.generate(**inputs, **GO, **how)
        assert torch.equal(net.generate(**inputs, **GO, **how, **over(net, new_cache(offload))), text)
    cache = new_cache(offload)
    text = net.generate(**inputs, **GO, **over(net, cache))
    ids = torch.cat((text, prompt(1, 20, seed=5)["input_ids"]), 1)
    turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    caches = [copy.deepcopy(cache)]
    if "sharing" in name:
        with pytest.raises(ValueError, match="cannot be saved"):
            cache.save(tmp_path / "file")
        with pytest.raises(ValueError, match="attend to what another one has stored"):
            SparseCache(TokenConfig(), model_config=net.config).rows(2, 256)
    else:
        cache.save(tmp_path / "file")
        caches.append(SparseCache.load(tmp_path / "file", model_config=net.config))
    cache.reset()
    for one in caches:
        assert torch.equal(net.generate(**turn, **GO, **over(net, one)), stock.generate(**turn, **GO))


@pytest.mark.few
@pytest.mark.parametrize("name", OF_THEIR_OWN)
@pytest.mark.parametrize("offload", [OffloadConfig(), None], ids=["host", "device"])
def test_replayed_steps(name, offload, different_scores):
    """Those of layers that share latents are not captured."""
    net, stock = models_of(name)
    inputs, go = prompt(2, 60, None if name == UNPADDED else (0, 13)), {**GO, "max_new_tokens": 34}
    runner = Imitation(net)
    runner.install()
    shares = pytest.warns(UserWarning, match="share their keys") if "sharing" in name else nullcontext()
    with shares:
        text = net.generate(**inputs, **go, **over(net, new_cache(offload)))
    runner.remove()
    assert torch.equal(text, stock.generate(**inputs, **go))
    assert runner.replays == (0 if "sharing" in name else 33)


def test_an_engine_of_layers_without_a_rotary_part(different_scores):
    net, stock = models_of("mistral_large4")
    asked = [prompt(1, length, seed=length)["input_ids"] for length in (100, 40)]
    with Engine(net, serving=ServingConfig(max_rows=2, max_length=256, prefix_cache=False)) as engine:
        found = [engine.submit(ids[0], Sampling(max_tokens=20, temperature=0)) for ids in asked]
        found = [list(handle.result(60).token_ids) for handle in found]
    for ids, tokens in zip(asked, found, strict=True):
        text = stock.generate(ids, attention_mask=torch.ones_like(ids), **GO)
        assert tokens == text[0, ids.shape[1] :].tolist()


PLANNED = {
    "dots3_note": [("sliding", 32, 12, 0), ("full", 16, 8, 16)] * 2,  # sliding layers keep latents of their own width
    "minimax_m3_vl": [("full", 16, 16, 0), ("full", 16, 16, 16)] * 2,
}


@pytest.mark.parametrize("name", PLANNED)
def test_planned(name):
    net, _ = models_of(name)
    shape = model_shape(net.config, torch.float32)
    assert [(one.kind, one.key_dim, one.value_dim, one.index_dim) for one in shape.layers] == PLANNED[name]
    for config in (TokenConfig(), TokenConfig(block_size=16, window=16)):
        cache = SparseCache(config, OffloadConfig(), net.config)
        with torch.no_grad():
            net(**prompt(2, 700), **over(net, cache))
        plan = plan_memory(shape, config, OffloadConfig(), context=700, batch=2)
        assert {"device": plan.cache_device, "host": plan.cache_host} == cache.memory_bytes()


@pytest.mark.parametrize("offload", [None, OffloadConfig()], ids=["device", "host"])
def test_blocks_of_heads(offload, monkeypatch):
    """MiniMax M3: prompts in pieces, what steps read, other layers that attend to everything, copies on the device."""
    net, stock = models_of("minimax_m3_vl")
    inputs = prompt(2, 90)
    expected = stock.generate(**inputs, **GO)
    assert torch.equal(net.generate(**inputs, **GO), expected), "with transformers' own cache"
    pieces = score_calls(monkeypatch)
    score_pieces(monkeypatch, 7 * 4 * 2 * (2 + 16) * 90)
    chosen_pieces(monkeypatch, 11 * 8 * 2 * 2 * 90)
    cache = new_cache(offload)
    cache.watch_blocks()
    assert torch.equal(net.generate(**inputs, **GO, **over(net, cache)), expected)
    assert len(pieces) == 2 * 13
    stats, dense, chosen = cache.stats(), cache.sparse_layers[::2], cache.sparse_layers[1::2]
    assert stats.dense_calls == stats.sparse_calls == 2 * 19
    assert not any(isinstance(layer, IndexedLayer) for layer in dense)
    last = [length % 8 for length in range(91, 110)]  # tokens of each step's own block, which is never whole but once
    read = sum(3 * 8 + (rest or 8) for rest in last) * 2 * 2
    for layer in chosen:
        assert int(layer.store.counters.attended.sum()) == read
        tokens = layer.policy.chosen.masked_fill(layer.policy.chosen >= 16 * 5, -1)  # 4 blocks of 8, of each head
        marks = torch.zeros(2, 2, 6).scatter_(2, tokens // 16 % 6, 1.0)[..., :5]
        assert torch.equal(cache.chosen_blocks().share[layer.index], marks.mean((0, 1)))
    for length in (3, 20, 31):  # before there are more blocks than are chosen
        few = prompt(2, length)
        assert torch.equal(net.generate(**few, **GO, **over(net, new_cache(offload))), stock.generate(**few, **GO))
    bare = new_cache(offload and OffloadConfig(device_pool=0))
    assert torch.equal(net.generate(**inputs, **GO, **over(net, bare)), expected)


def test_what_is_not_for_blocks_of_heads():
    net, _ = models_of("minimax_m3_vl")
    with pytest.raises(ValueError, match="which padding would shift"):
        net.generate(**prompt(2, 90, (0, 30)), **GO, **over(net, new_cache(None)))
    with pytest.raises(ValueError, match="counts its blocks from position 0"):
        SparseCache(TokenConfig(), model_config=net.config).rows(2, 256)
    with pytest.raises(ValueError, match="would only lose tokens"):
        SparseCache(TokenConfig(token_budget=512), model_config=net.config)


@pytest.mark.parametrize("name", [name for name in HERE if FAMILIES[name] == BY_CONFIG])
def test_refused_by_their_configuration(name):
    with pytest.raises(ValueError, match=BY_CONFIG):
        SparseCache(TokenConfig(), model_config=CONFIG_MAPPING[name]())


@pytest.mark.parametrize("name", [name for name in HERE if FAMILIES[name] == OWN_ATTENTION])
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
