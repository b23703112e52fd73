"""Means of what is not chosen, where they mislead most: many tokens match the query, and all in about the same way.

A mean key is then between those that match and those that do not, and its value too.
"""

from __future__ import annotations

import pytest
import torch
from one_layer import last_step

from hf_sparsekv import OffloadedSparseCache, ProgressiveCache, ProgressiveConfig, TokenConfig

N, DIM, HEADS, GROUP = 2048, 64, 2, 4
CONFIGS = {
    "default": (OffloadedSparseCache, TokenConfig),
    "progressive": (ProgressiveCache, ProgressiveConfig),
}


def matching(share: float, strength: float, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Queries of a prompt and of a step, keys and values: ``share`` of the tokens have the direction of the query."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    direction = torch.nn.functional.normalize(randn(HEADS, 1, DIM), dim=-1)
    some = (torch.rand(HEADS, N, 1, generator=generator) < share).float()
    k = some * direction * DIM**0.5 + 0.3 * randn(HEADS, N, DIM)
    v = some * randn(HEADS, 1, DIM) * 2 + (1 - some) * randn(HEADS, N, DIM)
    q = direction * strength + 0.05 * randn(HEADS, GROUP, DIM)
    return q[:, :, None] + 0.3 * randn(HEADS, GROUP, N - 1, DIM), q, k, v


def drifting(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """The same, where keys and values change slowly, as with the topic of a text."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    topic = randn(HEADS, N // 256, 1, 2 * DIM).expand(-1, -1, 256, -1).flatten(1, 2)
    k, v = (topic + 0.5 * randn(HEADS, N, 2 * DIM)).split(DIM, -1)
    return randn(HEADS, GROUP, N - 1, DIM), randn(HEADS, GROUP, DIM), k, v


def distance(kind: str, tail: str | None, given: tuple[torch.Tensor, ...]) -> float:
    """Relative error of a step's attention, averaged over heads."""
    make, configure = CONFIGS[kind]
    cache = make(configure(tail=tail, dense_layers=0, dense_below=None), offload=None)
    queries, q, k, v = given
    found = last_step(cache, queries, q, k, v, N - 1)
    exact = (q.double() @ k.double().mT * DIM**-0.5).softmax(-1) @ v.double()
    return ((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).mean().item()


@pytest.mark.parametrize("kind", CONFIGS)
def test_they_cost_little_where_they_mislead_and_gain_elsewhere(kind):
    for share in (0.1, 0.3, 0.5):
        for strength in (2, 4):
            given = matching(share, strength)
            means, none = distance(kind, "mean", given), distance(kind, None, given)
            assert means < none + 0.1 and means < 0.1, (share, strength, means, none)
    means, none = (distance(kind, tail, drifting()) for tail in ("mean", None))
    assert means < 0.7 * none, (means, none)
