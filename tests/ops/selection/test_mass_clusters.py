"""Selection by estimated mass by clusters of thread blocks (CUDA C++), run on a CPU, against its definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cuda_on_cpu import COMPILER, build
from inside import kernel_is
from mass_parts import parts_of
from places import Place
from test_mass_select import CASES, Case, check

from hf_sparsekv.ops.selection.mass_select import NONE, TOTALS, cluster, reference
from hf_sparsekv.ops.selection.mass_select.reference import LENGTHS

SERVED = {
    name: case
    for name, case in CASES.items()
    if case.softcap is None and case.group_reduce == "all" and case.group <= cluster.MOST_HEADS and case.n
}
FEW = (  # others share their path, and each is compiled
    *("usual", "one head", "everything", "capped among equals", "learned sink", "many chunks", "empty rows"),
    *("short rows", "keys that are still to come"),
)


UNWRITTEN = 12345  # ids after the chosen ones
GIVEN = ("sinks", "sink_logits", "threshold", "min_tokens", "max_tokens")


def select(args, named, blocks, parts=5):
    """The kernel's selection, in memory that holds something else, and its totals."""
    scores, near = args[0], args[3]
    lists, n, device = near.shape[:2], scores.shape[-1], scores.device
    found = {"ids": torch.full((*lists, n), UNWRITTEN, dtype=torch.int32, device=device)}
    found["count"] = torch.full(lists, UNWRITTEN, dtype=torch.int32, device=device)
    found["mass"] = torch.full(lists, math.nan, device=device)
    found["cut"] = torch.full(lists, UNWRITTEN, dtype=torch.int32, device=device)
    bins = torch.full((*lists, -(-n // 4) * 4), NONE, dtype=torch.uint8, device=device)
    totals = torch.zeros(len(TOTALS) + LENGTHS, dtype=torch.int64, device=device)
    sums = parts_of(args, named, parts)
    named = {name: named[name] for name in GIVEN}
    assert cluster.select_clusters(scores, sums, args[4], **named, **found, bins=bins, totals=totals, clusters=blocks)
    return reference.Selection(**found, bins=bins[..., :n]), totals


def on_cpu(monkeypatch, args, named, blocks, seed=0):
    q, near, sink = args[1], args[3], named["sink_logits"]
    monkeypatch.setattr(cluster, "THREADS", 64)
    shape = {"THREADS": 64, "CLUSTER": blocks, "GROUP": q.shape[1] // near.shape[1]}
    shape |= {"BFLOAT16": int(q.dtype == torch.bfloat16), "SINK_BYTES": 4 if sink is None else sink.element_size()}
    kernel = build("hf_sparsekv.ops.selection.mass_select", "cluster.cu", "mass_select_cluster_kernel", **shape)
    kernel.seed = seed
    kernel_is(monkeypatch, cluster, lambda *shape: kernel)
    return select(args, named, blocks, parts=5 if seed else 70)


ON_CPU = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])


@pytest.mark.few(case=[SERVED[name] for name in FEW])
@ON_CPU
@pytest.mark.pairwise(once=("case",))
@pytest.mark.parametrize("blocks", [1, 2, 4])
@DTYPES
@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
def test_on_a_cpu(case, dtype, blocks, monkeypatch):
    args, named = case.make(Place("cpu", dtype))
    check(*on_cpu(monkeypatch, args, named, blocks), args, named, UNWRITTEN)


@ON_CPU
@pytest.mark.parametrize("seed", range(3))
def test_in_any_order(seed, monkeypatch):
    args, named = Case(n=2100, batch=1).make(Place("cpu", torch.bfloat16))
    check(*on_cpu(monkeypatch, args, named, 4, seed), args, named, UNWRITTEN)


@ON_CPU
def test_what_is_no_number(monkeypatch):
    """A query that is NaN, near keys that are NaN or infinite: the other heads and tokens count as before."""
    args, named = Case().make(Place("cpu", torch.bfloat16))
    scores, q, _, near, *_ = args
    scores[0, 0], q[0, 0] = -torch.inf, torch.nan
    near[1, 0, 9], near[1, 1, 9] = torch.inf, torch.nan
    scores[1, 4, 17] = torch.inf
    got, totals = on_cpu(monkeypatch, args, named, 2)
    check(got, totals, args, named, UNWRITTEN)
    assert got.bins[1, 1, 17] == 0, "what is infinite has all the mass"


def test_where_it_does_not_serve(monkeypatch):
    """Nothing is launched: Triton's kernels do these."""
    kernel_is(monkeypatch, cluster, lambda *shape: pytest.fail("it would be launched"))
    for change in ("scores apart", "ids of 64 bits", "misaligned", "a large group", "no sums"):
        args, named = Case(group=9 if change == "a large group" else 3).make(Place("cpu", torch.float16))
        sums, (lists, n) = parts_of(args, named), (args[3].shape[:2], args[0].shape[-1])
        scores, kind = args[0], torch.int64 if change == "ids of 64 bits" else torch.int32
        if change == "scores apart":
            scores = torch.nn.functional.pad(scores, (0, 3))[..., :n]
        elif change == "misaligned":
            scores = torch.nn.functional.pad(scores, (1, 3))[..., 1:-3]
        elif change == "no sums":
            sums.parts = None
        one = torch.empty(lists, dtype=torch.int32)
        out = {"ids": torch.empty(*lists, n, dtype=kind), "count": one, "mass": one.float(), "cut": one}
        named = {name: named[name] for name in GIVEN}
        assert not cluster.select_clusters(scores, sums, args[4], **named, **out, totals=None)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [None, 1, 8])
@DTYPES
@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
def test_on_a_gpu(case, dtype, blocks):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU has no clusters")
    args, named = case.make(Place("cuda", dtype))
    check(*select(args, named, blocks), args, named, UNWRITTEN)


@pytest.mark.gpu
@pytest.mark.parametrize("n, batch", [(32768, 1), (131072, 1), (32768, 8), (1 << 20, 1)])
def test_long_rows_on_a_gpu(n, batch):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU has no clusters")
    case = replace(Case(), n=n, batch=batch, heads=8, group=4, dk=128, channels=32, ring=80)
    args, named = case.make(Place("cuda", torch.bfloat16))
    check(*select(args, named, None), args, named, UNWRITTEN)
