"""Layers whose memory lies side by side: what they get, and when they store together."""

from __future__ import annotations

import torch
from caches import ALL, TIGHT
from models import model, prompt

from hf_sparsekv.kv import together
from hf_sparsekv.kv.memory import for_layers, new_memory
from hf_sparsekv.kv.together import extend_together, side_by_side

CPU = torch.device("cpu")


def test_memory_is_side_by_side_for_layers_that_are_made_together():
    def one(what="a", n=4, zeros=False):
        return new_memory(what, (n, 2), torch.float32, CPU, zeros)

    with for_layers(3):
        first, other = [one(zeros=True) for _ in range(3)], [one("b") for _ in range(2)]
        more, odd = one(zeros=True), [one("c", 1) for _ in range(2)]
    whole = side_by_side(first)
    assert whole is not None and whole.shape == (12, 2) and not whole.any()
    whole.fill_(1.0)
    assert all(bool(held.all()) for held in first) and side_by_side(other) is not None
    assert side_by_side([*first, more]) is None, "there was room for three"
    assert side_by_side(odd) is None, "kernels want addresses of 16 bytes"
    assert side_by_side([one(), one()]) is None
    assert side_by_side(first[::2]) is None and side_by_side(first[:2]) is not None
    alike = torch.empty(2, 4, 2)
    assert side_by_side([alike[0], alike[1][:, :1]]) is None


@torch.no_grad()
def test_stores_that_do_not_lie_together_store_by_themselves():
    """Each has memory of its own. Nothing has changed then."""
    made = ALL["device-default"](**TIGHT)
    model("llama")(**prompt(1, 90), past_key_values=made)
    stores = [layer.store for layer in made.sparse_layers]
    policies = [layer.policy for layer in made.sparse_layers]
    k = torch.zeros(len(stores), 1, stores[0].heads, 3, stores[0].key_dim)
    made.joined_rows()
    before = [store.held for store in stores]
    assert not extend_together(stores, policies, k, k)
    assert [store.held for store in stores] == before


@torch.no_grad()
def test_growing_pools(monkeypatch):
    """Prompts in a cache that was used for a shorter one: pools grow, side by side again."""
    from captured import imitated

    net, _ = imitated()
    stored = []
    held = together.extend_together
    monkeypatch.setattr(
        "hf_sparsekv.layers.adopting.extend_together", lambda *given: stored.append(held(*given)) or stored[-1]
    )
    mine, theirs = ALL["device-default"](**TIGHT), ALL["device-default"](**TIGHT)
    for _ in range(4):
        net(**prompt(1, 60), past_key_values=ALL["device-default"](**TIGHT), logits_to_keep=1)
        net(**prompt(1, 120), past_key_values=ALL["device-default"](**TIGHT), logits_to_keep=1)
    stored.clear()
    for tokens in (60, 120, 120):
        outs = [
            one(**prompt(1, tokens), past_key_values=cache, logits_to_keep=1).logits
            for one, cache in ((net, mine), (model("llama"), theirs))
        ]
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)
        for one, other in zip(mine.sparse_layers, theirs.sparse_layers):
            torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-4)
        mine.reset(), theirs.reset()
    assert stored == [True, True, True]
