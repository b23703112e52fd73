"""Pairs of true and expected queries: recorded, imitated, and given to caches that choose for what is expected."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import TIGHT, predictive
from captured import Imitation
from models import build
from read_rows import read_rows

from benchmarks import foresight, shapes
from benchmarks import step as bench_step
from benchmarks.synthetic import foreseen as fs
from benchmarks.synthetic.foreseen import Pairs, Selection, StoredIndex
from benchmarks.synthetic.keys import SyntheticKV
from benchmarks.synthetic.replay import ReplayedQueries
from benchmarks.synthetic.statistics import stored_blocks
from hf_sparsekv import PredictiveConfig, predict_ahead
from hf_sparsekv.attention.points import Point

pytestmark = pytest.mark.slow


def filled(cache, net, context: int = 400) -> SyntheticKV:
    """Synthetic tokens in a cache for a tiny model."""
    made = SyntheticKV(3, 4, 2, 16, 1, context, config=cache.config, dtype=torch.float32)
    for index, layer in enumerate(cache.sparse_layers):
        layer.fill(made.prompt_queries(index), *made.keys_values(index))
    return made


# ---------------------------------------------------------------------- imitated


@pytest.mark.parametrize(
    ("config", "place", "chosen"), [(PredictiveConfig(), "in", 496), (PredictiveConfig(), "mid", 64)]
)
def test_pairs_overlap_as_recorded(config, place, chosen):
    """Tuned on one seed, measured on another, in layers of which something else was recorded."""
    made = SyntheticKV(4, 16, 8, 64, 1, 4096, dtype=torch.float32)
    pairs = Pairs(made, Selection(chosen, place, config))
    queries = pairs.queries(40)
    expected = pairs.expected(queries)
    assert torch.equal(queries[..., 0], expected[..., 0]), "the bias of the sinks is known"
    off = []
    for layer in (1, 2, 3):
        keys = made.keys_values(layer)[0][0]
        index = StoredIndex(config, *fs.calibrate(config, made.prompt_queries(layer)[0], keys[:, :512]))
        index.store(keys, stored_blocks(config, 4096))
        mine, other = (index.scores(q[::2, layer, 0]) for q in (queries, expected))
        after = index.scores(queries[1::2, layer, 0])
        within = float(fs.overlap(mine, other, chosen).mean()) - pairs.recorded(layer, place)
        steps = float(fs.overlap(after, mine, chosen).mean()) - pairs.recorded(layer, None)
        assert abs(within) < 0.06 and abs(steps) < 0.09, (layer, within, steps)
        off.append((within, steps))
    assert np.abs(np.mean(off, axis=0)).max() < 0.04


# ---------------------------------------------------------------------- given to caches


@pytest.mark.parametrize("captured", [False, True])
def test_caches_choose_for_the_expected_queries(captured, monkeypatch):
    """The model's own expectation is computed and dropped; the layer gets the replayed one at its fixed address."""
    net = build("qwen3", "sparsekv", num_hidden_layers=3)
    cache = predictive(model_config=net.config, **TIGHT)
    made = filled(cache, net)
    selection = foresight.selection_of(cache)
    assert (selection.place, selection.chosen) == ("in", 32)
    pairs = Pairs(made, selection)
    queries = pairs.queries(6)
    replayed = ReplayedQueries(queries, pairs.expected(queries))
    replayed.install(cache)
    asked, got = [], []
    for at, layer in enumerate(cache.sparse_layers):
        own = layer.policy.foresee
        monkeypatch.setattr(
            layer.policy, "foresee", lambda q, *rest, at=at, own=own: (got.append((at, q.clone())), own(q, *rest))[1]
        )
    query = Point.expected
    monkeypatch.setattr(
        Point, "expected", lambda self, *rest, **more: (asked.append(self.index), query(self, *rest, **more))[1]
    )
    runner = Imitation(net) if captured else None
    tap = predict_ahead(net)
    if captured:
        runner.install()
    ids = torch.full((1, 1), 5)
    with torch.no_grad():
        for step in range(4):
            got.clear()
            asked.clear()
            net(ids, past_key_values=cache)
            assert [at for at, _ in got[-2:]] == [1, 2]
            assert asked[-2:] == [1, 2]
            for at, q in got[-2:]:
                assert torch.equal(q, replayed.expected[step, at])
            replayed.next()
    assert cache.stats().foreseen_calls >= 2 * 3
    now = foresight.achieved(cache, replayed, selection)
    assert 0 < now.overlap <= 1 and 0 < now.cosine < 1 and 0 < now.step_overlap <= 1
    wanted = foresight.recorded(cache, pairs)
    assert wanted.overlap == pytest.approx(np.mean([pairs.recorded(at, selection.place) for at in (1, 2)]))
    assert wanted.hit_rate is None
    replayed.remove()
    assert not any({"attend", "foresee"} & set(vars(layer)) for layer in cache.sparse_layers)
    tap.remove()


# ---------------------------------------------------------------------- rows


def test_rows_of_steps(stepped):
    """Hit rate, overlap and what was recorded, beside the times.

    Labels of a quarter of the channels, as in the recording: overlaps are tuned, and the angles at which they are
    reached depend on how much of the error labels see.
    """
    settings = {"block_size": 16, "window": 16, "dense_layers": 0, "calibration_tokens": 64, "token_budget": 32}
    settings["label_channels"] = 4
    net = build("llama", "sparsekv", num_hidden_layers=3, max_position_embeddings=4096)
    command = "--shapes 2x600 --tokens 12 --kv replayed --variants"
    rows = stepped(net, f"{command} predictive", "predictive", **settings)
    rows = stepped(net, f"{command} token_only --offload --device-pool 0.5kv", "token_only", **settings, level="token")
    found = {(row["variant"], row["metric"]): float(row["value"]) for row in rows}
    tokens, offloaded = "predictive:kv=replayed", "token_only+offload:pool=0.5kv:kv=replayed"
    printed = {tokens: ("foreseen_overlap", "foreseen_cosine", "overlap_1"), offloaded: ("overlap_1", "hit_rate")}
    for variant, metrics in printed.items():
        for metric in metrics:
            mine, recorded = found[variant, metric], found[variant, f"{metric}:recorded"]
            assert mine == pytest.approx(recorded, abs=0.1), (variant, metric)
    assert found[offloaded, "hit_rate"] < 1 and found[offloaded, "missed_mb"] > 0
    assert found[offloaded, "missed_mb:recorded"] > 0
    assert (offloaded, "foreseen_overlap") not in found and (tokens, "hit_rate:recorded") not in found


@pytest.mark.gpu
def test_pairs_on_a_gpu(tmp_path, monkeypatch):
    """Captured steps of caches that choose tokens, and of one that copies them to the device."""
    config = shapes.known_config("qwen3-0.6b")
    config.num_hidden_layers, config.layer_types = 6, config.layer_types[:6]
    monkeypatch.setitem(shapes.SHAPES, "toy", lambda: config)
    path = tmp_path / "step.csv"
    args = f"--model toy --shapes 2x16k --tokens 48 --kv replayed --csv {path} --variants".split()
    assert bench_step.main([*args, "predictive", "predictive:mass:0.9"]) == 0
    assert bench_step.main([*args, "token_only", "--offload"]) == 0
    found = {(row["variant"], row["metric"]): float(row["value"]) for row in read_rows(path)}
    measured = {variant for variant, metric in found if metric == "foreseen_overlap"}
    assert len(measured) == 2
    for variant in measured:
        for metric in ("foreseen_overlap", "overlap_1"):
            assert found[variant, metric] == pytest.approx(found[variant, f"{metric}:recorded"], abs=0.06), variant
    assert found["token_only+fused+offload:kv=replayed", "hit_rate"] > 0.9
