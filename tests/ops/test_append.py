"""The append kernel against its definition."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.append import append as public
from hf_sparsekv.ops.append.reference import append as reference
from hf_sparsekv.ops.append.triton import append

# batch, heads, new tokens, Dk, Dv, sinks, ring, cached columns, padding
CASES = {
    "one token": (2, 2, 1, 64, 64, 4, 24, 7, False),
    "one token, last place": (1, 3, 1, 80, 80, 4, 24, 23, False),
    "one token, wraps to the first": (1, 2, 1, 96, 96, 4, 24, 48, True),
    "wraps in the middle": (3, 1, 5, 128, 64, 4, 24, 70, True),
    "several tiles": (2, 2, 37, 64, 96, 3, 40, 1_000_003, True),
    "fills the ring": (1, 2, 24, 256, 256, 0, 24, 17, True),
    "no sinks, length 0": (2, 1, 3, 40, 128, 0, 16, 0, False),
    "long sequence": (1, 1, 9, 64, 64, 4, 24, 2**31 - 8, False),
    "latents": (2, 1, 3, 512, 64, 4, 24, 22, True),
    "whole rows": (1, 1, 2, 576, 0, 4, 24, 5, False),
    "nothing new": (1, 1, 0, 64, 64, 4, 24, 3, True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place, case):
    batch, heads, q, dk, dv, sinks, ring, cached, padded = case
    # As transformers hands them over: [batch, q, H, D] transposed.
    k = place.randn(batch, q, heads, dk).transpose(1, 2)
    v = place.randn(batch, q, heads, dv).transpose(1, 2)
    valid = place.rand(batch, q) > 0.4 if padded else None
    length = torch.tensor([cached], dtype=torch.int32, device=place.device)
    near_kv = place.nan(batch, heads, sinks + ring, dk + dv)
    near_valid = place.rand(batch, sinks + ring) > 0.5
    want_kv, want_valid = near_kv.cpu().clone(), near_valid.cpu().clone()
    reference(k.cpu(), v.cpu(), None if valid is None else valid.cpu(), want_kv, want_valid, length.cpu(), sinks)

    append(k, v, valid, near_kv, near_valid, length, sinks)

    torch.testing.assert_close(near_kv.cpu(), want_kv, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(near_valid.cpu(), want_valid)
    assert int(length) == cached


def test_step_by_step_is_the_same_as_at_once(place32):
    """Columns appended one by one, through three turns of the ring, leave the last ``R`` of them."""
    sinks, ring, total = 2, 5, 17
    k, v = place32.randn(1, 2, total, 64), place32.randn(1, 2, total, 64)
    near_kv = place32.nan(1, 2, sinks + ring, 128)
    near_valid = torch.zeros(1, sinks + ring, dtype=torch.bool, device=place32.device)
    length = torch.zeros(1, dtype=torch.int32, device=place32.device)
    for i in range(total):
        append(k[:, :, i : i + 1], v[:, :, i : i + 1], None, near_kv, near_valid, length, sinks)
        length += 1
    for column in range(total - ring, total):
        at = sinks + column % ring
        assert torch.equal(near_kv[0, :, at], torch.cat((k[0, :, column], v[0, :, column]), -1))
    assert near_valid.tolist() == [[False] * sinks + [True] * ring]
    assert near_kv[:, :, :sinks].isnan().all()


def test_views_and_other_dtypes(place32):
    """Buffers that are slices of larger ones, new keys in another dtype than the buffer's."""
    k, v = place32.randn(2, 2, 3, 64), place32.randn(2, 2, 3, 64)
    valid = (place32.rand(2, 10) > 0.5)[:, 4:7]
    big, big_valid = place32.nan(3, 3, 30, 128, dtype=torch.float16), place32.rand(3, 30) > 0.5
    want, want_valid = big.cpu().clone(), big_valid.cpu().clone()
    length = torch.tensor([19], dtype=torch.int32, device=place32.device)
    where = (slice(1, 3), slice(0, 2), slice(5, 29))
    reference(k.cpu(), v.cpu(), valid.cpu(), want[where], want_valid[1:3, 5:29], length.cpu(), 4)

    append(k, v, valid, big[where], big_valid[1:3, 5:29], length, 4)

    torch.testing.assert_close(big.cpu(), want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(big_valid.cpu(), want_valid)


def test_public_function(place32):
    k = place32.randn(1, 1, 2, 64)
    near_kv, near_valid = place32.nan(1, 1, 6, 128), torch.zeros(1, 6, dtype=torch.bool, device=place32.device)
    length = torch.tensor([3], dtype=torch.int32, device=place32.device)
    public(k, -k, None, near_kv, near_valid, length, 2)
    assert torch.equal(near_kv[0, 0, [5, 2]], torch.cat((k, -k), -1)[0, 0])
    assert near_valid.tolist() == [[False, False, True, False, False, True]]
