"""The token score kernel against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_sparsekv.ops.token_score import token_score as public
from hf_sparsekv.ops.token_score.config import can_score_matrix, config
from hf_sparsekv.ops.token_score.reference import token_score as reference
from hf_sparsekv.ops.token_score.triton import token_score

# batch, KV heads, group, Dk, label channels, block size, blocks a row, chosen blocks (None: all)
CASES = {
    "one head": (1, 1, 1, 64, 16, 16, 5, 3),
    "no power of two": (2, 3, 3, 80, 20, 32, 9, 5),
    "group 2": (2, 2, 2, 96, 24, 64, 4, 3),
    "group 4, all blocks": (2, 2, 4, 128, 32, 64, 5, None),
    "group 7": (1, 1, 7, 128, 6, 16, 21, 11),
    "group 16": (1, 2, 16, 64, 64, 32, 6, 4),
    "wide heads": (1, 1, 4, 256, 64, 128, 3, 2),
    "latents of 20 heads": (1, 1, 20, 576, 128, 64, 4, 2),
    "latents of 128 heads": (2, 1, 128, 576, 128, 64, 3, 2),
    "latents' whole keys": (1, 1, 20, 576, 576, 16, 5, None),
    "latents' whole keys, 128 heads": (1, 1, 128, 576, 576, 16, 3, 2),
    "whole keys, 40 heads": (1, 1, 40, 288, 288, 16, 3, 2),
    "40 heads": (1, 2, 40, 80, 24, 32, 6, None),
    "small blocks, all": (2, 1, 3, 64, 2, 16, 13, None),
    "nothing chosen": (2, 1, 4, 64, 16, 16, 5, 0),
}


def make(place, batch, heads, group, dk, width, block_size, cap, chosen, bits):
    """Shared blocks in any order with holes; NaN or garbage in the labels of tokens that cannot be selected."""
    slots_all = cap + 2
    flags = place.randint(0, 4, slots_all, block_size, dtype=torch.uint8)
    flags[flags == 2] = 1
    if bits == 4:
        codes = place.randint(0, 256, slots_all, heads, block_size, width // 2, dtype=torch.uint8)
        qparams = place.randn(slots_all, heads, block_size, 2).half()
        qparams = torch.where((flags == 1)[:, None, :, None], qparams, torch.nan)
    else:
        codes, qparams = place.randn(slots_all, heads, block_size, width), None
        codes = torch.where((flags == 1)[:, None, :, None], codes, torch.nan)
    channels = torch.stack([place.randperm(dk)[:width] for _ in range(batch * heads)]).view(batch, heads, -1)
    slots = torch.stack([place.randperm(slots_all)[:cap] for _ in range(batch)])
    slots = slots.masked_fill(place.rand(batch, cap) < 0.2, -1)
    ids = None
    if chosen is not None:
        ids = torch.stack([place.randperm(cap)[:chosen].sort().values for _ in range(batch * heads)])
        ids = ids.view(batch, heads, chosen)
        ids[0, 0, chosen // 2 + 1 :] = -1
    return place.randn(batch, heads * group, dk), codes, qparams, channels, flags, slots, ids


def config_of(args, reduce, matrix):
    """Two blocks a program of tensor cores, where these are meant and take the labels; or the plain kernel."""
    return replace(config(*args[:3], args[5].shape[-1], reduce == "mean", matrix), blocks=2)


def on_cpu(args):
    return [None if t is None else t.cpu() for t in args]


@pytest.mark.parametrize("bits", ["matrix", 4, 16])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place, case, reduce, bits):
    matrix, bits = bits == "matrix", 4 if bits == "matrix" else bits
    args = make(place, *case, bits)
    batch, heads, block_size, n = case[0], case[1], case[5], case[6] if case[7] is None else case[7]
    out = place.nan(batch, heads, n * block_size, dtype=torch.float32)
    got = token_score(*args, reduce, out=out, config=config_of(args, reduce, matrix))
    assert got is out
    # Products of 16-bit numbers are exact in float32, so all dtypes agree to its rounding; `matrix` takes queries in
    # fixed point.
    # Queries in fixed point: 1.06e-4 is the most seen, of a mean over 20 heads on a GPU.
    place.close(got, reference(*on_cpu(args), reduce), ratio=2e-4 if matrix else 4e-6)


def test_what_tensor_cores_take():
    q, codes, params = torch.zeros(1, 8, 64).half(), torch.zeros(3, 2, 16, 16).byte(), torch.zeros(3, 2, 16, 2).half()
    wide = torch.zeros(3, 2, 16, 64).byte()  # 128 channels
    for mean in (False, True):
        assert can_score_matrix(q, codes, params, mean)
        assert can_score_matrix(q.bfloat16().repeat(1, 4, 1), codes, params, mean)
        assert can_score_matrix(q, wide, params, mean)
        assert can_score_matrix(q.repeat(1, 2, 1), wide, params, mean) == mean, "8 heads of 128 channels"
        assert can_score_matrix(q.repeat(1, 5, 1), codes, params, mean) == mean, "20 heads"
        assert not can_score_matrix(q.float(), codes, params, mean)
        assert not can_score_matrix(q, torch.zeros(3, 2, 16, 20).byte()[..., :16], params, mean), "a gap"
        assert not can_score_matrix(q, torch.zeros(3, 2, 16, 128).byte(), params, mean), "256 channels"


def test_nothing_selectable(place32):
    """Rows of missing blocks, sinks and padding alone."""
    q, codes, qparams, channels, flags, slots, ids = make(place32, 3, 1, 2, 64, 16, 16, 4, 3, 4)
    qparams.fill_(torch.nan)
    flags[flags == 1] = 3
    slots[1] = -1
    ids[2] = -1
    got = token_score(q, codes, qparams, channels, flags, slots, ids, "mean")
    assert (got == float("-inf")).all()


def test_strides_and_mixed_dtypes(place32):
    """A query that is a transposed view, ids and slots that are slices, float labels in a smaller dtype."""
    q, codes, _, channels, flags, slots, ids = make(place32, 2, 2, 3, 80, 20, 16, 6, 4, 16)
    codes = codes.half()
    wide, wide_ids = place32.nan(2, 9, dtype=torch.int32), place32.nan(2, 2, 7, dtype=torch.int32)
    wide[:, 1:7], wide_ids[:, :, 2:6] = slots, ids
    for reduce in ("mean", "max"):
        view = q.transpose(1, 2).contiguous().transpose(1, 2)
        got = token_score(view, codes, None, channels, flags, wide[:, 1:7], wide_ids[:, :, 2:6], reduce)
        place32.close(got, reference(*on_cpu((q, codes, None, channels, flags, slots, ids)), reduce))


def test_public_function(place32):
    args = make(place32, 1, 2, 2, 64, 16, 16, 4, 3, 4)
    out = place32.nan(1, 2, 48)
    assert public(*args, "mean", out=out) is out
    expected = reference(*on_cpu(args), "mean")
    place32.close(out, expected)
    place32.close(public(*args, "mean"), expected)
