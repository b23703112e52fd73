"""Operators on tensors of more than 2 ** 31 elements: offsets need 64 bits.

Few of these elements are used, and on a CPU the others take no memory. Half of the storage lies before the tensor, so
that an offset that has overflowed reads what is not there, instead of ending the process.
"""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
from decode_cases import Case as Decode
from decode_cases import in_frames
from test_seal import Case as Seal
from test_seal import make as make_seal
from test_seal import on_cpu as seal_on_cpu
from test_seal import run as run_seal
from test_token_score import config_of as label_config
from test_token_score import make as make_labels
from walk_cases import Case as WalkCase
from walk_cases import on_cpu

from hf_sparsekv.ops.append.reference import append as reference_append
from hf_sparsekv.ops.append.triton import append
from hf_sparsekv.ops.block_copy.triton import block_copy
from hf_sparsekv.ops.block_rank.reference import block_rank as reference_rank
from hf_sparsekv.ops.block_rank.triton import block_rank
from hf_sparsekv.ops.block_score.reference import block_score as reference_blocks
from hf_sparsekv.ops.block_score.triton import block_score
from hf_sparsekv.ops.experts.reference import experts as reference_experts
from hf_sparsekv.ops.experts.triton import experts
from hf_sparsekv.ops.latent_rope.reference import latent_rope as reference_latent_rope
from hf_sparsekv.ops.latent_rope.triton import latent_rope
from hf_sparsekv.ops.pack.reference import pack as reference_pack
from hf_sparsekv.ops.pack.triton import pack
from hf_sparsekv.ops.progressive import progressive_decode, reference
from hf_sparsekv.ops.progressive import triton as kernels
from hf_sparsekv.ops.qk_rope.reference import qk_rope as reference_rope
from hf_sparsekv.ops.qk_rope.triton import qk_rope
from hf_sparsekv.ops.query_predict.reference import query_predict as reference_predict
from hf_sparsekv.ops.query_predict.triton import query_predict
from hf_sparsekv.ops.query_ring.reference import push as reference_push
from hf_sparsekv.ops.query_ring.triton import push
from hf_sparsekv.ops.seal.reference import seal as reference_seal
from hf_sparsekv.ops.seal.triton import seal
from hf_sparsekv.ops.sparse_decode.reference import sparse_decode as reference_decode
from hf_sparsekv.ops.sparse_decode.triton import sparse_decode
from hf_sparsekv.ops.token_score.reference import token_score as reference_tokens
from hf_sparsekv.ops.token_score.triton import token_score
from hf_sparsekv.ops.topk_select.config import Config
from hf_sparsekv.ops.topk_select.reference import block_select as reference_select
from hf_sparsekv.ops.topk_select.triton import block_select

PAST = 2**31 + 4096  # elements


@pytest.fixture(autouse=True)
def released():
    """Gigabytes of a GPU go back at once."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def room_for(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """So many elements, which on a CPU take memory only where they are used, even if there is less in all."""
    if device != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    unreserved = getattr(mmap, "MAP_NORESERVE", 0x4000)
    held = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
    return torch.frombuffer(held, dtype=dtype)


def far(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Equal to ``t``; the last entry along ``dim`` lies more than ``2 ** 31`` elements behind the first."""
    step = (-(-PAST // (t.shape[dim] - 1)) + 63) // 64 * 64
    near = t.contiguous()
    strides = [step if i == dim else stride for i, stride in enumerate(near.stride())]
    room = room_for(PAST + (t.shape[dim] - 1) * step + near.numel(), t.dtype, t.device.type)
    return room.as_strided(t.shape, strides, PAST).copy_(t)


def cpu(args):
    return [t.cpu() if isinstance(t, torch.Tensor) else t for t in args]


def test_far():
    t = torch.arange(24, dtype=torch.int8).view(3, 4, 2)
    for dim in range(3):
        assert torch.equal(far(t, dim), t)


# ---------------------------------------------------------------------- scores and choices


@pytest.mark.parametrize("reduce", ["mean", "max", "none"])
@pytest.mark.parametrize("what", [0, 1], ids=["queries", "bounds"])
def test_block_score(place16, what, reduce):
    args = [
        place16.randn(2, 6, 64),
        place16.randn(4, 1, 2, 64),
    ]  # one KV head: the offsets of its group are the longest
    rest = [torch.ones(4, dtype=torch.int32, device=place16.device), torch.stack([place16.randperm(4)] * 2)]
    expected = reference_blocks(*cpu(args + rest), reduce)
    args[what] = far(args[what], 1 - what)
    place16.close(block_score(*args, *rest, reduce), expected, ratio=4e-6)


@pytest.mark.parametrize("bits", ["matrix", 4, 16])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("what", [0, 1], ids=["queries", "labels"])
def test_token_score(place16, what, reduce, bits):
    matrix = bits == "matrix"
    args = list(make_labels(place16, 2, 1, 4, 64, 16, 16, 2, 2, 16 if bits == 16 else 4))
    expected = reference_tokens(*cpu(args), reduce)
    args[what] = far(args[what], 1 - what)
    if what and args[2] is not None:
        args[2] = far(args[2], 0)
    got = token_score(*args, reduce, config=label_config(args, reduce, matrix))
    place16.close(got, expected, ratio=1e-4 if matrix else 4e-6)


def test_rank_and_select(place16):
    scores = place16.randn(3, 2, 40).float()
    fill, slots = place16.randint(1, 17, 43), torch.stack([place16.randperm(43)[:40] for _ in range(3)])
    wide = far(scores, 0)
    for got, expected in zip(block_rank(wide, fill, slots), reference_rank(*cpu((scores, fill, slots)))):
        assert torch.equal(got.cpu(), expected)
    for how in (Config(), Config(row=16, chunk=64, split=False)):
        assert torch.equal(block_select(wide, 9, config=how).cpu(), reference_select(scores.cpu(), 9))


# ---------------------------------------------------------------------- attention

LATENTS = {"latents": True, "group": 5, "dk": 48, "dv": 32}


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
    args, named = in_frames(place16, args, named)
    named["frames"] = far(named["frames"], 0)
    place16.close(sparse_decode(*args, **named), expected)


@pytest.mark.parametrize("shape", [{}, LATENTS], ids=["keys and values", "latents"])
@pytest.mark.parametrize("what", ["q", "kv", "frames"])
def test_walk(place16, what, shape):
    case = WalkCase(n=2, heads=1, threshold=1.0, placed=what == "frames", spread=1.0, **shape)
    given = case.make(place16)
    expected = case.walk(replace(place16, device="cpu"), on_cpu(given))
    expected.operators = reference
    want = progressive_decode(expected)
    given[what] = far(given[what], 1 if what == "q" else 0)
    walk = case.walk(place16, given)
    walk.operators = kernels
    place16.close(progressive_decode(walk), want)


# ---------------------------------------------------------------------- what writes


def test_append(place16):
    k, v = place16.randn(2, 3, 2, 64), place16.randn(2, 3, 2, 64)
    length = torch.tensor([7], dtype=torch.int32, device=place16.device)
    near, valid = place16.randn(2, 3, 9, 128), torch.zeros(2, 9, dtype=torch.bool, device=place16.device)
    want, want_valid = near.cpu(), valid.cpu()
    reference_append(k.cpu(), v.cpu(), None, want, want_valid, length.cpu(), 1)
    near = far(near, 2)
    append(far(k, 1), v, None, near, valid, length, 1)
    assert torch.equal(near.cpu(), want)
    assert torch.equal(valid.cpu(), want_valid)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("what", ["kv", "bounds", "codes", "near_kv"])
def test_seal(place16, what, bits):
    args = make_seal(place16, Seal(block_size=16, bits=bits, batch=2))
    expected = run_seal(reference_seal, seal_on_cpu(args))
    held = args["index"] if what in args["index"] else args
    held[what] = far(held[what], 2 if what == "near_kv" else 0)
    if what == "codes" and bits == 4:
        held["qparams"] = far(held["qparams"], 0)
    got = run_seal(seal, args)
    slots = args["slots"].long().cpu()
    for name in ("kv", "bounds", "codes", "qparams"):
        if name in got:
            assert torch.equal(got[name][slots.to(got[name].device)].cpu(), expected[name][slots]), name


def test_pack(place16):
    kv, slots = place16.randn(4, 2, 16, 32), torch.stack([place16.randperm(4)[:3] for _ in range(2)])
    ids = torch.stack([place16.randperm(48)[:24].sort().values for _ in range(4)]).view(2, 2, 24)
    held = torch.full((2, 2, 24), -1, dtype=torch.int32, device=place16.device)
    order = torch.arange(24, dtype=torch.int32, device=place16.device).expand(2, 2, -1).contiguous()
    state = [held, order, place16.randn(2, 2, 24, 32), torch.empty_like(held)]
    want = [t.cpu().clone() for t in state]
    reference_pack(ids.cpu(), kv.cpu(), slots.cpu(), *want)
    pack(ids, far(kv, 0), slots, *state)
    for got, expected in zip(state, want):
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("to_frames", [True, False])
def test_block_copy(place16, to_frames):
    """Bytes, as an odd block has them: all others are copied in wider words, of which there are fewer."""
    size = 17 * 241
    count = 2**31 // size + 3
    large = room_for(count * size, torch.uint8, place16.device).view(count, 17, 241)
    small = place16.randint(0, 256, 4, 17, 241, dtype=torch.uint8)
    at = [0, count - 1, count - 2]
    copies = torch.tensor([[1, at[0]], [2, at[1]], [3, at[2]]], dtype=torch.int32, device=place16.device)
    n = torch.tensor([3], dtype=torch.int32, device=place16.device)
    if to_frames:
        block_copy(small[:, None], large, copies, n)
    else:
        large[at] = small[1:]
        small[1:] = 0
        block_copy(large[:, None], small, copies.flip(1).contiguous(), n)
    assert torch.equal(large[at].cpu(), small[1:].cpu())
    assert small[1:].any()


# ---------------------------------------------------------------------- queries, experts


def test_query_ring(place16):
    q, ring = place16.randn(2, 4, 2, 32), place16.randn(2, 4, 5, 32)
    state = [place16.randint(0, 1, n) for n in (2, 2, 1)]
    column = torch.tensor([9], dtype=torch.int32, device=place16.device)
    want, rest = ring.cpu(), [t.cpu().clone() for t in state]
    reference_push(q.cpu(), None, column.cpu(), want, *rest)
    ring = far(ring, 1)
    push(far(q, 1), None, column, ring, *state)
    assert torch.equal(ring.cpu(), want)


def test_query_predict(place16):
    ring, count = place16.randn(3, 2, 6, 64), torch.full((3,), 6, dtype=torch.int32, device=place16.device)
    args = torch.tensor([2], dtype=torch.int32, device=place16.device), count, 4, 1e-2
    expected = reference_predict(*cpu((ring, *args)))
    for dim in (0, 1):
        wide = far(torch.cat((ring, ring), 1), dim)  # (a dimension of two would not do)
        place16.close(query_predict(wide, *args)[:, :2], expected)


def test_rope(place16):
    q, k = place16.randn(1, 2, 6, 64), place16.randn(1, 2, 5, 64)
    cos, sin = place16.randn(1, 2, 64), place16.randn(1, 2, 64)
    expected = reference_rope(*cpu((q, k, cos, sin)))
    for args in ((far(q, 2), k), (q, far(k, 2))):
        for got, want in zip(qk_rope(*args, cos, sin), expected):
            place16.close(got, want)


def test_latent_rope(place16):
    q, compressed, weight = place16.randn(1, 2, 6, 48), place16.randn(1, 2, 80), place16.randn(64)
    rest = place16.randn(1, 2, 16), place16.randn(1, 2, 16), weight, 1e-6, False
    expected = reference_latent_rope(*cpu((q, compressed, *rest)))
    for got, want in zip(latent_rope(far(q, 2), compressed, *rest), expected):
        place16.close(got, want)


def test_experts(place16):
    x, weights, index = place16.randn(2, 32), place16.rand(2, 3), torch.tensor([[0, 2, 3], [3, 1, 2]])
    gate_up, down = place16.randn(4, 2 * 24, 32) / 6, place16.randn(4, 32, 24) / 5
    args = x, index.to(place16.device), weights, gate_up, down, "silu"
    expected = reference_experts(*cpu(args))
    place16.close(experts(*args[:3], far(gate_up, 0), far(down, 0), "silu"), expected)
