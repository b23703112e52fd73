"""The block score kernel against its definition."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.block_score import block_score as public
from hf_sparsekv.ops.block_score.reference import block_score as reference
from hf_sparsekv.ops.block_score.triton import block_score

# batch, KV heads, group, Dk, blocks a row
CASES = {
    "one head": (1, 1, 1, 64, 5),
    "no power of two": (2, 3, 3, 80, 130),
    "group 2": (1, 2, 2, 96, 86),
    "group 4": (2, 2, 4, 128, 65),
    "group 7": (1, 1, 7, 128, 200),
    "group 16": (1, 2, 16, 64, 33),
    "wide heads": (2, 1, 4, 256, 37),
    "latents of 20 heads": (2, 1, 20, 576, 37),
    "latents of 128 heads": (1, 1, 128, 576, 70),
    "24 heads, wide and no power of two": (2, 1, 24, 300, 33),
    "40 heads": (1, 2, 40, 64, 40),
    "one block": (3, 1, 4, 128, 1),
    "no blocks": (2, 2, 4, 64, 0),
}


def make(place, batch, heads, group, dk, n):
    """Rows that share blocks, in any order; some slots missing, some blocks empty; NaN in all that is not used."""
    slots_all = n + 3
    bounds = place.nan(slots_all, heads, 2, dk)
    fill = place.randint(0, 3, slots_all) * 7
    used = fill > 0
    ends = torch.stack((place.randn(slots_all, heads, dk), place.randn(slots_all, heads, dk)), 2)
    ends = torch.cat((ends.amax(2, keepdim=True), ends.amin(2, keepdim=True)), 2)
    bounds[used] = ends[used]
    slots = torch.stack([place.randperm(slots_all)[:n] for _ in range(batch)])
    slots = slots.masked_fill(place.rand(batch, n) < 0.2, -1)
    return place.randn(batch, heads * group, dk), bounds, fill, slots


@pytest.mark.pairwise
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place, case, reduce):
    check(place, case, reduce, "min_max")


OTHERS = [("min_max", "none")] + [
    (kind, reduce) for kind in ("cuboid_mean", "mean") for reduce in ("mean", "max", "none")
]


@pytest.mark.pairwise
@pytest.mark.parametrize("metadata, reduce", OTHERS)
@pytest.mark.parametrize("case", ["no power of two", "group 4", "no blocks", "latents of 20 heads", "40 heads"])
def test_metadata(place, case, reduce, metadata):
    check(place, CASES[case], reduce, metadata)


def check(place, case, reduce, metadata):
    q, bounds, *rest = make(place, *case)
    if metadata == "mean":
        bounds = bounds[:, :, :1].contiguous()
    batch, heads, group, _, n = case
    out = place.nan(batch, heads * group if reduce == "none" else heads, n, dtype=torch.float32)
    each = place.nan(batch, heads * group, n, dtype=torch.float32)
    got = block_score(q, bounds, *rest, reduce, metadata, out=out, each=each)
    assert got is out
    # Products of 16-bit numbers are exact in float32, so all dtypes agree to float32 rounding.
    given = q.cpu(), bounds.cpu(), *(t.cpu() for t in rest)
    place.close(got, reference(*given, reduce, metadata), ratio=4e-6)
    place.close(each, reference(*given, "none", metadata), ratio=4e-6)
    alone = block_score(q, bounds, *rest, reduce, metadata)
    assert torch.equal(alone, got)


def test_bound_holds(place32):
    """No key of a block scores higher than the block."""
    keys, q = place32.randn(6, 2, 16, 64), place32.randn(1, 6, 64)
    bounds = torch.stack((keys.amax(2), keys.amin(2)), 2)
    slots = torch.arange(6, dtype=torch.int32, device=place32.device)[None]
    score = block_score(q, bounds, torch.full_like(slots[0], 16), slots, "mean")
    exact = torch.einsum("hgd,nhtd->hgnt", q.view(2, 3, 64), keys).mean(1).amax(-1)
    assert (score[0] >= exact - 1e-4).all()


@pytest.mark.parametrize("group", [1, 3, 16])
def test_negative_scores(place, group):
    """Scores below zero in every head: what pads the group must not win."""
    q, bounds, fill, slots = make(place, 1, 2, group, 64, 9)
    q, bounds = q.abs(), -bounds.abs()
    got = block_score(q, bounds, fill, slots, "max")
    place.close(got, reference(q.cpu(), bounds.cpu(), fill.cpu(), slots.cpu(), "max"), ratio=4e-6)


def test_strides_and_mixed_dtypes(place32):
    """A query that is a transposed view, slots that are a slice, bounds in a smaller dtype."""
    q, bounds, fill, slots = make(place32, 2, 2, 4, 80, 20)
    wide = torch.zeros(2, 26, dtype=torch.int32, device=place32.device)
    wide[:, 3:23] = slots
    views = (q.transpose(1, 2).contiguous().transpose(1, 2), bounds.half(), fill, wide[:, 3:23])
    for reduce in ("mean", "max"):
        got = block_score(*views, reduce)
        place32.close(got, reference(q.cpu(), bounds.half().cpu(), fill.cpu(), slots.cpu(), reduce))


def test_public_function(place32):
    args = make(place32, 1, 2, 2, 64, 9)
    out = place32.nan(1, 2, 9)
    assert public(*args, "max", out=out) is out
    expected = reference(*(t.cpu() for t in args), "max")
    place32.close(out, expected)
    each = place32.nan(1, 4, 9)
    place32.close(public(*args, "max", each=each), expected)
    place32.close(each, reference(*(t.cpu() for t in args), "none"))
