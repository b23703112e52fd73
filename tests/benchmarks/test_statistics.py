"""Statistics of selections against what they say they are, worked out the long way."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from caches import two_level
from models import model, prompt

from benchmarks.synthetic import statistics as st
from hf_sparsekv.ops.selection.topk_select import block_select


def test_overlap_literally():
    scores = torch.tensor([[[5.0, 4, 1, 0]], [[5, 1, 4, 0]], [[0, 1, 4, 5]]])  # {0, 1}, {0, 2}, {2, 3}
    mass = torch.full((3, 1, 4), 0.25)
    found = st.LayerStatistics({Fraction(1, 2): 2}, 4)
    found.add({"bound": scores, "oracle": mass}, mass, torch.zeros(3, 1))
    values = found.values()
    assert values["k=1/2:bound:overlap_1"] == pytest.approx(0.5)
    assert values["k=1/2:bound:overlap_2"] == pytest.approx(0.0)
    assert values["k=1/2:oracle:overlap_1"] == pytest.approx(1.0)  # equals: the lower ones, always
    assert "k=1/2:bound:overlap_4" not in values
    assert "k=1/2:bound:working_set" not in values


def test_ranking_is_that_of_the_cache():
    torch.manual_seed(0)
    scores = torch.randint(0, 5, (6, 2, 30)).float()  # with ties
    assert np.array_equal(np.sort(st.ranking(scores)[..., :7]), block_select(scores, 7).numpy())


def test_selects_what_a_cache_selects():
    """Stored blocks, sinks and scores are those of a real cache, step by step."""
    net, cache = model("llama"), two_level(False, level="block", token_budget=64, lag=False)
    ids = prompt(1, 150)["input_ids"]
    checked = 0

    def check(layer, q):
        nonlocal checked
        store, k = layer.store, layer.keys[0]
        n = st.stored_blocks(cache.config, store.length - 1)
        assert n == store.full_blocks
        scores = st.bound_scores(q, st.block_bounds(k, cache.config, 0, n))
        assert np.array_equal(np.sort(st.ranking(scores)[..., :4]), layer.policy.choose_blocks(q, store).numpy())
        checked += 1

    with torch.no_grad():
        net(ids, past_key_values=cache)
        for layer in cache.sparse_layers:
            own = layer.policy.attend
            layer.policy.attend = lambda q, *rest, own=own, layer=layer: (check(layer, q), own(q, *rest))[1]
        for token in range(40):
            net(torch.tensor([[token + 5]]), past_key_values=cache)
    assert checked == 80
