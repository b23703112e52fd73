"""New tokens of several rows that attend to everything at once, against attention by its definition."""

from __future__ import annotations

import pytest
import torch
from caches import TIGHT, two_level
from models import model, prompt
from torch import Tensor

from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.kv.read_back import tokens
from hf_sparsekv.layers.dense_drafts import attend_at_once
from hf_sparsekv.types import AttentionParams

PADS = (0, 90, 37)  # the second row has no full block


def expected(
    q: Tensor, key: Tensor, value: Tensor, held: Tensor, length: int, store, params: AttentionParams
) -> Tensor:
    """One row: over its tokens and the new ones."""
    mine = held[:, :, :length]
    keys, values = mine[..., : store.key_dim], mine[..., -store.value_dim :]
    if store.latent:
        keys, values = mine, mine[..., : store.value_dim]
        key, value = torch.cat((key, value), dim=-1), key
    return exact_attention(q, torch.cat((keys, key), 2), torch.cat((values, value), 2), params)


def compare(net, how: str, new: int) -> None:
    """Some rows of ``net``, with ``new`` tokens more; in float32 as exact as that is."""
    kv, (device, dtype) = two_level(False, **TIGHT, level="token", max_draft=16), (net.device, net.dtype)
    with torch.no_grad():
        net(**{name: given.to(device) for name, given in prompt(3, 120, PADS).items()}, past_key_values=kv)
    store = kv.sparse_layers[-1].store
    assert store.held.sealed[1] == 0 < store.held.sealed[0]
    generator = torch.Generator().manual_seed(new)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    heads = net.config.num_attention_heads
    softcap, sinks = 2.0 if how == "softcap" else None, draw(heads) if how == "sinks" else None
    params = AttentionParams(scale=0.3, softcap=softcap, sink_logits=sinks)
    q = draw(3, heads, new, store.key_dim)
    key, value = draw(3, store.heads, new, store.split), draw(3, store.heads, new, store.width - store.split)
    before = store.counters.attended.sum()
    found = attend_at_once(store, q, key, value, store.rows, params)
    assert store.counters.attended.sum() - before == store.heads * sum(store.held.lengths)
    held, near = tokens(store).float(), 1e-5 if dtype == torch.float32 else 2e-2
    q, key, value = q.float(), key.float(), value.float()
    for row, length in enumerate(store.held.lengths):
        at = slice(row, row + 1)
        theirs = expected(q[at], key[at], value[at], held[at], length, store, params)
        torch.testing.assert_close(found[at].float(), theirs, atol=near, rtol=near)


@pytest.mark.quick
@pytest.mark.parametrize("new", [1, 4, 17])
@pytest.mark.parametrize("how", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("name", ["llama", "llama-mqa", "glm4-moe-lite"])
def test_against_the_definition(name, how, new):
    compare(model(name), how, new)
