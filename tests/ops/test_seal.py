"""The sealing kernels against their definition."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hf_sparsekv.ops.seal import Index, key_metadata
from hf_sparsekv.ops.seal import seal as public
from hf_sparsekv.ops.seal.reference import seal as reference
from hf_sparsekv.ops.seal.triton import seal


@dataclass
class Case:
    """Shapes of one call. ``seen``: valid tokens that each row has sealed before."""

    batch: int = 2
    heads: int = 2
    dk: int = 64
    dv: int = 64
    block_size: int = 16
    sinks: int = 4
    parts: int = 1
    channels: int = 16
    bits: int = 4
    seen: tuple[int, ...] = (100, 3)
    padded: bool = True
    bounds: bool = True
    metadata: str = "min_max"
    keeps: bool = True


CASES = {
    "usual": Case(),
    "no padding": Case(padded=False, seen=(7, 7)),
    "no power of two": Case(batch=3, heads=3, dk=80, dv=48, channels=20, seen=(0, 2, 50)),
    "first block": Case(seen=(0, 0), padded=False),
    "parts": Case(block_size=64, parts=4, dk=128, dv=128, channels=32),
    "many parts": Case(block_size=32, parts=8, seen=(1, 9)),
    "unquantised labels": Case(bits=16, block_size=32),
    "no labels": Case(channels=0),
    "no bounds": Case(bounds=False, block_size=32),
    "nothing kept": Case(channels=0, bounds=False, sinks=0),
    "wide heads": Case(batch=1, heads=1, dk=256, dv=256, channels=64, block_size=128, seen=(2,)),
    "latents": Case(heads=1, dk=576, dv=0, channels=128, block_size=64),
    "latents, parts": Case(heads=1, dk=576, dv=0, channels=0, block_size=32, parts=2, metadata="cuboid_mean"),
    "rows of no power of two": Case(heads=1, dk=72, dv=0, channels=18),
    "all sinks": Case(sinks=20, seen=(0, 0), padded=False),
    "cuboid": Case(channels=0, metadata="cuboid_mean"),
    "cuboid of parts": Case(batch=3, heads=3, dk=80, block_size=64, parts=4, seen=(0, 2, 50), metadata="cuboid_mean"),
    "cuboid of sinks": Case(sinks=20, seen=(0, 0), padded=False, metadata="cuboid_mean"),
    "mean": Case(metadata="mean", block_size=32, dk=128),
    "kept elsewhere": Case(channels=0, bounds=False, keeps=False, seen=(0, 3)),
    "mean of parts": Case(metadata="mean", block_size=32, parts=2, seen=(1, 9)),
}


def make(place, case: Case) -> dict:
    """Arguments by name: a near buffer with holes in the block, slots full of what must not stay."""
    ring, capacity = 3 * case.block_size, case.batch + 3
    near = case.sinks + ring
    valid = torch.ones(case.batch, near, dtype=torch.bool, device=place.device)
    at = case.sinks + case.block_size
    span = slice(at, at + case.block_size)
    if case.padded:
        valid[:, span] = place.rand(case.batch, case.block_size) > 0.4
        valid[-1, span] = False
    seen = torch.tensor(case.seen, dtype=torch.int32, device=place.device)
    valid[:, : case.sinks] = torch.arange(case.sinks, device=place.device) < seen[:, None]
    kept = (capacity, case.heads, case.block_size)
    index = {"key_dim": case.dk}
    if case.bounds:
        sides = 1 if case.metadata == "mean" else 2
        index |= {"bounds": place.nan(capacity, case.parts, case.heads, sides, case.dk), "metadata": case.metadata}
        if case.parts > 1:
            index["part_fill"] = place.nan(capacity, case.parts, dtype=torch.int32)
    if case.channels:
        rows = [place.randperm(case.dk)[: case.channels] for _ in range(case.batch * case.heads)]
        index["channels"] = torch.stack(rows).view(case.batch, case.heads, -1)
        if case.bits == 4:
            index["codes"] = place.nan(*kept, case.channels // 2, dtype=torch.uint8)
            index["qparams"] = place.nan(*kept, 2, dtype=torch.float16)
        else:
            index["codes"] = place.nan(*kept, case.channels)
    near_kv = place.randn(case.batch, case.heads, near, case.dk + case.dv)
    near_kv[0, 0, at + 1, : case.dk] = 0.5  # a token whose labels are all the same: scale 0
    return {
        "near_kv": near_kv,
        "near_valid": valid,
        "at": at,
        "sinks": case.sinks,
        "seen": seen,
        "slots": place.randperm(capacity)[: case.batch],
        "kv": place.nan(*kept, case.dk + case.dv if case.keeps else 0),
        "flags": place.nan(capacity, case.block_size, dtype=torch.uint8),
        "fill": place.nan(capacity, dtype=torch.int32),
        "index": index,
    }


def on_cpu(args: dict) -> dict:
    """Copies on the CPU."""
    copies = {name: t.cpu().clone() if isinstance(t, torch.Tensor) else t for name, t in args.items()}
    if "index" in copies:
        copies["index"] = on_cpu(copies["index"])
    return copies


def run(function, args: dict) -> dict:
    """Call it; gives every tensor afterwards by name."""
    function(**{**args, "index": Index(**args["index"])})
    return {**args, **args["index"]}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place, case):
    args = make(place, case)
    want = run(reference, on_cpu(args))
    got = run(seal, args)
    for name, expected in want.items():
        if name == "bounds" and case.metadata != "min_max":  # sums, in another order
            size = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[place.dtype]
            torch.testing.assert_close(got[name].cpu(), expected, rtol=size, atol=size, equal_nan=True, msg=name)
        elif isinstance(expected, torch.Tensor):
            torch.testing.assert_close(got[name].cpu(), expected, rtol=0, atol=0, equal_nan=True, msg=name)


def test_reference_by_hand():
    """A block of 16 whose first, second and last tokens are padding, after one valid token; two sinks."""
    near_kv = torch.arange(1.0, 19.0).view(1, 1, 18, 1).repeat(1, 1, 1, 4)
    valid = torch.ones(1, 18, dtype=torch.bool)
    valid[0, [1, 2, 3, 17]] = False
    kv = torch.zeros(1, 1, 16, 4)
    flags, fill = torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    seen, slots = torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    bounds = torch.zeros(1, 2, 1, 2, 2)
    near_kv[..., 1] *= -1
    before = near_kv.clone()
    reference(near_kv, valid, 2, 2, seen, slots, kv, flags, fill, Index(2, bounds))
    assert torch.equal(kv[0], before[0, :, 2:])
    assert flags.tolist() == [[0, 0, 3, *[1] * 12, 0]]
    assert fill.tolist() == [12]
    assert bounds[0, 0, 0].tolist() == [[10.0, -6.0], [6.0, -10.0]]
    assert bounds[0, 1, 0].tolist() == [[17.0, -11.0], [11.0, -17.0]]
    assert near_kv[0, 0, 1].tolist() == [5.0, -5.0, 5.0, 5.0]
    assert valid.tolist() == [[True, True, *[False] * 16]]
    assert seen.tolist() == [14]


def test_metadata_by_hand():
    """Keys 1, 2, 6 and one that is not usable; box 1 .. 6, centre 3.5, deviations 2.5, 1.5, 2.5."""
    keys = torch.tensor([1.0, 2.0, 100.0, 6.0])[None, :, None]
    usable = torch.tensor([True, True, False, True])
    assert key_metadata(keys, usable, 1, "min_max").flatten().tolist() == [6, 1]
    assert key_metadata(keys, usable, 1, "mean").flatten().tolist() == [3]
    torch.testing.assert_close(key_metadata(keys, usable, 1, "cuboid_mean").flatten(), torch.tensor([3.5, 6.5 / 3]))
    assert key_metadata(keys, usable, 2, "mean").flatten().tolist() == [1.5, 6]
    for metadata in ("cuboid_mean", "mean"):
        assert not key_metadata(keys, usable & False, 1, metadata).any()


def test_public_function(place32):
    args = make(place32, CASES["usual"])
    want, got = run(reference, on_cpu(args)), run(public, args)
    assert torch.equal(got["flags"].cpu(), want["flags"])
    assert torch.equal(got["seen"].cpu(), want["seen"])
