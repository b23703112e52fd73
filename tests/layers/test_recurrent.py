"""Layers whose past is in a state, and attention in chunks: replayed steps give the tokens of transformers' cache."""

from __future__ import annotations

import copy

import pytest
import torch
from captured import Imitation, imitated
from layer_kinds import CHUNKS, FULL, STATES, TELLING, TIGHT, eager, new_model, plain
from models import prompt
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from hf_sparsekv import SparseCache, TokenConfig, optimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.experts.interface import use_ours
from hf_sparsekv.layers.recurrent import Recurrent

KINDS = *STATES, *CHUNKS
GO = {"do_sample": False, "min_new_tokens": 40, "max_new_tokens": 40}


def new_cache(model: torch.nn.Module, settings: dict = FULL) -> SparseCache:
    return SparseCache(TokenConfig(**settings), None, model.config)


def replayed(kind: str) -> tuple[torch.nn.Module, Imitation]:
    return imitated(make=lambda: new_model(kind, "sparsekv"))


def test_kinds_are_as_they_are_called():
    """Each has layers of its kind among the tiny ones, beside some that attend to everything."""
    for kind in KINDS:
        cache = new_cache(plain(kind))
        others = [layer for layer in cache.layers if layer not in cache.sparse_layers]
        assert others and cache.sparse_layers
        plain(kind)(torch.tensor([[5, 6, 7]]), past_key_values=(stock := DynamicCache(config=plain(kind).config)))
        kept = [
            layer for layer in stock.layers if type(layer) is LinearAttentionLayer and layer.conv_states[0] is not None
        ]
        assert bool(kept) == (kind != "llama4_text")
        assert len(kept) == 0 or all(isinstance(layer, Recurrent) for layer in others)


@pytest.mark.few(kind=TELLING)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pads", [None, (0, 9, 61)], ids=["whole", "padded"])
def test_replayed_steps(kind, pads):
    """Of a budget for everything the tokens of transformers' own; of a small one those of eager steps."""
    inputs = prompt(3, 70, pads)
    expected = plain(kind).generate(**inputs, **GO)
    model, runner = replayed(kind)
    try:
        assert torch.equal(model.generate(**inputs, past_key_values=new_cache(model), **GO), expected)
        assert runner.replays == 39
        small = eager(kind).generate(**inputs, past_key_values=new_cache(eager(kind), TIGHT), **GO)
        assert torch.equal(model.generate(**inputs, past_key_values=new_cache(model, TIGHT), **GO), small)
    finally:
        runner.remove()


@pytest.mark.few(kind=TELLING)
@pytest.mark.parametrize("kind", KINDS)
def test_turns_copies_and_beams(kind):
    """A second turn is read by an eager pass between replays; copies and beams have states of their own."""
    first, more = prompt(1, 70), prompt(1, 11, seed=5)["input_ids"]
    model, runner = replayed(kind)
    texts = []
    try:
        for one, cache in ((plain(kind), DynamicCache(config=plain(kind).config)), (model, new_cache(model))):
            turn = one.generate(**first, past_key_values=cache, **GO)
            branch = copy.deepcopy(cache)
            again = torch.cat((turn, more), 1)
            given = {"attention_mask": torch.ones_like(again), **GO}
            second = one.generate(again, past_key_values=cache, **given)
            third = one.generate(torch.cat((turn, more.flip(1)), 1), past_key_values=branch, **given)
            texts.append((turn, second, third))
        for expected, found in zip(*texts):
            assert torch.equal(found, expected)
        assert runner.replays == 3 * 39
        beams = {**GO, "num_beams": 3, "max_new_tokens": 25, "min_new_tokens": 25}
        before = runner.captures
        expected = plain(kind).generate(**first, **beams)
        assert torch.equal(model.generate(**first, past_key_values=new_cache(model), **beams), expected)
        assert runner.captures < before + 4  # states are reordered where they are
    finally:
        runner.remove()


@pytest.mark.few(kind=TELLING)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_change_and_a_cache_is_used_again(kind):
    """Rows are repeated and selected between replays, and after ``reset()`` another batch begins."""
    model, runner = replayed(kind)
    inputs = prompt(2, 50, (0, 7))
    try:
        held = new_cache(model), DynamicCache(config=plain(kind).config)
        for one, cache in zip((model, plain(kind)), held):
            with torch.no_grad():
                mask = inputs["attention_mask"]
                where = (mask.cumsum(1) - 1).clamp_min(0)
                one(**inputs, position_ids=where, past_key_values=cache)
        for rows in (torch.tensor([1, 0, 1]), torch.tensor([2, 1, 0]), torch.tensor([0])):
            where, mask = where[:, -1:][rows] + 1, torch.cat((mask[rows], torch.ones(len(rows), 1)), 1).long()
            logits = []
            for one, cache in zip((model, plain(kind)), held):
                if isinstance(cache, SparseCache):
                    cache.batch_select_indices(rows)
                else:
                    cache.reorder_cache(rows)
                with torch.no_grad():
                    given = {"attention_mask": mask, "position_ids": where, "past_key_values": cache}
                    logits.append(one(torch.full((len(rows), 1), 9), **given).logits.clone())
            assert torch.allclose(*logits, atol=1e-4, rtol=1e-4)
        assert runner.replays == 3
        held[0].reset()
        again = prompt(2, 33, seed=8)
        expected = plain(kind).generate(**again, **GO)
        assert torch.equal(model.generate(**again, past_key_values=held[0], **GO), expected)
    finally:
        runner.remove()


def test_a_state_in_another_place():
    """A model that replaces its state in each step is not captured: a graph would go on with the old one."""
    model, runner = replayed("lfm2")
    layer = model.model.layers[0].conv
    original = layer.forward

    def forward(hidden_states, past_key_values=None, **given):
        out = original(hidden_states, past_key_values=past_key_values, **given)
        states = past_key_values.layers[0].conv_states
        states[0] = states[0].clone()
        return out

    layer.forward = forward
    inputs = prompt(1, 40)
    expected = plain("lfm2").generate(**inputs, **GO)
    with pytest.warns(
        UserWarning, match="cannot be captured .a step puts a new tensor in the place of a layer's state"
    ):
        found = model.generate(**inputs, past_key_values=new_cache(model), **GO)
    assert torch.equal(found, expected) and runner.replays == 0
    runner.remove()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_captured_on_a_gpu(kind, dtype):
    """In float32 the tokens of transformers' own cache, in bfloat16 those of eager steps; padded, and a second turn."""
    inputs = {name: value.cuda() for name, value in prompt(3, 70, (0, 9, 61)).items()}
    more = prompt(3, 11, seed=5)["input_ids"].cuda()
    fast = optimize(new_model(kind, "sparsekv").cuda().to(dtype), fused=False)
    exact = dtype == torch.float32
    other = new_model(kind, None if exact else "sparsekv").cuda().to(dtype)
    if not exact:  # other kernels round otherwise
        use_ours(other)
    texts = []
    for one in (other, fast):
        cache = DynamicCache(config=one.config) if exact and one is other else new_cache(one)
        turn = one.generate(**inputs, past_key_values=cache, **GO)
        ids = torch.cat((turn, more), 1)
        mask = torch.cat((inputs["attention_mask"], torch.ones_like(ids[:, 70:])), 1)
        texts.append(one.generate(ids, attention_mask=mask, past_key_values=cache, **GO))
    assert runner_of(fast).replays == 78
    if exact or kind != "llama4_text":  # a ring is read by another kernel than a chunk is in an eager step
        assert torch.equal(*texts)
