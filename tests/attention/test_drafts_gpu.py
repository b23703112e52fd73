"""Drafts on a real GPU: kernels get one row as many, and captured passes give what eager ones do."""

from __future__ import annotations

import pytest
import torch
from caches import CACHES
from models import build
from test_drafts import MOST, SPARSE, TIGHT, filled, repetitive, rounds
from test_drafts_captured import TOGETHER, alternate, same_tokens

from hf_sparsekv import optimize, predict_ahead
from hf_sparsekv.cuda_graph.optimize import runner_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*by that layer's own query")]


@pytest.mark.parametrize("kind", ["llama", "glm4-moe-lite"])
@pytest.mark.parametrize("name", SPARSE)
def test_a_pass_is_as_many_steps(name, kind):
    net = build(kind, "sparsekv").cuda()
    ours, theirs = filled(net, CACHES[name]), filled(net, CACHES[name])
    assert rounds(net, ours, theirs) < 5e-3
    found, expected = ours.stats(), theirs.stats()
    assert found.draft_queries > 0
    if not ours.config.dense_layers:
        assert found.context_tokens == expected.context_tokens


@pytest.mark.parametrize("kind", ["llama", "glm4-moe-lite"])
@pytest.mark.parametrize("name", TOGETHER)
def test_captured_passes_are_eager_ones(name, kind):
    """Passes of all lengths, and steps where they choose by the same query with hooks and without."""
    eager, fast = build(kind, "sparsekv").cuda(), optimize(build(kind, "sparsekv").cuda(), fused=False)
    ours, theirs = filled(fast, CACHES[name]), filled(eager, CACHES[name])
    lengths = [2, 3, MOST - 1, MOST, MOST]
    assert alternate(fast, eager, ours, theirs, 24, lengths if "predictive" in name else [1, *lengths]) < 5e-3
    assert runner_of(fast).replays == 24
    same_tokens(ours, theirs)
    assert ours.stats().draft_queries == theirs.stats().draft_queries > 0


@pytest.mark.parametrize("name", ["host-default", "device-default"])
@pytest.mark.parametrize("max_draft", [20, 40])
def test_several_blocks_are_sealed_in_a_captured_pass(name, max_draft):
    net, fast = build("llama", "sparsekv").cuda(), optimize(build("llama", "sparsekv").cuda(), fused=False)
    changes = {"window": 12, "max_draft": max_draft, "token_budget": 2}
    ours, theirs = filled(fast, CACHES[name], **changes), filled(net, CACHES[name], **changes)
    assert alternate(fast, net, ours, theirs, 8, [max_draft - 2, max_draft + 1]) < 5e-3
    assert runner_of(fast).replays == 8
    same_tokens(ours, theirs)


@pytest.mark.parametrize(
    "name", ["host-default", "device-default", "device-dense1", "host-nolag", "predictive-host", "progressive-host"]
)
def test_prompt_lookup_of_optimized_models(name):
    """The text of eager passes; captured, but for the method of which each choice takes pages of the one before."""
    given = {key: value.cuda() for key, value in repetitive().items()}
    go = {"do_sample": False, "max_new_tokens": 40, "prompt_lookup_num_tokens": MOST - 1}
    found = []
    for optimized in (False, True):
        net, cache = build("llama", "sparsekv").cuda(), CACHES[name](**TIGHT)
        if optimized:
            optimize(net, fused=False)
        elif name == "predictive-host":  # which otherwise chooses by each layer's own query
            predict_ahead(net)
        found.append(net.generate(**given, past_key_values=cache, **go))
        stats = cache.stats()
        assert stats.draft_queries > 0
        if optimized and name != "host-nolag":
            assert runner_of(net).replays == stats.decode_steps
    assert torch.equal(*found)
