"""Tokens chosen beside the layer before, on a GPU: attention waits for them, and what they are chosen from lives."""

from __future__ import annotations

import pytest
import torch
from caches import FULL, predictive
from captured import on_gpu, pair
from inside import keep_busy
from models import build

from hf_sparsekv import optimize
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.policies.ahead.foresight import Foresight
from hf_sparsekv.policies.ahead.layer_ahead import LayerAheadPolicy

pytestmark = pytest.mark.gpu
CYCLES = 2_000_000  # about a millisecond: longer than the rest of such a step
TIGHT = {"token_budget": 32}


@pytest.fixture
def slow(monkeypatch):
    """What is chosen in a captured step is there late."""
    foresee = LayerAheadPolicy.foresee

    def late(self, q, store, plan):
        if store.capturing:
            keep_busy(CYCLES)
        foresee(self, q, store, plan)

    monkeypatch.setattr(LayerAheadPolicy, "foresee", late)


def logits(net, cache, steps: int = 40) -> torch.Tensor:
    ids = on_gpu(2, 150 + steps)["input_ids"]
    with torch.no_grad():
        net(ids[:, :150], past_key_values=cache)
        return torch.cat([net(t, past_key_values=cache).logits.clone() for t in ids[:, 150:].split(1, dim=1)], 1)


@pytest.mark.parametrize("predictor", ["layer", "layer:in_delta"])
@pytest.mark.parametrize("offload", [True, False], ids=["host", "stream"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma3", "deepseek-v3"])
def test_captured_steps_wait_for_what_is_chosen(name, offload, predictor, slow):
    eager, fast = pair(name)
    caches = [predictive(offload, **TIGHT, predictor=predictor) for _ in range(2)]
    expected, found = (logits(net, cache) for net, cache in zip((eager, fast), caches))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    stats = [cache.stats() for cache in caches]
    assert stats[0].foreseen_calls == stats[1].foreseen_calls > 0
    assert runner_of(fast).replays == 40


@pytest.mark.parametrize("predictor", ["layer", "layer:in_delta"])
@pytest.mark.parametrize("offload", [True, False], ids=["host", "stream"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma3", "deepseek-v3"])
def test_fused_layers_give_the_stream_as_well(name, offload, predictor, request):
    """And do not reuse its memory before it has been read."""
    found = []
    for late in (False, True):
        if late:
            request.getfixturevalue("slow")
        net = optimize(build(name, "sparsekv").cuda().to(torch.bfloat16), fused=True)
        cache = predictive(offload, **TIGHT, predictor=predictor)
        found.append(logits(net, cache))
        assert cache.stats().foreseen_calls > 0
        assert runner_of(net).replays == 40
    assert torch.equal(*found)


def test_what_the_layer_before_has_added_is_there_for_the_next_step(monkeypatch):
    """Noted late, beside the step's end: the step still ends behind it, and reads nothing that was reused."""
    note = Foresight.note_added

    def late(self, *args, **named):
        if len(args) == 2:  # in a captured step
            keep_busy(CYCLES)
        note(self, *args, **named)

    eager, fast = pair("llama")
    monkeypatch.setattr(Foresight, "note_added", late)
    caches = [predictive(True, **TIGHT, predictor="layer:in_delta") for _ in range(2)]
    expected, found = (logits(net, cache) for net, cache in zip((eager, fast), caches))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert runner_of(fast).replays == 40
    added = [cache.sparse_layers[1].policy.foresight.added for cache in caches]
    torch.testing.assert_close(*added, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
def test_a_budget_of_everything_gives_the_text_of_full_attention(name):
    eager, fast = pair(name)
    inputs, go = on_gpu(3, 150, (0, 5, 100)), {"do_sample": False, "max_new_tokens": 60}
    dense = predictive(False, **FULL, dense_layers=99)
    expected = eager.generate(**inputs, past_key_values=dense, **go)
    found = fast.generate(**inputs, past_key_values=predictive(True, **{**FULL, "token_budget": 4096}), **go)
    assert torch.equal(found, expected)
