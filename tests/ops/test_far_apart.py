"""Attention, selections and copies with tensors of more than 2 ** 31 elements: offsets need 64 bits.

The other operators' are in ``test_operators.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import Case as Decode
from decode_cases import in_codes, in_pages
from operator_calls import far, room_for
from operators import BY_NAME
from storage_operators import Seal
from test_device_tokens import Pair
from test_mass_select import Case as MassCase

from hf_sparsekv.ops.attention.sparse_decode.reference import sparse_decode as reference_decode
from hf_sparsekv.ops.attention.sparse_decode.triton import sparse_decode
from hf_sparsekv.ops.selection.mass_select.triton import mass_select
from hf_sparsekv.ops.selection.topk_select.config import Config
from hf_sparsekv.ops.selection.topk_select.reference import block_select as reference_select
from hf_sparsekv.ops.selection.topk_select.triton import block_select
from hf_sparsekv.ops.storage.block_copy.triton import block_copy

pytestmark = pytest.mark.usefixtures("released")


def cpu(args):
    return [t.cpu() if isinstance(t, torch.Tensor) else t for t in args]


def test_far():
    t = torch.arange(24, dtype=torch.int8).view(3, 4, 2)
    for dim in range(3):
        assert torch.equal(far(t, dim), t)


@pytest.mark.parametrize(
    "how",
    [Config(clusters=False), Config(clusters=False, row=16, chunk=64, sample=32, fewest=64), Config(clusters=2)],
    ids=["one program", "several", "clusters"],
)
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
    assert all(torch.equal(getattr(found, name), getattr(want, name)) for name in ("count", "mass", "cut"))
    for one, other, count in zip(found.ids.flatten(0, 1), want.ids.flatten(0, 1), want.count.flatten().tolist()):
        assert torch.equal(one[:count], other[:count])  # what is behind them is anything


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


# Operator, its case, what lies far apart and along which dimension, where `test_operators.py` has another one.
FURTHER = [
    ("seal", (Seal(),), "bounds", 0),
    ("seal", (Seal(),), "codes", 0),
    ("seal", (Seal(),), "qparams", 0),
    ("seal", (Seal(coded=True),), "scales", 0),
    ("seal.seal", (Seal(span=4),), "means", 0),
    ("append", (2, 2, 3, 64, 64, 1, 9, 7, True), "v", 2),
    ("latent_rope", (2, 2, 6, 32, 16, 64, False), "compressed", 0),
    ("experts", (2, 4, 3, 32, 24, "silu"), "gate_up", 1),
    ("experts", (2, 4, 3, 32, 24, "silu"), "down", 1),
    ("block_score", (2, 1, 6, 64, 20, "max"), "out", 0),
    ("token_score", (2, 1, 4, 64, 16, 16, 6, 4, "none", 4), "out", 1),
    ("token_score", (2, 1, 4, 64, 16, 16, 6, 4, "mean", 16), "codes", 0),
    ("token_score", (2, 1, 4, 64, 16, 16, 6, 4, "max", "tensor_cores"), "codes", 0),
    ("pack", (2, 2, 24, 16, 3, 32), "ids", 1),
]


@pytest.mark.parametrize(
    ("of", "case", "what", "dim"), FURTHER, ids=[f"{one[0]}-{one[2]}-{i}" for i, one in enumerate(FURTHER)]
)
def test_offsets_that_may_be_large_have_64_bits(place16, of, case, what, dim):
    """Blocks of a large pool, heads of many scores, rows of wide weights."""
    operator = BY_NAME[of]
    given = operator.call(place16, *case)
    expected = operator.expected(given)
    if what in given:
        given[what] = far(given[what], dim)
    else:
        given["index"] = replace(given["index"], **{what: far(getattr(given["index"], what), dim)})
    operator.check(place16, given, expected, *case[len(case) - len(operator.options) :])


@pytest.mark.parametrize("split", [None, 24], ids=["numbers", "codes"])
def test_bring_tokens(place16, split):
    pair = Pair(place16, split=split)
    pair.stored = far(pair.stored, 0)
    if split is not None:
        pair.coded["scales"] = far(pair.coded["scales"], 0)
    pair.bring(pair.choose(9, ordered=True))


@pytest.mark.parametrize("what", ["means", "scales"])
def test_sparse_decode_of_means_and_codes(place16, what):
    args, named = Decode(batch=2, heads=2, cap=6, chosen=2, span=2).make(place16, "token")
    if what == "scales":
        args, named = in_codes(args, named)
    expected = reference_decode(
        *cpu(args), **{name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in named.items()}
    )
    named[what] = far(named[what], 0)
    place16.close(sparse_decode(*args, **named), expected)
