"""Predictions of the next query: the definition against the paper's equations, the kernel against the definition."""

from __future__ import annotations

import math

import pytest
import torch

from hf_sparsekv.ops.query_predict import query_predict as public
from hf_sparsekv.ops.query_predict.reference import query_predict as reference
from hf_sparsekv.ops.query_predict.triton import query_predict

EPSILON = 1e-2
FORMS = {
    "assembled": (True, True),
    "assembled without softmax": (True, False),
    "ridge": (False, False),
    "ridge with softmax": (False, True),
}
# batch, heads, slots of the ring, head dim, window, position
CASES = {
    "16 of 17 slots": (3, 2, 17, 64, 16, 5),
    "the whole ring in order": (1, 3, 17, 128, 16, 0),
    "one predecessor": (2, 1, 2, 64, 1, 1),
    "odd sizes": (2, 3, 9, 80, 5, 8),
    "window of 32": (1, 2, 33, 64, 32, 20),
    "wide heads": (1, 1, 5, 192, 4, 3),
    "latents": (2, 3, 17, 576, 16, 9),
    "the last query": (3, 2, 1, 96, 0, 0),
    "the last query of a longer ring": (2, 2, 4, 64, 0, 0),
}


def queries(*shape: int) -> torch.Tensor:
    """Slowly turning, as real ones are: each ``[..., slot, :]`` is mostly the one before."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for slot in range(1, shape[-2]):
        x[..., slot, :] = 0.8 * x[..., slot - 1, :] + 0.6 * x[..., slot, :]
    return x


def ring_of(place, case):
    """A ring, its position, and counts: rows have all, none, one, two or any number of queries; the rest is NaN."""
    batch, heads, slots, dim, _, position = case
    ring = queries(batch, heads, slots, dim).to(place.dtype).to(place.device).roll(position, dims=2)
    counts = torch.tensor([slots, 0, min(2, slots)][:batch])
    for row, count in enumerate(counts.tolist()):
        for age in range(count, slots):
            ring[row, :, (position - 1 - age) % slots] = math.nan
    return ring, torch.tensor(position, dtype=torch.int32).to(place.device), counts.int().to(place.device)


def by_equations(history, window, pool, softmax):
    """Equations 2 to 5 as they stand, for one head's queries ``[n, D]`` in order of time; float64."""
    q = history.double()
    n = min(window, len(q) - 1)
    ridge = EPSILON * q[-1 - n : -1].square().sum(-1).mean()
    found = []
    for k in range(1, n + 1) if pool else [n]:
        x = q[-1 - k : -1]  # Q_(t-k) .. Q_(t-1)
        w = torch.linalg.solve(x @ x.T + ridge * torch.eye(k, dtype=torch.float64), x @ q[-1])
        w = w.softmax(0) if softmax else w
        found.append(w @ q[-k:])
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("count", [17, 9, 2])
@pytest.mark.parametrize("window", [16, 4])
def test_reference_is_the_papers(form, count, window):
    history = queries(2, 3, count, 64)
    ring = torch.full((2, 3, 17, 64), math.nan)
    order = (torch.arange(count) + 11) % 17
    ring[:, :, order] = history
    got = reference(
        ring,
        torch.tensor((11 + count) % 17, dtype=torch.int32),
        torch.full((2,), count, dtype=torch.int32),
        window,
        EPSILON,
        *form,
    )
    want = torch.stack([torch.stack([by_equations(h, window, *form) for h in row]) for row in history])
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place, case, form):
    ring, position, count = ring_of(place, case)
    want = reference(ring.cpu(), position.cpu(), count.cpu(), case[4], EPSILON, *form)
    ratio = 2e-5 if place.dtype == torch.float32 else None  # two ways of solving, in float32
    for run in (query_predict, public):
        place.close(run(ring, position, count, case[4], EPSILON, *form), want, ratio)


def test_few_queries(place32):
    """One: that query. None: zeros. Two: the last one times its weight, which the softmax makes 1."""
    ring = queries(3, 2, 17, 64).to(place32.device)
    position = torch.tensor(4, dtype=torch.int32, device=place32.device)
    count = torch.tensor([1, 0, 2], dtype=torch.int32, device=place32.device)
    for run in (query_predict, public, reference):
        got, weighted = (run(ring, position, count, 16, EPSILON, pool, pool) for pool in (True, False))
        assert torch.equal(got[0], ring[0, :, 3])
        assert torch.equal(weighted[0], ring[0, :, 3])
        assert not got[1].any()
        assert not weighted[1].any()
        assert torch.allclose(got[2], ring[2, :, 3])
        ratio = weighted[2] / ring[2, :, 3]
        assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-4)
        assert not torch.allclose(weighted[2], ring[2, :, 3])


HARD = {
    "all the same": lambda q: q[:, :, :1].expand_as(q).clone(),
    "nearly the same": lambda q: q[:, :, :1] + 1e-3 * q,
    "all zero": torch.zeros_like,
    "zero but for the newest": lambda q: q * (torch.arange(q.shape[2]) == q.shape[2] - 1).to(q)[:, None],
    "large": lambda q: q * 1e3,
    "small": lambda q: q * 1e-3,
    "one of them large": lambda q: q * (1 + 99 * (torch.arange(q.shape[2]) == 7)).to(q)[:, None],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("case", HARD.values(), ids=HARD.keys())
def test_hard_queries(place, case, form):
    """Collinear, zero, large: finite, and what the definition says."""
    ring = case(queries(2, 2, 17, 64)).to(place.dtype).to(place.device)
    position = torch.zeros(1, dtype=torch.int32, device=place.device)
    count = torch.tensor([17, 12], dtype=torch.int32, device=place.device)
    want = reference(ring.cpu(), position.cpu(), count.cpu(), 16, 1e-3, *form)
    assert want.isfinite().all()
    place.close(
        query_predict(ring, position, count, 16, 1e-3, *form), want, 6e-3 if place.dtype.itemsize == 2 else 1e-3
    )
    if not ring[:, :, :-1].any():
        assert torch.equal(want, ring[:, :, -1].cpu())  # nothing to regress on


def test_overflow_falls_back_to_the_last(place32):
    """Squared norms beyond float32, and an infinite predecessor."""
    ring = queries(2, 1, 17, 64).to(place32.device)
    ring[0, :, 3] = 1e30
    ring[1, :, 3] = math.inf
    position = torch.zeros((), dtype=torch.int32, device=place32.device)
    count = torch.full((2,), 17, dtype=torch.int32, device=place32.device)
    for run in (query_predict, public, reference):
        assert torch.equal(run(ring, position, count, 16, EPSILON), ring[:, :, -1])


def test_strided_ring_and_out(place32):
    """Layers stacked in front of the rows, a slice of a wider row, and a place for the result."""
    stack = place32.nan(2, 2, 3, 9, 64 + 32)
    stack[..., :64] = queries(2, 2, 3, 9, 64)
    ring = stack[..., :64].flatten(0, 1)
    assert ring.data_ptr() == stack.data_ptr()
    position = torch.tensor([2], dtype=torch.int32, device=place32.device)
    count = torch.tensor([9, 3, 1, 6], dtype=torch.int32, device=place32.device)
    want = reference(ring.cpu().clone(), position.cpu(), count.cpu(), 8, EPSILON)
    for run in (query_predict, public):
        out = place32.nan(4, 3, 128)[..., :64]
        assert run(ring, position, count, 8, EPSILON, out=out) is out
        place32.close(out, want, 2e-5)


def test_no_rows(place32):
    ring = place32.nan(0, 2, 9, 64)
    position, count = (torch.zeros(n, dtype=torch.int32, device=place32.device) for n in (1, 0))
    assert public(ring, position, count, 8, EPSILON).shape == (0, 2, 64)


@pytest.mark.gpu
def test_captured_without_waiting():
    """A CUDA graph holds one kernel that follows ring, position and counts at their addresses."""
    ring = queries(3, 8, 17, 128).bfloat16().cuda()
    position = torch.tensor(5, dtype=torch.int32, device="cuda")
    count = torch.tensor([17, 0, 2], dtype=torch.int32, device="cuda")
    public(ring, position, count, 16, EPSILON)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = public(ring, position, count, 16, EPSILON)
    ring.copy_(ring.flip(1))
    position.fill_(9)
    count.copy_(torch.tensor([3, 17, 8]))
    graph.replay()
    want = reference(ring.cpu(), position.cpu(), count.cpu(), 16, EPSILON)
    assert (out.cpu() - want).float().square().mean() < (6e-3) ** 2 * want.float().square().mean()


BAD = {
    "ring must be": ({"ring": torch.zeros(2, 5, 8)}, {}),
    "needs a ring of 17": ({}, {"window": 16}),
    "window must lie": ({}, {"window": 40}),
    "epsilon must be": ({}, {"epsilon": 0.0}),
    "position must be int32": ({"position": torch.zeros(1)}, {}),
    "count must be int32 with 2": ({"count": torch.zeros(3, dtype=torch.int32)}, {}),
    "out must be": ({}, {"out": torch.zeros(2, 3, 9)}),
}


@pytest.mark.parametrize("message", BAD)
def test_refuses(message):
    tensors, settings = BAD[message]
    given = {
        "ring": torch.zeros(2, 3, 5, 8),
        "position": torch.zeros((), dtype=torch.int32),
        "count": torch.zeros(2, dtype=torch.int32),
        "window": 4,
        "epsilon": EPSILON,
    }
    with pytest.raises(ValueError, match=message):
        public(**{**given, **tensors, **settings})
