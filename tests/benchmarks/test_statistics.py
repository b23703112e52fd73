"""Statistics of selections against what they say they are, worked out the long way."""

from __future__ import annotations

import math
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch
from caches import two_level
from models import model, prompt

from benchmarks.synthetic import statistics as st
from hf_sparsekv import TokenConfig
from hf_sparsekv.ops.selection.topk_select import block_select

CONFIG = TokenConfig(block_size=16, sinks=3, window=10, max_draft=2)
TWO = {Fraction(1, 8): 1, Fraction(1, 4): 2}


def selected(scores: np.ndarray, k: int) -> set[int]:
    """The ``k`` best of one row."""
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])


def test_layer_statistics_by_sets():
    """Chunks of steps, the number of blocks growing: all means against Python sets."""
    rng = np.random.default_rng(0)
    steps = [(8, 5), (9, 20), (10, 6)]  # blocks, steps
    walk = rng.normal(size=(2, 2, 10))  # selector, head, block: slowly changing, so that there is overlap
    scores, masses = [], []
    found = st.LayerStatistics(TWO, 10)
    for n, count in steps:
        chunk = {"bound": [], "oracle": []}
        for _ in range(count):
            walk = 0.8 * walk + 0.6 * rng.normal(size=walk.shape)
            chunk["bound"].append(walk[0, :, :n].copy())
            chunk["oracle"].append(walk[1, :, :n].copy())
        mass = rng.dirichlet(np.full(n + 1, 0.3), size=(count, 2))
        given = {name: torch.tensor(np.stack(rows)) for name, rows in chunk.items()}
        ids = found.add(given, torch.tensor(mass[..., :n]), torch.tensor(mass[..., n]))
        assert ids["bound", Fraction(1, 4)].shape == (count, 2, 2)
        scores += [dict(zip(chunk, rows)) for rows in zip(*chunk.values())]
        masses += list(mass)

    values = found.values()
    for selector in st.SELECTORS:
        for fraction, k in TWO.items():
            for head in range(2):
                sets = [selected(row[selector][head], k) for row in scores]
                name = f"k={fraction}:{selector}"
                for lag in st.LAGS:
                    expected = np.mean([len(b & a) / k for a, b in zip(sets, sets[lag:])])
                    assert values[f"{name}:overlap_{lag}"][head] == pytest.approx(expected)
                unions = [set().union(*sets[i : i + 12]) for i in range(len(sets) - 11)]
                assert values[f"{name}:working_set"][head] == pytest.approx(np.mean([len(u) / k for u in unions]))
                inside = [sum(m[head][i] for i in s) for s, m in zip(sets, masses)]
                stored = [m[head][:-1].sum() for m in masses]
                assert values[f"{name}:covered_mass"][head] == pytest.approx(np.mean(np.divide(inside, stored)))
                everything = [i + m[head][-1] for i, m in zip(inside, masses)]
                assert values[f"{name}:covered_mass_all"][head] == pytest.approx(np.mean(everything))
    assert values["rest_mass"] == pytest.approx(np.mean([m[:, -1] for m in masses], axis=0))


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


@pytest.mark.parametrize(
    "percent, blocks",
    [(40, 1), (50, 1), (51, 2), (80, 2), (90, 3), (95, 4), (99, 4), (100, 4)],
)
def test_blocks_for(percent, blocks):
    mass = np.array([0.1, 0.5, 0.1, 0.3, 0.0])
    assert st.blocks_for(mass, percent) == pytest.approx(blocks / 5)
    assert st.blocks_for(7 * mass, percent) == pytest.approx(blocks / 5), "of the blocks' mass, whatever it is"


def test_mass_and_bounds():
    torch.manual_seed(0)
    heads, group, dim, length, n = 2, 3, 8, 60, 3
    q, k = torch.randn(4, heads * group, dim), torch.randn(heads, length, dim)
    mass, rest = st.block_mass(q, k, n, CONFIG, 0.3)
    bounds = st.block_bounds(k, CONFIG, 0, n)
    assert torch.equal(torch.cat((st.block_bounds(k, CONFIG, 0, 1), st.block_bounds(k, CONFIG, 1, n))), bounds)
    scores = st.bound_scores(q, bounds)
    for step in range(4):
        for head in range(heads):
            expected, best = torch.zeros(n), torch.full((n,), -math.inf)
            for one in q[step, head * group : (head + 1) * group]:
                weights = (0.3 * k[head] @ one).softmax(0)
                for block in range(n):
                    at = slice(max(3, 16 * block), 16 * block + 16)
                    expected[block] += weights[at].sum() / group
                    upper = torch.maximum(one * k[head, at].amax(0), one * k[head, at].amin(0)).sum()
                    best[block] = max(best[block], upper)
            torch.testing.assert_close(mass[step, head], expected)
            torch.testing.assert_close(rest[step, head], 1 - expected.sum())
            torch.testing.assert_close(scores[step, head], best)


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


@pytest.mark.parametrize("warm_up", [0, 3])
def test_lru(warm_up):
    rng = np.random.default_rng(1)
    stream = [rng.permutation(40)[: rng.integers(1, 12)] for _ in range(80)]
    found = st.ReuseDistances(40, warm_up)
    for batch in stream:
        found.add(batch)
    for capacity in (1, 2, 5, 11, 12, 13, 25, 39, 40, 100):
        pool, hits, count = OrderedDict(), 0, 0
        for step, batch in enumerate(stream):
            for unit in batch.tolist():
                if step >= warm_up:
                    hits, count = hits + (unit in pool), count + 1
                pool[unit] = True
                pool.move_to_end(unit)
                if len(pool) > capacity:
                    pool.popitem(last=False)
        assert found.hit_rate(capacity) == pytest.approx(hits / count)


def test_pools():
    """Two layers, two heads, ten blocks: one pool for all, and one a layer."""
    rng = np.random.default_rng(2)
    found = st.PoolStatistics(2, 2, 10, warm_up=1)
    pools = {"all": (OrderedDict(), 20), 0: (OrderedDict(), 10), 1: (OrderedDict(), 10)}
    hits, count = dict.fromkeys(pools, 0), dict.fromkeys(pools, 0)
    for step in range(50):
        for layer in range(2):
            ids = np.stack([np.sort(rng.permutation(10)[:3]) for _ in range(2)])
            found.add(layer, ids)
            for head in range(2):
                for block in ids[head].tolist():
                    for name in ("all", layer):
                        pool, capacity = pools[name]
                        unit = (layer, head, block)
                        if step:
                            hits[name], count[name] = hits[name] + (unit in pool), count[name] + 1
                        pool[unit] = True
                        pool.move_to_end(unit)
                        if len(pool) > capacity:
                            pool.popitem(last=False)
    assert found.shared(50) == pytest.approx(hits["all"] / count["all"])
    assert found.by_layer(50) == pytest.approx([hits[0] / count[0], hits[1] / count[1]])
