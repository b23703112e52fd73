"""The sparse decode kernel against its definition."""

from __future__ import annotations

import pytest
import torch
from decode_cases import Case, check, config_of, expect, in_frames

from hf_sparsekv.ops.sparse_decode import sparse_decode as public
from hf_sparsekv.ops.sparse_decode.reference import sparse_decode as reference
from hf_sparsekv.ops.sparse_decode.triton import sparse_decode

ALL_WAYS = pytest.mark.parametrize("granularity", ["token", "block", "all"])


SHAPES = {
    "group 1": Case(group=1),
    "group 2, blocks of 32": Case(group=2, block_size=32, dk=80, dv=80, cap=5),
    "group 3, blocks of 64": Case(group=3, block_size=64, dk=96, dv=64, cap=3, chosen=2),
    "group 4, blocks of 128": Case(batch=1, group=4, block_size=128, dk=128, dv=128, cap=3, chosen=2),
    "group 7": Case(batch=1, heads=1, group=7, dk=128, dv=96),
    "group 16": Case(batch=1, group=16, dk=64, dv=128),
    "wide heads": Case(batch=1, heads=1, group=4, dk=256, dv=256),
    "wider than a power of two": Case(batch=1, heads=1, group=4, dk=192, dv=128),
    "many rows": Case(batch=5, heads=1, group=2, cap=3, chosen=2),
    "no sinks": Case(sinks=0, ring=40),
    "softcap": Case(softcap=1.5),
    "sink logits": Case(learned_sink=True, group=3),
    "softcap and sink logits": Case(softcap=2.0, learned_sink=True, batch=1),
    "nothing chosen": Case(chosen=0, cap=0),
    "one split": Case(splits=1),
    "many splits": Case(splits=50, batch=1, heads=1, cap=19, chosen=11, dk=256, dv=256, ring=70),
}


@pytest.mark.pairwise
@ALL_WAYS
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
def test_against_reference(place, case, granularity):
    check(place, case, granularity)


@ALL_WAYS
def test_splits_do_not_matter(place32, granularity):
    case = Case(batch=1, heads=2, dk=256, dv=64, cap=23, chosen=19, ring=90, softcap=3.0, learned_sink=True)
    args, named = case.make(place32, granularity)
    first = sparse_decode(*args, **named, config=config_of(args, named, parts=1))
    for splits in (2, 3, 7, 40):
        config = config_of(args, named, parts=splits)
        place32.close(sparse_decode(*args, **named, config=config), first.cpu(), ratio=5e-7)


@ALL_WAYS
def test_nothing_to_attend_to(place, granularity):
    """Zeros, with and without a learned sink; the other row is not touched by it."""
    for learned_sink in (False, True):
        case = Case(heads=1, learned_sink=learned_sink)
        args, named = case.make(place, granularity)
        slots, near_valid = args[3], args[6]
        slots[0], near_valid[0] = -1, False
        args[5][0] = torch.nan
        expected, want_attended = expect(args, named)
        attended = torch.full_like(want_attended, 1000, device=place.device)
        got = sparse_decode(*args, **named, attended=attended)
        assert (got[0] == 0).all()
        place.close(got, expected, ratio=1.2e-2 if place.dtype != torch.float32 else None)
        assert attended.tolist() == want_attended.tolist()
        assert attended[0].tolist() == [1000]


def test_large_logits(place32):
    """Logits of some thousands, far apart between the parts, neither overflow nor vanish."""
    args, named = Case(batch=1, cap=9, splits=4, dk=256, dv=64).make(place32, "all")
    named["scale"] = 100.0
    config = config_of(args, named, parts=4)
    place32.close(sparse_decode(*args, **named, config=config), expect(args, named)[0], ratio=1e-4)


def test_one_slot_holds_all_weight(place32):
    """Attention that follows one key gives that key's value: columns, slots and heads are not mixed up."""
    case = Case(batch=2, heads=2, group=2, cap=6, block_size=16)
    slots = torch.stack([place32.randperm(8)[:6] for _ in range(2)])
    kv = place32.randn(8, 2, 16, 128)
    flags = torch.ones(8, 16, dtype=torch.uint8, device=place32.device)
    near_kv = place32.nan(2, 2, 17, 128)
    near_valid = torch.zeros(2, 17, dtype=torch.bool, device=place32.device)
    column = torch.tensor([[5, 37], [64, 95]])
    q, value = torch.empty(2, 4, 64), torch.empty(2, 4, 64)
    for i in range(2):
        for j in range(2):
            token = kv[slots[i, column[i, j] // 16].long(), j, column[i, j] % 16].cpu()
            q[i, 2 * j : 2 * j + 2], value[i, 2 * j : 2 * j + 2] = 50 * token[:64], token[64:]
    ids = torch.arange(96, dtype=torch.int32, device=place32.device).expand(2, 2, 96)
    blocks = torch.arange(6, dtype=torch.int32, device=place32.device).expand(2, 2, 6)
    for granularity, chosen in (("token", ids), ("block", blocks), ("all", None)):
        got = sparse_decode(
            q.to(place32.device),
            kv,
            flags,
            slots,
            chosen,
            near_kv,
            near_valid,
            granularity=granularity,
            value_dim=case.dv,
            sinks=case.sinks,
            scale=1.0,
        )
        torch.testing.assert_close(got.cpu(), value, rtol=1e-5, atol=1e-5)


@ALL_WAYS
def test_views_and_mixed_dtypes(place32, granularity):
    """A transposed query, buffers that are slices of larger ones, storage in a smaller dtype than the query."""
    case = Case(dk=80, dv=96)
    args, named = case.make(place32, granularity)
    args[1], args[5] = args[1].half(), args[5].half()
    expected, want_attended = expect(args, named)

    def inside(t):
        if t is None:
            return None
        wide = torch.full([size + 3 for size in t.shape], 1, dtype=t.dtype, device=t.device)
        view = wide[tuple(slice(2, 2 + size) for size in t.shape)]
        view.copy_(t)
        return view

    views = [args[0].transpose(1, 2).contiguous().transpose(1, 2)] + [inside(t) for t in args[1:]]
    attended, out = inside(torch.full_like(want_attended, 1000)), inside(torch.zeros(2, 8, 96))
    attended, out = attended.to(place32.device), out.to(place32.device)
    sparse_decode(*views, **named, attended=attended, out=out)
    place32.close(out, expected)
    assert torch.equal(attended.cpu(), want_attended)


def test_unknown_granularity(place32):
    args, named = Case().make(place32, "all")
    with pytest.raises(ValueError, match="granularity"):
        sparse_decode(*args, **{**named, "granularity": "page"})


def test_strided_rows_are_refused(place32):
    args, named = Case().make(place32, "all")
    args[1] = args[1].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="kv must be contiguous"):
        sparse_decode(*args, **named)


def test_public_function(place32):
    args, named = Case().make(place32, "token")
    expected, want_attended = expect(args, named)
    out, attended = place32.nan(2, 8, 64), torch.full_like(want_attended, 1000, device=place32.device)
    assert public(*args, **named, out=out, attended=attended) is out
    place32.close(out, expected)
    assert torch.equal(attended.cpu(), want_attended)


@pytest.mark.gpu
@ALL_WAYS
@pytest.mark.parametrize("pinned", [False, True])
def test_captured_and_pinned(granularity, pinned, place32):
    """One graph serves other contents of the same buffers; stored blocks are read from the host in place."""
    case = Case(cap=9)
    args, named = case.make(place32, granularity)
    if pinned:
        args[1] = args[1].cpu().pin_memory()
    public(*args, **named)  # compiles
    attended = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = public(*args, **named, attended=attended)
    for seed in range(3):
        place32.generator.manual_seed(seed + 1)
        fresh, _ = case.make(place32, granularity)
        for t, new in zip(args, fresh):
            if t is not None:
                t.copy_(new)
        attended.fill_(1000)
        graph.replay()
        torch.cuda.synchronize()
        expected, want_attended = expect(args, named)
        place32.close(out, expected)
        assert torch.equal(attended.cpu(), want_attended)


@pytest.mark.pairwise
@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("case", [Case(), Case(dk=48, dv=80, group=3, block_size=32, batch=3, splits=2)], ids=str)
def test_frames(place, case, granularity):
    """Blocks by place: the reference equals itself without frames, the kernel the reference."""
    args, named = case.make(place, granularity)
    expected, want_attended = expect(args, named)
    args, named = in_frames(place, args, named)
    assert (args[4] < -1).any() or (named.get("places", args[4]) < -1).any()
    found, attended = expect(args, named)
    assert torch.equal(found, expected)
    assert torch.equal(attended, want_attended)
    attended = torch.full_like(want_attended, 1000, device=place.device)
    want_host, from_host = torch.full_like(want_attended, 50), torch.full_like(attended, 50)
    size = case.block_size
    place_of = named["places"].cpu() if granularity == "block" else args[4].cpu() // size
    if granularity == "token":
        want_host += (place_of < -1).sum(-1)
    else:  # the tokens of a block that can be selected
        at_home = torch.where(place_of < -1, -place_of - 2, 0).long()
        want_host += ((args[2].cpu()[at_home] == 1) & (place_of < -1)[..., None]).sum((-1, -2))
        slot = args[3].cpu()[:, None].expand(-1, case.heads, -1).gather(-1, args[4].cpu().clamp_min(0).long())
        hidden = (place_of < -1) & (slot < 0)  # a block of no slot is none, whatever its place says
        want_host -= ((args[2].cpu()[at_home] == 1) & hidden[..., None]).sum((-1, -2))
    counted = torch.full_like(want_attended, 50)
    on_cpu = {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in named.items()}
    reference(*(t.cpu() for t in args), **on_cpu, from_host=counted)
    assert torch.equal(counted, want_host)
    config = config_of(args, named, parts=case.splits)
    got = sparse_decode(*args, **named, attended=attended, from_host=from_host, config=config)
    assert torch.equal(from_host.cpu(), want_host)
    place.close(got, expected, ratio={torch.float16: 2e-3, torch.bfloat16: 1.2e-2}.get(place.dtype))
    assert torch.equal(attended.cpu(), want_attended)
    if granularity == "token":
        with pytest.raises(ValueError, match="only where some are chosen"):
            sparse_decode(*args, **dict(named, granularity="all"))


@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("latents", [False, True], ids=["keys and values", "latents"])
def test_frames_of_other_strides(place32, latents, granularity):
    """Frames, stored blocks and the near buffer are slices of wider rows, each of another width."""
    case = Case(heads=1, dk=48, dv=32, latents=latents)
    args, named = in_frames(place32, *case.make(place32, granularity))
    expected, _ = expect(args, named)

    def wider(t, more):
        return torch.cat((t, torch.full_like(t[..., :more], torch.nan)), -1)[..., : t.shape[-1]]

    args[1], args[5], named["frames"] = wider(args[1], 8), wider(args[5], 16), wider(named["frames"], 24)
    place32.close(sparse_decode(*args, **named), expected)
