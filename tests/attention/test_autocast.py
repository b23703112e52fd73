"""``torch.autocast`` around the model: attention is computed in its dtype, as by sdpa, and no operator runs in it."""

from __future__ import annotations

import copy

import pytest
import torch
from caches import ALL, CACHES, FULL, ONE_EACH, SMALL, TIGHT, UNSAVED, predictive, two_level
from models import build, model, prompt, reference
from transformers import DynamicCache

from hf_sparsekv import OffloadConfig, PrefixCache, QueryTap, SparseCache, TokenConfig, tensors
from hf_sparsekv.layers.sparse_layer import SparseLayer
from hf_sparsekv.policies.ahead.layer_ahead import LayerAheadPolicy
from hf_sparsekv_eval.prefix import prefill

NEW = 8
CLEAR = {"batch": 1, "length": 110, "seed": 29}  # a prompt whose answer meets no near tie, which rounding could turn
CHOOSES = {"level": "auto", "lag": False}
LOW = torch.bfloat16


def answer(net, cache, inputs, tokens: int = NEW, **options):
    """Greedy tokens under autocast."""
    with torch.autocast(inputs["input_ids"].device.type, LOW):
        out = net.generate(
            **inputs, past_key_values=cache, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options
        )
    return out[:, inputs["input_ids"].shape[1] :]


@pytest.fixture(scope="module")
def expected():
    """By sdpa under the same autocast."""
    return answer(reference("llama"), DynamicCache(), prompt(**CLEAR))


@pytest.mark.few(name=ONE_EACH)
@pytest.mark.parametrize("name", CACHES)
def test_tokens_are_those_of_sdpa_where_everything_is_attended_to(name, expected):
    cache = CACHES[name](**FULL)
    assert torch.equal(answer(model("llama"), cache, prompt(**CLEAR)), expected)
    assert {layer.store.dtype for layer in cache.sparse_layers} == {LOW}, "stored as attention reads them"


@pytest.mark.few(name=ONE_EACH)
@pytest.mark.parametrize("name", ALL)
def test_everything_that_a_cache_does(name, tmp_path):
    """A prompt in chunks, steps that choose, copies, beams' rows, crops, another turn, a file."""
    net, cache, inputs = model("llama"), ALL[name](**TIGHT), prompt(2, 110, (0, 21))
    with torch.autocast("cpu", LOW), torch.no_grad():
        answer(net, cache, inputs, prefill_chunk_size=50)
        cache.reorder_cache(torch.tensor([1, 0]))
        other = copy.deepcopy(cache)
        cache.crop(-30)
        ids, mask = prompt(2, 9)["input_ids"], torch.ones(2, 200, dtype=torch.long)
        columns = cache.get_seq_length()
        mask[0, :21] = 0  # rows have changed places
        assert columns == 110 + NEW - 1 - 30
        logits = net(ids, attention_mask=mask[:, : columns + 9], past_key_values=cache).logits
        assert torch.isfinite(logits).all()
        steps = [net(ids[:, :1], attention_mask=mask[:, : columns + 10 + i], past_key_values=cache) for i in range(3)]
        assert all(torch.isfinite(step.logits).all() for step in steps)
        if name not in UNSAVED:
            other.save(tmp_path / "cache")
            loaded = type(other).load(tmp_path / "cache", offload=other.offload_config)
            found = [
                net(ids[:, :1], attention_mask=mask[:, : 110 + NEW], past_key_values=held).logits
                for held in (other, loaded)
            ]
            assert torch.equal(*found)
    assert cache.stats().decode_steps >= NEW


@pytest.mark.parametrize("family", ["llama", "deepseek-v3", "gemma3", "gemma2", "gpt-oss"])
def test_padding_latents_softcaps_sinks_and_sliding_layers(family):
    net, plain, inputs = model(family), reference(family), prompt(2, 110, (0, 21))
    ours, stock = two_level(False, model_config=net.config, **CHOOSES, **FULL), DynamicCache(config=net.config)
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 6, dtype=torch.long)), 1)
    parts = (inputs["input_ids"], *prompt(2, 6, seed=1)["input_ids"].split(1, dim=1))
    columns = 0
    with torch.autocast("cpu", LOW), torch.no_grad():
        for ids in parts:
            columns += ids.shape[1]
            common = {"attention_mask": mask[:, :columns], "logits_to_keep": 1}
            expected = plain(ids, past_key_values=stock, **common).logits.float()
            found = net(ids, past_key_values=ours, **common).logits.float()
            assert (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert torch.isfinite(answer(net, two_level(model_config=net.config, **TIGHT), inputs).float()).all()


def test_foreseen_queries_are_computed_as_the_model_does(monkeypatch):
    """The layer before is asked inside autocast, bit for bit what the model computes, what it gives chooses outside."""
    net, inputs = build("llama", "sparsekv"), prompt(1, 150)
    cache = predictive(False, predictor="layer", **TIGHT)
    begin, choose, by_model, chosen_for = SparseLayer.foresee, LayerAheadPolicy.foresee, [], []

    def begins(layer, expected, stream):
        by_model.append(expected()[0])
        begin(layer, expected, stream)

    def chooses(policy, query, store, plan):
        assert not torch.is_autocast_enabled("cpu")
        chosen_for.append((by_model[-1].to(LOW), query))
        choose(policy, query, store, plan)

    monkeypatch.setattr(SparseLayer, "foresee", begins)
    monkeypatch.setattr(LayerAheadPolicy, "foresee", chooses)
    with QueryTap(net):
        answer(net, cache, inputs)
    assert 0 < len(chosen_for) == cache.stats().foreseen_calls
    assert all(torch.equal(*both) for both in chosen_for)


def test_prefixes_and_evaluation(expected):
    net, inputs = model("llama"), prompt(**CLEAR)
    with torch.autocast("cpu", LOW), torch.no_grad():
        prefix = PrefixCache(OffloadConfig())
        net(inputs["input_ids"][:, :100], past_key_values=prefix)
        started = prefix.start(two_level(**FULL))
        read = prefill(net, inputs["input_ids"][:, :100])
        filled, _ = read.start(net, two_level(False, **FULL))
    for cache in (started, filled):
        assert torch.equal(answer(net, cache, inputs), expected)


def test_a_cache_that_began_outside_goes_on_inside_and_not_the_other_way_round():
    """Float32 keys stay what they are; of rounded ones there is nothing to go back to."""
    net, ids = model("llama"), prompt(1, 120)["input_ids"]
    cache, low = (SparseCache(TokenConfig(**SMALL, token_budget=32), None) for _ in range(2))
    with torch.no_grad():
        net(ids[:, :110], past_key_values=cache)
        with torch.autocast("cpu", LOW):
            for token in ids[:, 110:].split(1, dim=1):
                assert torch.isfinite(net(token, past_key_values=cache).logits).all()
            net(ids[:, :110], past_key_values=low)
        assert cache.sparse_layers[0].store.dtype == torch.float32
        with pytest.raises(
            ValueError, match=r"keys of dtype torch.bfloat16, got torch.float32: keep one dtype \(inside"
        ):
            net(ids[:, 110:111], past_key_values=low)


def test_functions_are_entered_only_where_an_autocast_is_on(monkeypatch):
    inside = tensors.no_autocast(lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")))
    entered = []
    real = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda *args, **named: entered.append(args) or real(*args, **named))
    assert inside() == (False, False) and not entered
    with real("cpu", LOW):
        assert inside() == (False, False) and entered == [("cpu",)]
        assert torch.is_autocast_enabled("cpu"), "as it was"
        with pytest.raises(ZeroDivisionError):
            tensors.no_autocast(lambda: 1 / 0)()
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("name", ["device-default", "host-default", "host", "progressive-host", "predictive"])
def test_on_a_gpu(name, optimized):
    from hf_sparsekv import optimize

    inputs = {key: value.cuda() for key, value in prompt(2, 300, (0, 21)).items()}
    expected = answer(build("llama", "sdpa").cuda(), DynamicCache(), inputs)
    net = build("llama", "sparsekv").cuda()
    if optimized:
        optimize(net)
    found = answer(net, CACHES[name](**FULL), inputs)
    assert (found == expected).float().mean() > 0.9  # near ties may turn: kernels sum in another order
    assert answer(net, CACHES[name](**TIGHT), inputs).shape == expected.shape
