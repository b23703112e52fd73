"""Sparse decode on latents, whose values are the beginning of their keys, against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import Case, check, config_of, expect, in_frames

from hf_sparsekv.ops.sparse_decode import sparse_decode as public
from hf_sparsekv.ops.sparse_decode.reference import sparse_decode as reference
from hf_sparsekv.ops.sparse_decode.triton import sparse_decode

ALL_WAYS = pytest.mark.parametrize("granularity", ["token", "block", "all"])
SMALL = Case(heads=1, group=4, dk=48, dv=32, latents=True)
RATIO = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

SHAPES = {
    "small": SMALL,
    "20 heads": replace(SMALL, group=20, block_size=32),
    "24 heads": replace(SMALL, group=24, dk=80, dv=64, cap=9),
    "40 heads": replace(SMALL, group=40, batch=1, block_size=64, cap=3, chosen=2),
    "128 heads": replace(SMALL, group=128, batch=1, block_size=64, cap=3, chosen=2),
    "16 heads, two KV heads": replace(SMALL, group=16, heads=2),
    "no powers of two": replace(SMALL, group=5, dk=57, dv=40, ring=30),
    "almost all value": replace(SMALL, dk=33, dv=32),
    "GLM-4.7-Flash": replace(SMALL, group=20, dk=576, dv=512, block_size=64, cap=3, chosen=2, batch=1),
    "DeepSeek-V3": replace(SMALL, group=128, dk=576, dv=512, block_size=64, cap=2, chosen=1, batch=1, ring=3),
    "many rows": replace(SMALL, batch=5, cap=3, chosen=2),
    "no sinks": replace(SMALL, sinks=0, ring=40),
    "softcap and sink logits": replace(SMALL, softcap=2.0, learned_sink=True),
    "nothing chosen": replace(SMALL, chosen=0, cap=0),
    "one split": replace(SMALL, splits=1, cap=11, ring=70),
    "many splits": replace(SMALL, splits=50, batch=1, cap=19, chosen=11, ring=70, group=20),
    "blocks of 128": replace(SMALL, block_size=128, cap=3, chosen=2, splits=2, batch=1),
}


@pytest.mark.pairwise
@ALL_WAYS
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
def test_against_reference(place, case, granularity):
    check(place, case, granularity)


@pytest.mark.pairwise
@ALL_WAYS
@pytest.mark.parametrize(("tile", "heads"), [(64, 32), (32, 16), (16, 32), (64, 64)])
def test_tiles_do_not_matter(place, granularity, tile, heads):
    case = replace(SMALL, group=40, block_size=64, cap=5, splits=2, batch=1, ring=100)
    check(place, case, granularity, tile=tile, heads=heads, stages=1)


@ALL_WAYS
def test_reference_is_that_of_keys_and_values(granularity):
    """Rows with their beginning written behind them once more give the same."""
    from conftest import Place

    args, named = SMALL.make(Place("cpu", torch.float32), granularity)
    twice = list(args)
    for i in (1, 5):
        twice[i] = torch.cat((args[i], args[i][..., : SMALL.dv]), dim=-1)
    counts = [torch.zeros(2, 1, dtype=torch.int64) for _ in range(2)]
    assert torch.equal(reference(*args, **named, attended=counts[0]), reference(*twice, **named, attended=counts[1]))
    assert torch.equal(*counts)


@ALL_WAYS
def test_nothing_to_attend_to(place, granularity):
    """Zeros and no mass; the other row is not touched by it."""
    args, named = SMALL.make(place, granularity)
    args[3][0], args[6][0] = -1, False
    args[5][0] = torch.nan
    expected, _ = expect(args, named)
    lse = place.nan(2, 4, dtype=torch.float32)
    got = sparse_decode(*args, **named, lse=lse)
    assert (got[0] == 0).all()
    assert (lse[0] == float("-inf")).all()
    assert lse[1].isfinite().all()
    place.close(got, expected, ratio=RATIO.get(place.dtype))


@pytest.mark.pairwise
@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("case", [SMALL, replace(SMALL, group=20, block_size=32, batch=3, splits=2)], ids=str)
def test_frames(place, case, granularity):
    """Blocks by place: what is in frames and what is in host memory give the same attention."""
    args, named = case.make(place, granularity)
    expected, want_attended = expect(args, named)
    args, named = in_frames(place, args, named)
    found, attended = expect(args, named)
    assert torch.equal(found, expected)
    assert torch.equal(attended, want_attended)
    want_host = torch.full_like(want_attended, 50)
    on_cpu = {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in named.items()}
    reference(*(t.cpu() for t in args), **on_cpu, from_host=want_host)
    assert (want_host > 50).any()
    attended, from_host = (torch.full_like(attended, n, device=place.device) for n in (1000, 50))
    config = config_of(args, named, parts=case.splits)
    got = sparse_decode(*args, **named, attended=attended, from_host=from_host, config=config)
    place.close(got, expected, ratio=RATIO.get(place.dtype))
    assert torch.equal(attended.cpu(), want_attended)
    assert torch.equal(from_host.cpu(), want_host)


def test_part_of_the_blocks(place):
    """Of each row's list as many blocks as the device says: none, some, more than there are."""
    case = replace(SMALL, batch=3, group=20, chosen=6, splits=3)
    args, named = case.make(place, "block")
    named["used"] = torch.tensor([[2], [0], [99]], dtype=torch.int32, device=place.device)
    expected, want_attended = expect(args, named)
    attended = torch.full_like(want_attended, 1000, device=place.device)
    config = config_of(args, named, parts=case.splits)
    got = sparse_decode(*args, **named, attended=attended, config=config)
    place.close(got, expected, ratio=RATIO.get(place.dtype))
    assert torch.equal(attended.cpu(), want_attended)
    args, named = Case().make(place, "block")
    with pytest.raises(ValueError, match="of latents only"):
        sparse_decode(*args, **named, used=torch.ones(2, 2, dtype=torch.int32, device=place.device))


@ALL_WAYS
def test_views_and_mixed_dtypes(place32, granularity):
    """A transposed query, buffers that are slices of larger ones, storage in a smaller dtype than the query."""
    args, named = replace(SMALL, group=20).make(place32, granularity)
    args[1], args[5] = args[1].half(), args[5].half()
    expected, _ = expect(args, named)

    def inside(t):
        if t is None:
            return None
        wide = torch.full([size + 3 for size in t.shape], 1, dtype=t.dtype, device=t.device)
        view = wide[tuple(slice(2, 2 + size) for size in t.shape)]
        view.copy_(t)
        return view

    views = [args[0].transpose(1, 2).contiguous().transpose(1, 2)] + [inside(t) for t in args[1:]]
    out = inside(place32.nan(2, 20, 32))
    assert sparse_decode(*views, **named, out=out) is out
    place32.close(out, expected)


@pytest.mark.pairwise
@pytest.mark.gpu
@ALL_WAYS
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("group", [20, 128])
def test_captured_and_pinned(place, granularity, pinned, group):
    """One graph serves other contents of the same buffers; stored blocks are read from the host in place."""
    case = replace(SMALL, group=group, dk=576, dv=512, block_size=64, cap=40, chosen=9, ring=150)
    args, named = case.make(place, granularity)
    if pinned:
        args[1] = args[1].cpu().pin_memory()
    public(*args, **named)  # compiles
    attended = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = public(*args, **named, attended=attended)
    for seed in range(3):
        place.generator.manual_seed(seed + 1)
        fresh, _ = case.make(place, granularity)
        for t, new in zip(args, fresh):
            if t is not None:
                t.copy_(new)
        attended.fill_(1000)
        graph.replay()
        torch.cuda.synchronize()
        expected, want_attended = expect(args, named)
        place.close(out, expected, ratio=RATIO.get(place.dtype))
        assert torch.equal(attended.cpu(), want_attended)
