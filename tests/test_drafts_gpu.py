"""Drafts on a real GPU: kernels get one row as many, and captured steps alternate with eager passes."""

from __future__ import annotations

import pytest
import torch
from caches import CACHES
from models import build
from test_drafts import MOST, SPARSE, TIGHT, filled, repetitive, rounds

from hf_sparsekv import optimize, predict_ahead

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


@pytest.mark.parametrize(
    "name", ["host-default", "device-default", "host-nolag", "predictive-host", "progressive-host"]
)
def test_optimized_models_verify_drafts_eagerly(name):
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
        assert cache.stats().draft_queries > 0
    assert torch.equal(*found)
