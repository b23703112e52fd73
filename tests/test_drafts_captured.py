"""Passes over drafts, captured: what eager passes give. Imitated here; on a GPU: test_drafts_gpu.py."""

from __future__ import annotations

import random

import pytest
import torch
from caches import CACHES
from captured import imitated, same_counts
from models import prompt
from test_drafts import MOST, bare, filled, together, ways

from hf_sparsekv.cuda_graph.optimize import draft_width

pytestmark = pytest.mark.filterwarnings("ignore:.*by that layer's own query")

TOGETHER = ways("together")
SOME = ["device-default", "host-default", "host-default-smallpool", "device", "device-dense1", "progressive-host"]


def same_tokens(ours, theirs) -> None:
    """Both hold the same, in as many blocks."""
    for one, other in zip(ours.sparse_layers, theirs.sparse_layers):
        assert one.store.held.same(other.store.held)
        held = [layer.store.tokens()[:, :, : one.store.length] for layer in (one, other)]
        torch.testing.assert_close(*held, atol=1e-4, rtol=1e-4)


def alternate(net, plain, ours, theirs, n: int, seed: int = 0, most: int = MOST) -> float:
    """Steps and passes of all lengths over both, drafts taken back between them; the largest difference of a logit."""
    draw, worst = random.Random(seed), 0.0
    for i in range(n):
        new = draw.choice([1, 2, 3, most - 1, most, most])
        ids = prompt(1, new, seed=100 * seed + i)["input_ids"]
        found, expected = together(net, ids, ours), together(plain, ids, theirs)
        assert found.shape == expected.shape
        worst = max(worst, float((found - expected).abs().max()))
        if remove := draw.randint(0, new - 1):
            ours.crop(-remove)
            theirs.crop(-remove)
    return worst


def test_room_of_a_graph():
    assert [draft_width(n, 17) for n in range(2, 18)] == [3, 3, 5, 5, 9, 9, 9, 9, *[17] * 8]
    assert [draft_width(n, 7) for n in range(2, 8)] == [3, 3, 5, 5, 7, 7]
    assert draft_width(2, 2) == 2


@pytest.mark.parametrize("net", ["llama", "glm4-moe-lite"])
@pytest.mark.parametrize("name", TOGETHER)
def test_captured_passes_are_eager_ones(name, net):
    fast, runner = imitated(net)
    plain = bare(net)
    ours, theirs = filled(fast, CACHES[name]), filled(plain, CACHES[name])
    blocks = ours.sparse_layers[-1].store.full_blocks
    worst = alternate(fast, plain, ours, theirs, 24)
    assert "predictive" in name or worst < 1e-3  # whose steps are foreseen here, not there
    assert runner.replays == 24
    assert runner.captures <= 8
    assert ours.sparse_layers[-1].store.full_blocks > blocks
    if "predictive" not in name:
        same_tokens(ours, theirs)
        if not ours.config.dense_layers:  # whose passes are exact, and count as such, where they are eager
            same_counts(ours, theirs)
    assert ours.stats().draft_queries == theirs.stats().draft_queries
