"""The kernel that keeps the latest queries against its definition."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.query_ring import push as public
from hf_sparsekv.ops.query_ring.reference import push as reference
from hf_sparsekv.ops.query_ring.triton import push

# batch, query heads, new queries, D, ring, first column, padding
CASES = {
    "one query": (2, 4, 1, 64, 17, 5, False),
    "a ring of one": (1, 9, 1, 80, 1, 12, False),
    "wraps": (3, 8, 5, 128, 9, 16, False),
    "padding": (4, 3, 6, 40, 9, 20, True),
    "fills the ring": (2, 32, 17, 96, 17, 1_000_003, True),
    "the first columns": (3, 2, 4, 16, 17, 0, True),
    "latents of 20 heads": (2, 20, 1, 576, 17, 33, True),
}


def state(place, batch, heads, ring, dim):
    held = place.nan(batch, heads, ring, dim)
    first = place.randint(0, 4, batch)
    return held, first, place.nan(batch, dtype=torch.int32), place.nan(1, dtype=torch.int32)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place, case):
    batch, heads, n, dim, ring, at, padded = case
    q = place.randn(batch, n, heads, dim).transpose(1, 2)  # as transformers hands them over
    valid = place.rand(batch, n) > 0.4 if padded else None
    column = torch.tensor([at], dtype=torch.int32, device=place.device)
    held = state(place, batch, heads, ring, dim)
    want = [t.cpu().clone() for t in held]
    reference(q.cpu(), None if valid is None else valid.cpu(), column.cpu(), *want)
    for _ in range(2):  # again is as once
        push(q, valid, column, *held)
        for got, expected in zip(held, want):
            torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_step_by_step_is_the_same_as_at_once(place32):
    """Through three turns of the ring, with padding in the first columns and a hole."""
    total, ring = 23, 7
    q = place32.randn(3, 2, total, 16)
    valid = torch.ones(3, total, dtype=torch.bool)
    valid[1, :9], valid[2, 18] = False, False
    valid = valid.to(place32.device)
    held = state(place32, 3, 2, ring, 16)
    held[1].zero_()
    for i in range(total):
        column = torch.tensor([i], dtype=torch.int32, device=place32.device)
        public(q[:, :, i : i + 1], valid[:, i : i + 1], column, *held)
        known = [min(ring, n) for n in (i + 1, max(0, i - 8), i - 18 if i >= 18 else i + 1)]
        assert held[2].tolist() == known
    assert int(held[3]) == total % ring
    for column in range(total - ring, total):
        assert torch.equal(held[0][:, :, column % ring], q[:, :, column])


def test_heads_of_a_long_prompt_lie_far_apart(place32):
    """The last queries of half a million tokens: their distances do not fit 32 bits. (Only these are there.)"""
    stride = 1 << 30
    q = torch.empty(2 * stride + 16, dtype=torch.uint8, device=place32.device)  # pages that nobody touches take nothing
    q = q.as_strided((1, 3, 1, 16), (3 * stride, stride, 16, 1))
    q.copy_(torch.arange(48, device=q.device).view(1, 3, 1, 16))
    held = torch.zeros(1, 3, 5, 16, dtype=torch.uint8, device=q.device)
    count, column = (torch.zeros(1, dtype=torch.int32, device=q.device) for _ in range(2))
    push(q, None, column, held, torch.zeros_like(count), count, torch.zeros_like(count))
    assert torch.equal(held[:, :, :1], q)
