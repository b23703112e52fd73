"""The engine: each request's tokens are those of ``generate()`` alone, whatever happens around it."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from caches import FULL, SMALL
from models import VOCAB, build, prompt

from hf_sparsekv import OffloadConfig, SparseCache, TwoLevelConfig, sparse
from hf_sparsekv.serving import Busy, Closed, Sampling, ServingConfig
from hf_sparsekv.serving.engine import Engine
from hf_sparsekv.serving.prefill import chunks

LENGTH = 400
WHOLE = {**SMALL, **FULL}
BUDGET = {**SMALL, "dense_below": 0, "token_budget": 32}
SERVING = ServingConfig(max_rows=4, max_length=LENGTH, chunk=64, prefill_ms=0.5)


def ids_of(n: int, seed: int) -> list[int]:
    return prompt(1, n, seed=seed)["input_ids"][0].tolist()


@torch.no_grad()
def alone(net, config, ids: list[int], tokens: int) -> list[int]:
    """The same chunks over a cache of its own. (Label channels are those of a prompt's first chunk.)"""
    cache, found, past = SparseCache(config, None), [], 0
    for n in chunks(len(ids), SERVING.chunk):
        logits = net(torch.tensor([ids[past : past + n]]), past_key_values=cache).logits
        past += n
    while True:
        found.append(int(logits[0, -1].argmax()))
        if len(found) == tokens:
            return found
        logits = net(torch.tensor([found[-1:]]), past_key_values=cache).logits


@pytest.mark.parametrize("offload", [None, OffloadConfig()], ids=["resident", "offloaded"])
@pytest.mark.parametrize(
    ("settings", "layers"), [(WHOLE, True), (WHOLE, False), (BUDGET, True)], ids=["full-layers", "full-chunks", "budget"]
)
def test_requests_answer_as_alone(settings, layers, offload):
    net, config = build("llama", "sparsekv"), TwoLevelConfig(**settings)
    sizes = [(150, 40), (20, 9), (301, 60), (65, 1), (90, 30), (7, 50)]
    asked = [(ids_of(n, seed), tokens) for seed, (n, tokens) in enumerate(sizes)]
    expected = [alone(net, config, ids, tokens) for ids, tokens in asked]
    serving = replace(SERVING, layer_segments=layers)
    with Engine(net, None, config, offload, serving) as engine:
        handles = [engine.submit(ids, Sampling(max_tokens=n, temperature=0)) for ids, n in asked]
        outputs = [handle.result(60) for handle in handles]
    assert [list(output.token_ids) for output in outputs] == expected
    assert {output.finish_reason for output in outputs} == {"length"}
