"""Predictive caches in files, their configurations, and what goes wrong."""

from __future__ import annotations

import pytest
import torch
from caches import predictive, two_level
from models import model, prompt
from saved_files import rewrite
from test_predictive import TIGHT, decode

from hf_sparsekv import AsyncPredictiveCache, OffloadConfig, PredictiveConfig, SparseCache, TokenConfig
from hf_sparsekv.policies.ahead.query_ring import QueryRing

# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_a_saved_cache_knows_the_queries_that_are_left(name, tmp_path):
    """Latents' queries are as wide as both parts of a row; those of columns that crop() took back are forgotten."""
    cache, net = predictive(False, **TIGHT), model(name)
    with torch.no_grad():
        for part in prompt(2, 170)["input_ids"].split([150, *[1] * 20], dim=1):
            net(part, past_key_values=cache)
        cache.crop(-3)
        cache.save(tmp_path / "cache")
        copied = SparseCache.load(tmp_path / "cache")
        assert [c.sparse_layers[0].policy.queries.count.tolist() for c in (cache, copied)] == [[14, 14]] * 2
        for token in prompt(2, 30, seed=5)["input_ids"].split(1, dim=1):
            assert torch.equal(*(net(token, past_key_values=c).logits for c in (cache, copied)))


def test_a_crop_behind_all_known_queries(tmp_path):
    """The next steps' queries are known again, and a file of such a cache is a good one."""
    cache, net = predictive(False, **TIGHT), model("llama")
    with torch.no_grad():
        net(prompt(2, 170)["input_ids"], past_key_values=cache)
        cache.crop(-60)
        cache.save(tmp_path / "cache")
        copied = SparseCache.load(tmp_path / "cache")
        for token in prompt(2, 3, seed=5)["input_ids"].split(1, dim=1):
            assert torch.equal(*(net(token, past_key_values=c).logits for c in (cache, copied)))
    for each in (cache, copied):
        assert [layer.policy.queries.count.tolist() for layer in each.sparse_layers] == [[3, 3]] * 2


@pytest.mark.parametrize("ring", [None, [], [4]], ids=str)
def test_a_file_without_its_queries_is_damaged(ring, tmp_path):
    """The header says nothing of them, and their tensors are gone, too: nothing else contradicts it."""
    cache = predictive(False, **TIGHT)
    decode(cache, steps=2)
    cache.save(tmp_path / "cache")

    def drop(held):
        for name in ("queries", "queries_from"):
            del held[f"layers.0.{name}"]

    path = rewrite(tmp_path / "cache", tmp_path / "x", tensors=drop if ring is None else lambda held: None, ring=ring)
    message = (
        "ring in layer 0 does not fit the rest" if ring is None else "its header: ring in layer 0 is .*, not a list"
    )
    with pytest.raises(ValueError, match=rf"is damaged \({message}"):
        SparseCache.load(path)


def test_a_file_with_queries_of_another_cache_is_damaged(tmp_path):
    cache = two_level(token_budget=32)
    with torch.no_grad():
        model("llama")(**prompt(2, 90), past_key_values=cache)
    cache.save(tmp_path / "cache")

    def add(held):
        held["layers.0.queries"] = torch.zeros(2, 4, 3, 16)
        held["layers.0.queries_from"] = torch.zeros(2, dtype=torch.int32)

    with pytest.raises(ValueError, match=r"is damaged \(ring in layer 0 does not fit the rest"):
        SparseCache.load(rewrite(tmp_path / "cache", tmp_path / "x", tensors=add, ring=[4, 3]))


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"token_budget": 0}, "token_budget must be a positive integer"),
        ({"predictor": "next"}, "predictor must be 'layer', 'layer:in_delta', 'assembled' or None, got 'next'"),
        ({"predictor": "asembled"}, "did you mean 'assembled'"),
        ({"predictor": "layer", "cache_rank": "cuda:1"}, "chooses within a step, which cache_rank='cuda:1' cannot"),
        ({"predictor": "layer", "cache_rank": "cpu"}, "leave predictor out, which takes 'assembled' there"),
        ({"predictor": 3}, "predictor must be 'layer'"),
        ({"predictor": "assembled", "mass": 0.9}, "mass=0.9 is for queries that the layer before expects"),
        ({"start_length": -1}, "start_length must be an integer >= 0"),
        ({"cache_rank": "disk"}, "cache_rank must be"),
        ({"cache_rank": "cuda:1", "dense_below": 5000}, "blocks lie on that device.* leave dense_below=5000 out"),
        ({"strict": 1.5}, "strict must be True or False"),
        ({"label_channels": 3}, "label_channels must be even"),
        ({"token_reduce": "sum"}, "token_reduce must be 'mean' or 'max'"),
    ],
)
def test_configurations_are_checked(wrong, says):
    with pytest.raises(ValueError, match=says):
        PredictiveConfig(**wrong)


def test_the_cache_takes_its_own_configuration_and_place():
    with pytest.raises(TypeError, match="config must be a PredictiveConfig, got TokenConfig"):
        AsyncPredictiveCache(TokenConfig())
    with pytest.raises(TypeError, match="offload must be an OffloadConfig or None"):
        AsyncPredictiveCache(offload=True)
    with pytest.raises(ValueError, match="cache_rank='stream' keeps all blocks on the device"):
        AsyncPredictiveCache(PredictiveConfig(cache_rank="stream"), OffloadConfig())
    with pytest.raises(ValueError, match="do not go to host memory: leave offload out"):
        AsyncPredictiveCache(PredictiveConfig(cache_rank="cpu"), OffloadConfig())
    assert AsyncPredictiveCache(PredictiveConfig(cache_rank="host")).offload_config == OffloadConfig()
    assert AsyncPredictiveCache().config == PredictiveConfig()


def test_a_prediction_that_fails_is_told_and_leaves_a_cache_to_reset(monkeypatch):
    def broken(self, out=None):
        raise ArithmeticError("no prediction")

    cache = predictive(False, **TIGHT)
    decode(cache, steps=3)
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError, match="no prediction"), torch.no_grad():
        patch.setattr(QueryRing, "predict", broken)
        model("llama")(torch.full((2, 1), 5), past_key_values=cache)
    with pytest.raises(RuntimeError, match="incomplete"), torch.no_grad():
        model("llama")(torch.full((2, 1), 5), past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(decode(cache), decode(predictive(False, **TIGHT)))
