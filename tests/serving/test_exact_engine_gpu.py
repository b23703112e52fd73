"""An engine's exact requests on a real GPU, captured: full attention's tokens in float32, beside sparse ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from caches import SMALL
from engines import SERVING, WHOLE, greedy, ids_of, quiet
from models import build
from test_engine_gpu import NEAR, worst

from hf_sparsekv import Engine, ProgressiveConfig, Sampling, TokenConfig
from hf_sparsekv.checking.pace import Next, Pace

CHOOSE = {**SMALL, "dense_below": 0}
CONFIGS = {
    "tokens": TokenConfig(**CHOOSE, token_budget=16),
    "by-need": TokenConfig(**CHOOSE, mass=0.7),
    "blocks": TokenConfig(**CHOOSE, token_budget=16, level="two_level", num_blocks=3, tail=None),
    "progressive": ProgressiveConfig(**CHOOSE, mass=0.7, min_tokens=16),
}
SIZES = [(150, 60), (7, 130), (20, 110), (301, 40), (65, 1), (90, 60), (3, 120), (40, 30)]
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EXACT = replace(SERVING, exact=True)


@pytest.fixture(params=[None, 3, 4], ids=["measured", "three", "four"])
def drafts(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(Pace, "next", lambda *_, **__: Next(request.param))


def rated(net, ids: list[int], answer) -> float:
    """By how much a token of the answer is worse than full attention's best one, in the worst case."""
    return worst(net, TokenConfig(**WHOLE), ids, answer)


@pytest.mark.few
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name", ["llama", "glm4-moe-lite"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_token_is_full_attentions(config, name, device, drafts):
    if device == "cpu" and (config, name) != ("tokens", "llama"):
        pytest.skip("test_exact_engine.py has more")
    asked = [(ids_of(n, seed), greedy(tokens, exact=seed % 4 != 3)) for seed, (n, tokens) in enumerate(SIZES)]
    with Engine(build(name, "sdpa").to(device), None, CONFIGS[config], None, EXACT) as engine:
        captures = engine.stats().captures
        outputs = [handle.result(200) for handle in [engine.submit(ids, how) for ids, how in asked]]
        quiet(engine)
        stats = engine.stats()
        assert stats.accepted > 0 and stats.captures == captures
    net = build(name, "sparsekv").to(device)
    gaps = [rated(net, ids, out.token_ids) for (ids, how), out in zip(asked, outputs) if how.exact]
    assert max(gaps) <= NEAR, gaps
    assert [len(out.token_ids) for out in outputs] == [how.max_tokens for _, how in asked]


@pytest.mark.gpu
def test_a_seed_gives_the_text_of_a_dense_engine(monkeypatch):
    monkeypatch.setattr(Pace, "next", lambda *_, **__: Next(3))
    settings, found = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}, []
    for config, serving in ((TokenConfig(**WHOLE), SERVING), (CONFIGS["tokens"], EXACT)):
        with Engine(build("llama", "sdpa").to("cuda"), None, config, None, serving) as engine:
            asked = [(ids_of(n, i), Sampling(max_tokens=t, seed=i, **settings)) for i, (n, t) in enumerate(SIZES)]
            handles = [engine.submit(ids, how) for ids, how in asked]
            found.append([handle.result(100).token_ids for handle in handles])
    same = sum(one == other for one, other in zip(*found))
    assert same >= len(SIZES) - 1, "more than a near tie differs"


@pytest.mark.gpu
def test_in_16_bits_beside_others():
    """All requests end, and the memory comes back."""
    with Engine(build("llama", "sdpa").to("cuda", torch.bfloat16), None, CONFIGS["tokens"], None, EXACT) as engine:
        asked = [(ids_of(n, i), greedy(t, exact=i % 2 == 0)) for i, (n, t) in enumerate(SIZES * 3)]
        handles = [engine.submit(ids, how) for ids, how in asked]
        handles[4].cancel()
        for handle in handles:
            handle.result(200)
        quiet(engine)
