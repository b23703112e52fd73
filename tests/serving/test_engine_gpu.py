"""An engine with captured steps and copies over the link: every token is the best one, by the request alone."""

from __future__ import annotations

import pytest
import torch
from caches import SMALL
from engines import SERVING, greedy, ids_of, pieces, quiet
from models import build

from hf_sparsekv import Engine, OffloadConfig, ProgressiveConfig, SparseCache, TokenConfig

NEAR = 0.02  # of logits whose spread is about 10: batches of other sizes round differently, and what is chosen may turn
SHORT = {**SMALL, "dense_below": 0, "calibration_tokens": 64}
KINDS = {
    "resident": (TokenConfig(**SHORT, token_budget=64), None),
    "offloaded": (TokenConfig(**SHORT, token_budget=64), OffloadConfig()),
    "crowded": (TokenConfig(**SHORT, token_budget=64), OffloadConfig(device_pool=120_000)),
    "progressive": (ProgressiveConfig(**SHORT, min_tokens=64), OffloadConfig()),
}


@torch.no_grad()
def worst(net, config, ids: list[int], answer: tuple[int, ...]) -> float:
    """By how much a token of the answer was worse than the best one behind the same tokens, in the worst case."""
    cache, given, past, found = SparseCache(config, None), torch.tensor([ids], device=net.device), 0, 0.0
    for n in pieces(config, len(ids)):
        logits = net(given[:, past : past + n], past_key_values=cache).logits[0, -1]
        past += n
    for token in answer:
        found = max(found, float(logits.max() - logits[token]))
        logits = net(torch.tensor([[token]], device=net.device), past_key_values=cache).logits[0, -1]
    return found


@pytest.mark.filterwarnings("ignore:decode steps run eagerly")
@pytest.mark.parametrize(
    ("kind", "device"),
    [("offloaded", "cpu"), *(pytest.param(kind, "cuda", marks=pytest.mark.gpu) for kind in KINDS)],
)
def test_every_token_is_the_best_one(kind, device):
    config, offload = KINDS[kind]
    sizes = [(150, 60), (7, 130), (20, 110), (301, 40), (65, 1), (90, 60), (3, 120), (40, 30)]
    sizes = sizes[:5] if device == "cpu" else sizes
    asked = [(ids_of(n, seed), tokens) for seed, (n, tokens) in enumerate(sizes)]
    with Engine(build("llama", "sdpa").to(device), None, config, offload, SERVING) as engine:
        handles = [engine.submit(ids, greedy(tokens)) for ids, tokens in asked]
        outputs = [handle.result(100) for handle in handles]
        quiet(engine)
        assert device == "cpu" or engine.stats().captures > 3
    net = build("llama", "sparsekv").to(device)
    gaps = [worst(net, config, ids, output.token_ids) for (ids, _), output in zip(asked, outputs)]
    assert [len(output.token_ids) for output in outputs] == [tokens for _, tokens in asked]
    assert max(gaps) <= NEAR, gaps
