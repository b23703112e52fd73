"""The ranking kernel against its definition."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.block_rank import block_rank as public
from hf_sparsekv.ops.block_rank.reference import block_rank as reference
from hf_sparsekv.ops.block_rank.triton import Config, block_rank

# batch, KV heads, blocks
CASES = {"one": (1, 1, 1), "few": (2, 3, 7), "one tile": (1, 2, 16), "odd": (2, 2, 131), "long": (1, 1, 530)}


def make(place, batch, heads, n, kinds=None):
    """Scores with many ties and infinities; ``kinds`` different ones."""
    scores = place.randn(batch, heads, n) if kinds is None else place.randint(-1, kinds, batch, heads, n).float() / 2
    slots = torch.stack([place.randperm(n + 3)[:n] for _ in range(batch)])
    gone = place.rand(batch, n) < 0.2
    slots = slots.masked_fill(gone, -1)
    return scores.masked_fill(gone[:, None], -torch.inf), place.randint(1, 17, n + 3), slots


@pytest.mark.parametrize("kinds", [None, 1, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place32, case, kinds):
    args = make(place32, *case, kinds)
    expected = reference(*(t.cpu() for t in args))
    for got in (block_rank(*args), block_rank(*args, config=Config(tile=8, others=64))):
        for one, other in zip(got, expected):
            assert torch.equal(one.cpu(), other)


def test_views(place32):
    """Scores and slots that are slices."""
    scores, fill, slots = make(place32, 2, 2, 40)
    wide = torch.full((2, 2, 50), 9.0, device=place32.device)
    wide[..., 3:43] = scores
    wide_slots = torch.zeros(2, 48, dtype=torch.int32, device=place32.device)
    wide_slots[:, 4:44] = slots
    got = block_rank(wide[..., 3:43], fill, wide_slots[:, 4:44])
    for one, other in zip(got, reference(scores.cpu(), fill.cpu(), slots.cpu())):
        assert torch.equal(one.cpu(), other)


def test_by_hand():
    scores = torch.tensor([[[0.0, 2.0, -torch.inf, 2.0, -0.0]]])
    ids, tokens = reference(scores, torch.tensor([5, 6, 7]), torch.tensor([[0, 1, -1, 2, 0]]))
    assert ids.tolist() == [[[1, 3, 0, 4, -1]]]
    assert tokens.tolist() == [[[6, 7, 5, 5, 0]]]


def test_public_function(place32):
    args = make(place32, 1, 2, 9)
    for one, other in zip(public(*args), reference(*(t.cpu() for t in args))):
        assert torch.equal(one.cpu(), other)
    assert public(args[0][..., :0], args[1], args[2][:, :0])[0].shape == (1, 2, 0)
