"""Progressive caches in use: replays after a reset, threads and streams of host-driven walks."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from caches import progressive
from captured import Imitation
from models import build, model, prompt
from test_progressive import decode

from hf_sparsekv.policies.progressive import ProgressivePolicy


def test_audits_of_steps_captured_before_a_reset(monkeypatch):
    """An allocator may give a later prompt's state the memory of an earlier one: then its graph is replayed at once."""
    start, held = ProgressivePolicy.start, {}

    def again(policy, store, q_heads):
        start(policy, store, q_heads)
        policy.state = held.setdefault(policy.layer_idx, policy.state)

    class Silent(Imitation):
        """Its replays run no code of a layer, as on a GPU."""

        def _record(self, run, device, saved):
            graph, output = super()._record(run, device, saved)
            replay, policies = graph.replay, [state.layer.policy for state in saved]

            def silently():
                known = [policy._spec for policy in policies]
                replay()
                for policy, spec in zip(policies, known):
                    policy._spec = spec

            graph.replay = silently
            return graph, output

    monkeypatch.setattr(ProgressivePolicy, "start", again)
    net = build("llama", "sparsekv")
    runner = Silent(net)
    runner.install()
    cache = progressive(False, audit_every=1)
    decode(cache, net=net)
    captures = runner.captures
    cache.reset()
    decode(cache, net=net)
    assert runner.captures == captures
    assert all(w.audits == 20 * 4 for w in cache.stats().walks)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", ["cuda:0", "cuda:1"])
def test_driven_by_the_host_on_a_gpu(mode, place):
    """The loading thread knows the mode of the one that decodes; streams are the layer's device's."""
    if int(place[-1]) >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    net, found = build("llama", "sparsekv").to(place), []
    ids = prompt(2, 170, seed=5)["input_ids"].to(place)
    for how in ("device", "host"):
        cache = progressive(True, execution=how, micro_batch=2)
        with mode():
            rows = [net(part, past_key_values=cache).logits[:, -1] for part in ids.split([150] + [1] * 20, dim=1)]
        found.append(torch.stack(rows).clone())
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)


def test_flags_are_not_given_away_while_a_verifier_may_write_them():
    cache = progressive(False, execution="host", micro_batch=2)
    ids = prompt(2, 100)["input_ids"]
    with torch.no_grad():
        for part in (ids[:, :99], ids[:, 99:]):
            model("llama")(part, past_key_values=cache)
        waits: list[int] = []
        for layer in cache.sparse_layers:
            layer.policy.host._written = SimpleNamespace(synchronize=lambda: waits.append(1))
        cache.reorder_cache(torch.tensor([1]))
        model("llama")(ids[:1, :1], past_key_values=cache)
    assert len(waits) == 2
    del cache, layer
    gc.collect()
    assert len(waits) == 4
