"""Qwen4-Exp, whose indexer scores means of keys: the choice and the tokens of transformers' own loop."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from captured import Imitation
from inside import score_pieces
from models import prompt
from models import qwen4_exp as build
from transformers import DynamicCache

from hf_sparsekv import OffloadConfig, SparseCache, TokenConfig, optimize, restore_mla, sparse
from hf_sparsekv.attention import pooled_indexer
from hf_sparsekv.attention.pooled_indexer import choose, is_pooled
from hf_sparsekv.cache_name import over
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.tuning.plan import model_shape, plan_memory

SMALL = {"block_size": 16, "window": 16, "max_draft": 4}
GO = {"do_sample": False, "max_new_tokens": 20}
INPUTS = prompt(2, 90, (0, 30))
MIXED, SPARSE = ["linear_attention", "qwen_sparse_attention"] * 2, ["qwen_sparse_attention"] * 2

model = functools.cache(lambda attn, *kinds: build(attn, kinds))


def new_cache(net, offload: bool = True) -> SparseCache:
    return SparseCache(TokenConfig(**SMALL), OffloadConfig() if offload else None, net.config)


def longer(text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Another turn after ``text``; of the last answer a row loses some tokens."""
    mask = torch.nn.functional.pad(INPUTS["attention_mask"], (0, text.shape[1] - 70), value=1)
    return {"input_ids": torch.cat((text, prompt(2, 20, seed=5)["input_ids"]), 1), "attention_mask": mask}


class Keys:
    """A cache of an indexer's keys alone."""

    def __init__(self, past: int, batch: int = 2) -> None:
        self.keys = torch.randn(batch, past, 16, generator=torch.Generator().manual_seed(1))

    def update_indexer(self, keys, layer_idx):
        self.keys = torch.cat((self.keys, keys), 1)
        return self.keys


@pytest.mark.quick
@pytest.mark.parametrize("piece", [1 << 30, 1])
@pytest.mark.parametrize(("past", "new"), [(0, 3), (0, 50), (37, 1), (2, 1), (40, 23), (3, 1)])
@pytest.mark.parametrize("holes", [None, (0, 9), "between"])
def test_as_the_loop_over_rows_and_queries(past, new, holes, piece, monkeypatch):
    score_pieces(monkeypatch, piece)
    monkeypatch.setattr(torch, "relu", torch.nn.functional.softplus)  # or several blocks score 0, and any may be chosen
    net, n = model("sdpa", *MIXED), past + new
    indexer = next(module for module in net.modules() if is_pooled(module))
    generator = torch.Generator().manual_seed(n)
    hidden, columns = torch.randn(2, new, 64, generator=generator), torch.ones(2, n, dtype=torch.bool)
    if holes == "between":
        columns = torch.rand(2, n, generator=generator) < 0.7
    elif holes is not None:
        columns = torch.arange(n) >= torch.tensor(holes)[:, None]
    tables = net.model.rotary_emb(hidden, torch.arange(n).expand(3, 2, -1))
    mask = torch.ones(new, n, dtype=torch.bool).tril(past) & columns[:, None]
    with torch.no_grad():
        expected = indexer(hidden, tables, mask[:, None], Keys(past))[:, 0]
        keep = functools.partial(Keys(past).update_indexer, layer_idx=0)
        found = choose(indexer, hidden, tables, None if holes is None else columns, keep)
    chosen = torch.zeros(2, new, n + 1, dtype=torch.bool).scatter_(2, found.masked_fill(found < 0, n), True)[..., :n]
    assert torch.equal(chosen, expected)
    assert (found >= 0).sum() == expected.sum(), "none twice"


@pytest.mark.quick
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_tokens_are_those_of_transformers_own_cache(offload, monkeypatch):
    """A padded batch, its next turn with a hole in the mask, and the prompt in chunks; nowhere the loop."""
    net, stock = model("sparsekv", *MIXED), model("sdpa", *MIXED)
    cache, theirs = new_cache(net, offload), DynamicCache(config=stock.config)
    text = stock.generate(**INPUTS, **GO, **over(stock, theirs))
    monkeypatch.setattr(pooled_indexer, "own_forward", lambda indexer: pytest.fail)
    assert torch.equal(net.generate(**INPUTS, **GO, **over(net, cache)), text)
    turn = longer(text)
    turn["attention_mask"][1, 100:110] = 0
    expected = stock.generate(**turn, **GO, **over(stock, theirs))
    assert torch.equal(net.generate(**turn, **GO, **over(net, cache)), expected)
    stats = cache.stats()
    assert stats.sparse_calls == 2 * 2 * 19 and stats.materialised == 0
    assert stats.attended_tokens <= stats.sparse_calls * 2 * 2 * 19, "of each row and KV head 4 blocks, and up to 3"
    cache.reset()
    assert torch.equal(net.generate(**INPUTS, **GO, prefill_chunk_size=40, **over(net, cache)), text)
    cache, beams = new_cache(net, offload), {**GO, "num_beams": 3}
    monkeypatch.undo()
    assert torch.equal(net.generate(**INPUTS, **beams, **over(net, cache)), stock.generate(**INPUTS, **beams))


def test_nothing_has_to_be_asked_for():
    net = build("sdpa", MIXED)
    text, before = net.generate(**INPUTS, **GO), {key: dict(one.__dict__) for key, one in net.named_modules()}
    with sparse(net, offload=True):
        assert torch.equal(net.generate(**INPUTS, **GO), text)
    assert {key: dict(one.__dict__) for key, one in net.named_modules()} == before
    assert torch.equal(net.generate(**INPUTS, **GO), text)


def test_masks_that_are_copied_on_their_way():
    """As accelerate does between devices: what a query sees says only the mask. The loop runs, and steps are sparse."""
    net, stock = build("sparsekv", SPARSE), model("sdpa", *SPARSE)
    cache = new_cache(net)

    def copied(module, args, kwargs):
        return args, {**kwargs, "attention_mask": kwargs["attention_mask"].clone()}

    net.model.layers[1].register_forward_pre_hook(copied, with_kwargs=True)
    assert torch.equal(net.generate(**INPUTS, **GO, **over(net, cache)), stock.generate(**INPUTS, **GO))
    assert cache.stats().sparse_calls == 2 * 19
    restore_mla(net)
    assert not any("sparsekv" in key or key == "forward" for one in net.modules() for key in one.__dict__)
    mask = INPUTS["attention_mask"].bool()[:, None, None] & torch.ones(90, 90, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="leave past_key_values out"):
        net(INPUTS["input_ids"], attention_mask=mask, **over(net, new_cache(net)))
    assert not hasattr(SparseCache(TokenConfig()), "position_ids")


def test_another_attention_function_gets_everything():
    net = build("sdpa", MIXED)
    with pytest.warns(UserWarning, match="dense and slow"):
        found = net.generate(**INPUTS, **GO, **over(net, new_cache(net)))
    assert torch.equal(found, model("sdpa", *MIXED).generate(**INPUTS, **GO))


def test_the_life_of_a_cache(tmp_path):
    """Crops, rows that change places, copies: against prompts of the whole text."""
    net, stock = model("sparsekv", *SPARSE), model("sdpa", *SPARSE)
    cache, held = new_cache(net), torch.empty(2, 0, dtype=torch.long)

    @torch.no_grad()
    def feed(cache, held, length: int, seed: int) -> torch.Tensor:
        for part in prompt(2, length, seed=seed)["input_ids"].split(length if length > 9 else 1, 1):
            held = torch.cat((held, part), 1)
            found, expected = net(part, **over(net, cache)).logits, stock(held).logits
            torch.testing.assert_close(found[:, -1], expected[:, -1], atol=5e-4, rtol=1e-4)
        return held

    held = feed(cache, feed(cache, held, 100, 0), 6, 1)
    cache.crop(-60)
    held = feed(cache, feed(cache, held[:, :-60], 20, 2), 5, 3)
    cache.reorder_cache(torch.tensor([1, 0]))
    held, copied = feed(cache, held.flip(0), 4, 4), copy.deepcopy(cache)
    feed(copied, held, 4, 5)
    feed(cache, held, 4, 6)
    cache.save(tmp_path / "file")
    loaded = SparseCache.load(tmp_path / "file", model_config=net.config)
    with pytest.raises(ValueError, match="the model knows the positions of 1: prefill again"), torch.no_grad():
        net(held[:, :1], **over(net, loaded))


@pytest.mark.parametrize(
    ("kinds", "offload", "inputs"),
    [
        (MIXED, True, INPUTS),
        (MIXED, False, prompt(1, 240)),
        pytest.param(SPARSE, False, INPUTS, marks=pytest.mark.slow),
        (SPARSE, True, prompt(2, 11)),
    ],
    ids=["mixed-host", "mixed-long", "sparse-padded", "sparse-short"],
)
def test_replayed_steps(kinds, offload, inputs, monkeypatch):
    """Over blocks that become full, and from 256 tokens on a table that grows; in two turns."""
    monkeypatch.setattr(torch, "relu", torch.nn.functional.softplus)  # no equal scores
    net, stock, go = build("sparsekv", kinds), model("sdpa", *kinds), {**GO, "max_new_tokens": 34}
    runner, cache, theirs = Imitation(net), new_cache(net, offload), DynamicCache(config=stock.config)
    runner.install()
    text = stock.generate(**inputs, **go, **over(stock, theirs))
    assert torch.equal(net.generate(**inputs, **go, **over(net, cache)), text)
    assert runner.replays == 33
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 54), value=1)
    turn = {"input_ids": torch.cat((text, prompt(len(text), 20, seed=5)["input_ids"]), 1), "attention_mask": mask}
    expected = stock.generate(**turn, **GO, **over(stock, theirs))
    assert torch.equal(net.generate(**turn, **GO, **over(net, cache)), expected)
    assert runner.replays == 33 + 19
    runner.remove()
    eager = new_cache(net, offload)
    net.generate(**inputs, **go, **over(net, eager))
    net.generate(**turn, **GO, **over(net, eager))
    mine, other = cache.stats(), eager.stats()
    for count in ("attended_tokens", "context_tokens", "sparse_calls", "dense_calls", "index_bytes_read", "needed"):
        assert getattr(mine, count) == getattr(other, count)


@pytest.mark.parametrize("given", [3, 4, None])
@torch.no_grad()
def test_replayed_positions_in_three_dimensions(given, monkeypatch):
    """Those of an image's patches differ in each; or the model counts them."""
    monkeypatch.setattr(torch, "relu", torch.nn.functional.softplus)
    net, stock, ids = build("sparsekv", MIXED), model("sdpa", *MIXED), prompt(2, 80)["input_ids"]
    positions = torch.randint(0, 3, (given or 4, 2, 80), generator=torch.Generator().manual_seed(1)).cumsum(2)
    runner, cache, theirs = Imitation(net), new_cache(net), DynamicCache(config=stock.config)
    runner.install()
    for part, at in zip(ids.split((60, *[1] * 20), 1), positions.split((60, *[1] * 20), 2)):
        where = {} if given is None else {"position_ids": at}
        found, expected = (one(part, **where, **over(one, held)) for one, held in ((net, cache), (stock, theirs)))
        torch.testing.assert_close(found.logits[:, -1], expected.logits[:, -1], atol=5e-4, rtol=1e-4)
    assert runner.replays == 20
    runner.remove()


def test_replayed_beams(monkeypatch):
    """Rows change places, states and positions with them."""
    monkeypatch.setattr(torch, "relu", torch.nn.functional.softplus)
    net, stock, beams = build("sparsekv", MIXED), model("sdpa", *MIXED), {**GO, "num_beams": 3}
    runner = Imitation(net)
    runner.install()
    found = net.generate(**INPUTS, **beams, **over(net, new_cache(net)))
    assert torch.equal(found, stock.generate(**INPUTS, **beams))
    assert runner.replays > 10
    runner.remove()


def test_what_it_takes():
    net = model("sdpa", *MIXED)
    plan = plan_memory(model_shape(net.config, torch.float32), TokenConfig(), None, context=700, batch=2)
    cache = DynamicCache(config=net.config)
    with torch.no_grad():
        net(**prompt(2, 700), **over(net, cache))
    whole = [layer for layer in cache.layers if hasattr(layer, "indexer_keys")]
    assert plan.dense_kv - plan.stock == sum(
        t.nbytes for one in whole for t in (one.keys, one.values, one.indexer_keys)
    )
    assert plan.index_keys > 0 and plan.labels == 0


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_tokens_on_a_gpu(offload, captured, monkeypatch):
    """In two turns, over blocks that become full; captured steps as eager ones."""
    monkeypatch.setattr(torch, "relu", torch.nn.functional.softplus)  # no equal scores
    net, stock = build("sparsekv", MIXED).cuda(), build("sdpa", MIXED).cuda()
    if captured:
        optimize(net, fused=False)
    inputs, go = {name: tensor.cuda() for name, tensor in INPUTS.items()}, {**GO, "max_new_tokens": 60}
    cache, theirs = new_cache(net, offload), DynamicCache(config=stock.config)
    text = stock.generate(**inputs, **go, **over(stock, theirs))
    assert torch.equal(net.generate(**inputs, **go, **over(net, cache)), text)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 80), value=1)
    turn = {"input_ids": torch.cat((text, prompt(2, 20, seed=5)["input_ids"].cuda()), 1), "attention_mask": mask}
    expected = stock.generate(**turn, **GO, **over(stock, theirs))
    assert torch.equal(net.generate(**turn, **GO, **over(net, cache)), expected)
    assert cache.stats().sparse_calls == 2 * (59 + 19)
    if captured:
        assert runner_of(net).replays == 59 + 19
