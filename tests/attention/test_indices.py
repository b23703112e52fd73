"""Attention to each query's own columns, gathered some queries at a time: as the dense one with a mask of them."""

from __future__ import annotations

import pytest
import torch
from inside import chosen_pieces, score_pieces
from models import build, model
from test_mla import attention_modules

from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.indices import index_mask, indexed_attention, visible
from hf_sparsekv.attention.mla import Absorbed, absorb_mla, restore_mla
from hf_sparsekv.types import AttentionParams


def case(q: int, n: int, topk: int, dims: tuple[int, int, int], heads: int = 2):
    generator = torch.Generator().manual_seed(q)
    query = torch.randn(2, 4, q, dims[0], generator=generator)
    key, value = (torch.randn(2, heads, n, dim, generator=generator) for dim in dims[1:])
    chosen = torch.rand(2, q, n, generator=generator).topk(topk).indices.int()
    shown = (torch.ones(q, n, dtype=torch.bool).tril(n - q) & (torch.arange(n) >= torch.tensor([[[0]], [[9]]])))[
        :, None
    ]
    return query, key, value, chosen, shown


@pytest.mark.parametrize("piece", [1 << 29, 40_000, 1])
@pytest.mark.parametrize(
    "extra", [{}, {"softcap": 2.0}, {"sink_logits": torch.arange(4.0)}], ids=["plain", "cap", "sink"]
)
@pytest.mark.parametrize("latent", [False, True])
def test_as_with_a_mask(monkeypatch, latent, extra, piece):
    chosen_pieces(monkeypatch, piece)
    params = AttentionParams(0.4, **extra)
    query, key, value, chosen, shown = case(21, 60, 12, (20, 16, 8) if latent else (20, 20, 10), 1 if latent else 2)
    absorbed = Absorbed(attention_modules(model("deepseek-v3"))[0]) if latent else None
    mask = index_mask(chosen, shown, 60)
    assert mask.sum() < shown.sum() / 2
    dense = exact_attention if absorbed is None else absorbed.attention
    with torch.no_grad():
        expected = dense(query, key, value, params, mask=mask)
        found = indexed_attention(query, key, value, params, chosen, shown, absorbed=absorbed)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_query_without_visible_columns_gets_zeros():
    query, key, value, chosen, shown = case(5, 40, 6, (20, 20, 10))
    with torch.no_grad():
        found = indexed_attention(query, key, value, AttentionParams(0.4), chosen, shown & False)
    assert not found.any()


def test_visible_indices():
    shown = torch.tensor([[[[True, False, True, False]]]])
    assert visible(torch.tensor([[[3, 2, -1, 0]]]), shown).tolist() == [[[-1, 2, -1, 0]]]
    assert index_mask(torch.tensor([[[3, 2, -1]]]), None, 4).tolist() == [[[[False, False, True, True]]]]


def test_indexers_score_some_queries_at_a_time(monkeypatch):
    """What a query chooses among the columns that it sees is the same; what it chooses besides does not matter."""
    net, past, n = build("deepseek-v32", "sparsekv"), 11, 70
    module = next(one for one in net.modules() if hasattr(one, "indexer"))
    generator = torch.Generator().manual_seed(0)
    hidden, resid = torch.randn(2, n, 64, generator=generator), torch.randn(2, n, 24, generator=generator)
    tables = net.model.rotary_emb(hidden, torch.arange(past, past + n)[None])
    shown = torch.ones(n, past + n, dtype=torch.bool).tril(past).expand(2, -1, -1)
    calls = []

    class Keys:
        def __init__(self):
            self.keys = torch.randn(2, past, 16, generator=torch.Generator().manual_seed(1))

        def update_indexer(self, keys, layer_idx):
            calls.append(keys.shape[1])
            self.keys = torch.cat((self.keys, keys), 1)
            return self.keys

        def attend(self): ...

    def choose():
        with torch.no_grad():
            return visible(module.indexer(hidden, resid, tables, shown, None, Keys()), shown[:, None]).sort(-1).values

    expected = choose()
    absorb_mla(net)
    assert torch.equal(choose(), expected)
    score_pieces(monkeypatch, 4 * 2 * (8 + 16) * (past + n) * 9)
    assert torch.equal(choose(), expected)
    assert calls == [n, n, *[9] * 7, 7]
    ours = module.indexer.forward
    module.indexer.forward = lambda *args: ours(*args)  # as accelerate's hooks do
    restore_mla(net)
    assert torch.equal(choose(), expected), "what another has wrapped stays"
    module.indexer.forward = ours
    absorb_mla(net)
    restore_mla(net)
    assert "forward" not in module.indexer.__dict__
