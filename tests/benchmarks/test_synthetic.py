"""Synthetic keys and queries behave as recorded ones; replayed queries reach the layers, captured steps included."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from caches import FULL, two_level
from models import build
from rich.console import Console

from benchmarks.synthetic.achieved import achieved
from benchmarks.synthetic.keys import LEAD, Profile, SyntheticKV
from benchmarks.synthetic.replay import ReplayedQueries
from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.handle import Step
from hf_sparsekv.types import AttentionParams

# Shares: what one draw of some heads may miss the recorded average by, and what several layers may on average.
CLOSE = {
    "k=1/8:bound:overlap_1": (0.06, 0.025),
    "k=1/8:bound:overlap_4": (0.08, 0.03),
    "k=1/8:bound:overlap_16": (0.10, 0.04),
    "k=1/16:bound:overlap_1": (0.13, 0.06),
    "k=1/4:bound:overlap_1": (0.08, 0.03),
    "k=1/8:bound:covered_mass": (0.16, 0.05),
    "k=1/8:oracle:covered_mass": (0.12, 0.06),
    "blocks_for_95": (0.10, 0.04),
    "rest_mass": (0.20, 0.06),
}


def synthetic(layers=30, context=7168, **changes) -> SyntheticKV:
    shape = {"q_heads": 12, "heads": 4, "dim": 64, "batch": 1, "dtype": torch.float32} | changes
    return SyntheticKV(layers, context=context, **shape)


def off(found: dict[str, float], targets: dict[str, float], average: bool = False) -> dict[str, tuple[float, float]]:
    """Results that are not close: found and recorded."""
    return {n: (found[n], targets[n]) for n, close in CLOSE.items() if abs(found[n] - targets[n]) > close[average]}


# ---------------------------------------------------------------------- statistics


@pytest.mark.slow
def test_as_recorded():
    """128 channels, as most models have; a longer context below has 64, as the recorded model."""
    made = synthetic(heads=8, q_heads=32, dim=128)
    layers, printed = range(1, 30, 4), io.StringIO()
    targets = {layer: made.profile.targets(layer, 30) for layer in layers}
    found = achieved(
        lambda layer: made.keys_values(layer)[0],
        made.queries(32),
        made.config,
        layers=layers,
        heads=8,
        steps=32,
        targets=targets.get,
        console=Console(file=printed, width=160),
    )
    for layer, values in found.items():
        assert not off(values, targets[layer]), layer
    mean = [{name: float(np.mean([one[n][name] for n in layers])) for name in CLOSE} for one in (found, targets)]
    assert not off(*mean, average=True)
    assert f"{found[5]['blocks_for_95']:.3f} ({targets[5]['blocks_for_95']:.3f})" in printed.getvalue()


# ---------------------------------------------------------------------- tensors


def test_deterministic():
    shape = {"layers": 2, "context": 700, "batch": 2}
    made, again, other = synthetic(**shape), synthetic(**shape), synthetic(**shape, seed=1)
    for layer in range(2):
        assert all(torch.equal(a, b) for a, b in zip(made.keys_values(layer), again.keys_values(layer)))
        assert not torch.equal(made.keys_values(layer)[0], other.keys_values(layer)[0])
    assert not torch.equal(made.keys_values(0)[0], made.keys_values(1)[0])
    queries = made.queries(9)
    assert queries.shape == (9, 2, 2, 12, 64)
    assert torch.equal(queries[:5], again.queries(5)), "more steps continue fewer ones"
    assert made.prompt_queries(1).shape == (2, 12, LEAD, 64)


# ---------------------------------------------------------------------- replayed queries


def filled(context: int = 400, **settings):
    """A tiny model of three layers, and a cache with synthetic tokens."""
    net = build("qwen3", "sparsekv", num_hidden_layers=3)
    cache = two_level(settings.pop("offload", False), model_config=net.config, **settings)
    made = SyntheticKV(3, 4, 2, 16, 1, context, config=cache.config, dtype=torch.float32)
    for index, layer in enumerate(cache.sparse_layers):
        layer.fill(made.prompt_queries(index), *made.keys_values(index))
    return net, cache, made


def test_attends_with_the_buffer():
    _, cache, made = filled(**FULL)
    queries = made.queries(5)
    replayed = ReplayedQueries(queries)
    replayed.install(cache)
    torch.manual_seed(0)
    for index in (0, 1, 2, 3, 4, 3, 2, 1, 0, 1):  # there and back
        assert torch.equal(replayed.buffer, queries[index])
        for number, layer in enumerate(cache.sparse_layers):
            step = Step(layer, torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), layer.get_seq_length())
            found = layer.attend(step, torch.full((1, 4, 1, 16), float("nan")), None, AttentionParams(0.25))
            expected = exact_attention(
                queries[index, number][:, :, None], layer.keys, layer.values, AttentionParams(0.25)
            )
            torch.testing.assert_close(found, expected)
        replayed.next()


def test_flatter_attention_takes_more_tokens_for_the_same_mass():
    def share(spread: float) -> float:
        made = synthetic(4, 2048, profile=Profile(spread=spread))
        found = []
        for layer in range(made.layers):
            k, _ = made.keys_values(layer)
            q = next(made.steps(layer)).view(1, made.heads, -1, made.dim)
            weights = (q @ k.transpose(-1, -2) / made.dim**0.5)[..., made.config.sinks :].softmax(-1)
            found.append((weights.sort(-1, descending=True).values.cumsum(-1) < 0.9).float().mean())
        return float(torch.stack(found).mean())

    assert share(0.5) > 2 * share(1.0) > 2 * share(1.5)
    one, half = (Profile(spread=spread).parameters(2, 4) for spread in (1.0, 0.5))
    assert (half.topic, half.noise, half.rest) == (one.topic / 2, one.noise / 2, one.rest)
