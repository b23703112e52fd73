"""Tokens by need: ``TokenConfig(mass=...)`` chooses as progressive selection does, with the default's labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from caches import FULL, TAIL, progressive, two_level
from models import build, model, prompt
from oracle import TOLERANCE, Race
from test_progressive import WalkOracle

from hf_sparsekv import SparseCache, TokenConfig

NEED = {"level": "auto", "lag": False, "mass": 0.6}
LABELS = {"label_channels": 4}  # each method has a default of its own


@torch.no_grad()
def logits(cache, pads, steps=24):
    """Decode steps over given tokens; two blocks are sealed meanwhile."""
    net, inputs = model("llama"), prompt(2, 200, pads)
    net(**inputs, past_key_values=cache)
    mask, found = inputs["attention_mask"], []
    for token in prompt(2, steps, seed=1)["input_ids"].split(1, dim=1):
        mask = torch.cat((mask, torch.ones_like(token)), 1)
        found.append(net(token, attention_mask=mask, past_key_values=cache).logits[:, -1])
    return torch.stack(found, 1)


@pytest.mark.few
@pytest.mark.parametrize("pads", [None, (0, 30)])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("more", [{}, TAIL], ids=["alone", "means"])
def test_as_progressive_selection(pads, offload, more):
    """Which follows an oracle (test_progressive.py)."""
    mine, theirs = two_level(offload, **NEED, **LABELS, **more), progressive(offload, min_tokens=64, **LABELS, **more)
    assert torch.equal(logits(mine, pads), logits(theirs, pads))
    assert mine.stats().attended_tokens == theirs.stats().attended_tokens
    everything = two_level(offload, **{**NEED, "mass": 1.0})
    logits(everything, pads)
    assert 0 < mine.stats().attended_tokens < everything.stats().attended_tokens


@pytest.mark.parametrize("mass", [0.75, 0.9])
def test_the_mass_is_the_one_that_is_asked_for(mass):
    """An oracle that is told the same mass chooses as many tokens, and gives the same logits."""
    told = progressive(False, mass=mass, min_tokens=64, **LABELS).config
    race = Race(two_level(False, **{**NEED, "mass": mass}, **LABELS), WalkOracle(told))
    assert race.read(200, (0, 30)) < TOLERANCE
    assert race.run(12) < TOLERANCE
    assert race.ours.stats().attended_tokens == pytest.approx(race.oracle.attended, rel=1e-3)


def test_learned_sinks_hold_mass_too():
    """What they hold needs no token."""
    found = []
    for logit in (-30.0, 30.0):
        net, cache = build("gpt-oss", "sparsekv"), two_level(False, **NEED)
        with torch.no_grad():
            attention = net.model.layers[-1].self_attn  # the only sparse one: queries are the same
            attention.sinks.fill_(logit)
            attention.q_proj.weight.mul_(0.1)  # each token holds some
            net(**prompt(1, 200), past_key_values=cache)
            net(torch.tensor([[5]]), past_key_values=cache)
        found.append(cache.stats().attended_tokens)
    assert 0 < found[1] < found[0]


def test_a_budget_is_the_most():
    capped, theirs = (
        two_level(False, **NEED, **LABELS, token_budget=32),
        progressive(False, **LABELS, min_tokens=32, most=32),
    )
    assert torch.equal(logits(capped, None), logits(theirs, None))
    assert sum(walk.capped for walk in capped.stats().walks) > 0


@pytest.mark.parametrize("mass", [0, 1.01, -0.5, True, "most"])
def test_a_mass_is_a_share(mass):
    with pytest.raises(ValueError, match=r"mass must be a number in \(0, 1\] or None"):
        TokenConfig(mass=mass)


@pytest.mark.parametrize("blocks", [{"level": "block"}, {"level": "two_level"}, {"lag": True}, {"num_blocks": 8}])
def test_not_with_a_choice_of_blocks(blocks):
    with pytest.raises(ValueError, match="give a token_budget instead"):
        TokenConfig(mass=0.9, **blocks)


def test_what_is_fixed_and_what_is_needed():
    assert (TokenConfig().budget, TokenConfig().threshold) == (0, 0.9)
    assert (TokenConfig(token_budget=7).budget, TokenConfig(token_budget=7).threshold) == (7, None)
    assert TokenConfig(mass=0.9).budget == 0 and TokenConfig(token_budget=7, mass=0.9).budget == 7
    for level in ("two_level", "block"):
        assert (TokenConfig(level=level).budget, TokenConfig(level=level).threshold) == (1024, None)
    assert TokenConfig.preset("paper").budget == 1024


def test_a_saved_cache_may_go_on_by_need(tmp_path):
    cache = two_level(False, **{**NEED, "mass": None, "token_budget": 32})
    logits(cache, None)
    cache.save(tmp_path / "cache")
    ways = ({"token_budget": None, "mass": 1.0}, {"mass": None, "token_budget": FULL["token_budget"]})
    loaded, whole = (SparseCache.load(tmp_path / "cache", config=replace(cache.config, **way)) for way in ways)
    with torch.no_grad():
        one, other = (model("llama")(torch.tensor([[5], [6]]), past_key_values=c).logits for c in (loaded, whole))
    torch.testing.assert_close(one, other)
