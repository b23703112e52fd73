"""Attention, selections and copies with tensors of more than 2 ** 31 elements: offsets need 64 bits.

The other operators' are in ``test_operators.py``.
"""

from __future__ import annotations

import pytest
import torch
from decode_cases import Case as Decode
from decode_cases import in_pages
from operators import far, room_for
from test_mass_select import Case as MassCase

from hf_sparsekv.ops.block_copy.triton import block_copy
from hf_sparsekv.ops.mass_select.triton import mass_select
from hf_sparsekv.ops.sparse_decode.reference import sparse_decode as reference_decode
from hf_sparsekv.ops.sparse_decode.triton import sparse_decode
from hf_sparsekv.ops.topk_select.config import Config
from hf_sparsekv.ops.topk_select.reference import block_select as reference_select
from hf_sparsekv.ops.topk_select.triton import block_select

pytestmark = pytest.mark.usefixtures("released")


def cpu(args):
    return [t.cpu() if isinstance(t, torch.Tensor) else t for t in args]


def test_far():
    t = torch.arange(24, dtype=torch.int8).view(3, 4, 2)
    for dim in range(3):
        assert torch.equal(far(t, dim), t)


@pytest.mark.parametrize("how", [Config(), Config(row=16, chunk=64, split=False)], ids=["one program", "several"])
def test_select(place32, how):
    scores = place32.randn(3, 2, 130)
    assert torch.equal(block_select(far(scores, 0), 9, config=how).cpu(), reference_select(scores.cpu(), 9))


@pytest.mark.parametrize("what", [0, 1, 3], ids=["scores", "queries", "recent"])
def test_mass_select(place16, what):
    args, named = MassCase(n=300).make(place16)
    want = mass_select(*args, **named)
    args = list(args)
    args[what] = far(args[what], 0 if what == 3 else 1)
    found = mass_select(*args, **named)
    for one, other in zip(found, want):
        assert torch.equal(one, other)


LATENTS = {"latents": True, "group": 5, "dk": 48, "dv": 32}


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [{}, LATENTS], ids=["keys and values", "latents"])
@pytest.mark.parametrize("granularity", ["token", "block", "all"])
@pytest.mark.parametrize("what", [0, 1, 5], ids=["queries", "blocks", "recent"])
def test_sparse_decode(place16, what, granularity, shape):
    args, named = Decode(batch=3, cap=2, chosen=2, heads=1, **shape).make(place16, granularity)
    expected = reference_decode(*cpu(args), **named)
    dims = {0: 1, 1: 0, 5: 0}
    args[what] = far(args[what], dims[what])
    place16.close(sparse_decode(*args, **named), expected)


@pytest.mark.parametrize("shape", [{}, LATENTS], ids=["keys and values", "latents"])
@pytest.mark.parametrize("granularity", ["token", "block"])
def test_sparse_decode_in_frames(place16, granularity, shape):
    args, named = Decode(batch=2, heads=1, cap=2, chosen=2, **shape).make(place16, granularity)
    expected = reference_decode(*cpu(args), **named)
    args, named = in_pages(place16, args, named)
    named["pages"] = far(named["pages"], 0)
    place16.close(sparse_decode(*args, **named), expected)


@pytest.mark.parametrize("to_pages", [True, False])
def test_block_copy(place16, to_pages):
    """Bytes, as an odd block has them: all others are copied in wider words, of which there are fewer."""
    size = 17 * 241
    count = 2**31 // size + 3
    large = room_for(count * size, torch.uint8, place16.device).view(count, 17, 241)
    small = place16.randint(0, 256, 4, 17, 241, dtype=torch.uint8)
    at = [0, count - 1, count - 2]
    copies = torch.tensor([[1, at[0]], [2, at[1]], [3, at[2]]], dtype=torch.int32, device=place16.device)
    n = torch.tensor([3], dtype=torch.int32, device=place16.device)
    if to_pages:
        block_copy(small[:, None], large, copies, n)
    else:
        large[at] = small[1:]
        small[1:] = 0
        block_copy(large[:, None], small, copies.flip(1).contiguous(), n)
    assert torch.equal(large[at].cpu(), small[1:].cpu())
    assert small[1:].any()
