"""Attention by clusters of thread blocks (CUDA C++), run on a CPU thread by thread, against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Place
from cuda_on_cpu import COMPILER, CpuKernel, build
from decode_cases import RATIO, Case, in_pages
from test_decode_clusters import CASES, PLAIN, wild

from hf_sparsekv.ops.sparse_decode import cluster
from hf_sparsekv.ops.sparse_decode.reference import sparse_decode as reference

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed")


@pytest.fixture(params=[1, 2, 4], ids=lambda blocks: f"{blocks} blocks")
def attend(request, monkeypatch):
    """Attends by clusters of so many blocks, and checks the result, denominators and counts."""

    def run(args, named, turns=1, ids=None):
        q, kv, pages = args[0], args[1], named.get("pages")
        sink = named["sink_logits"]
        kernel = decode_kernel(q, kv.shape[2], q.shape[1] // kv.shape[1], request.param, pages is not None, sink)
        monkeypatch.setattr(cluster, "_kernel", lambda *shape: kernel)
        monkeypatch.setattr(cluster, "THREADS", 64)
        lists = {"attended": torch.full(args[5].shape[:2], 1000), "from_host": torch.full(args[5].shape[:2], 5)}
        want = {**{name: t.clone() for name, t in lists.items()}, "lse": torch.full(q.shape[:2], math.nan)}
        expected = reference(*args, **named, **want)
        usual = {"pages": None, "means": None, "mean_tokens": None, "columns": None}
        usual |= {name: t for name, t in named.items() if name not in ("granularity", "value_dim", "softcap")}
        for turn in range(turns):
            kernel.seed = turn
            found = {**{name: t.clone() for name, t in lists.items()}, "lse": torch.full(q.shape[:2], math.nan)}
            out = torch.full_like(q, math.nan)
            given = [*args[:4], args[4] if ids is None else ids, args[5]]
            assert cluster.attend_clusters(*given, **usual, **found, out=out, clusters=request.param)
            compare(out, found["lse"], expected, want["lse"])
            assert all(torch.equal(found[name], want[name]) for name in lists)

    return run


def compare(out, lse, expected, want_lse) -> None:
    """Equal up to rounding; where the definition gives NaN, both of the kernel's are no numbers."""
    lost = expected.isnan().all(-1)
    assert torch.equal(out.isnan(), expected.isnan())
    Place("cpu", out.dtype).close(out[~lost].nan_to_num(), expected[~lost].nan_to_num(), ratio=RATIO[out.dtype])
    Place("cpu", torch.float32).close(lse[~lost], want_lse[~lost], ratio=1e-5)


def decode_kernel(q, size, group, blocks, paged, sink) -> CpuKernel:
    defined = {"THREADS": 64, "CLUSTER": blocks, "GROUP": group, "DIM": q.shape[2]}
    defined |= {"LOG_BLOCK": size.bit_length() - 1, "BFLOAT16": int(q.dtype == torch.bfloat16), "PAGED": int(paged)}
    defined["SINK_BYTES"] = 4 if sink is None else sink.element_size()
    return build("hf_sparsekv.ops.sparse_decode", "cluster.cu", "sparse_decode_cluster_kernel", **defined)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(case, dtype, attend):
    attend(*case.make(Place("cpu", dtype), "token"))


def test_in_any_order(attend):
    attend(*PLAIN.make(Place("cpu", torch.bfloat16), "token"), turns=4)


def test_to_pages(attend):
    place = Place("cpu", torch.bfloat16)
    attend(*in_pages(place, *PLAIN.make(place, "token")))


def test_places_of_an_empty_row_are_not_attended(attend):
    """A captured step may still hold the last ones."""
    place = Place("cpu", torch.float16)
    args, named = in_pages(place, *Case(dk=64, dv=64, rows=((125, 112), (9, 0))).make(place, "token"))
    stale = args[4].clone()
    stale[1] = stale[0].abs()
    attend(args, named, ids=stale)


def test_chosen_tokens_that_are_not_sealed(attend):
    """They are neither attended nor missing from what a mean stands for."""
    args, named = Case(batch=2, heads=2, span=2, rows=((125, 112), (45, 40))).make(Place("cpu", torch.float16), "token")
    args[4][1] = args[4][0]
    attend(args, named)


@pytest.mark.parametrize(
    "what", ["a key", "a value", "an infinite key", "a query", "an infinite query", "large logits"]
)
def test_that_is_not_finite(what, attend):
    place = Place("cpu", torch.bfloat16)
    attend(*wild(what, *PLAIN.make(place, "token")))


def test_where_it_does_not_serve(monkeypatch):
    """Nothing is launched: Triton's kernels do these."""
    monkeypatch.setattr(cluster, "_kernel", lambda *shape: pytest.fail("it would be launched"))
    given = {"dk": 64, "dv": 64}
    unlike = [Case(), Case(**given, group=9), Case(dk=64, dv=32), Case(dk=96, dv=96), Case(dk=128, dv=64)]
    unlike += [Case(batch=1, heads=1, group=4, latents=True, dk=64, dv=64), Case(**given, block_size=24)]
    calls = [
        case.make(Place("cpu", torch.float32 if i == 0 else torch.float16), "token") for i, case in enumerate(unlike)
    ]
    for change in ("ids of 64 bits", "keys apart", "no row", "misaligned", "many tokens"):
        args, named = Case(**given).make(Place("cpu", torch.float16), "token")
        if change == "ids of 64 bits":
            args[4] = args[4].long()
        elif change == "keys apart":
            args[1] = args[1].repeat_interleave(2, -1)[..., ::2]
        elif change == "many tokens":
            args[4] = args[4].repeat(1, 1, cluster.MOST_TOKENS)
        elif change == "misaligned":
            args[5] = torch.nn.functional.pad(args[5], (1, 7))[..., 1:-7]
        else:
            args = [t[:0] if i in (0, 2, 3, 4, 5) else t for i, t in enumerate(args)]
        calls.append((args, named))
    names = ("attended", "pages", "from_host", "lse", "means", "mean_tokens", "columns")
    for args, named in calls:
        rest = {"sinks": named["sinks"], "scale": 1.0, "sink_logits": None, **dict.fromkeys(names)}
        out = args[0].new_empty(*args[0].shape[:2], named["value_dim"])
        assert not cluster.attend_clusters(*args, **rest, out=out, clusters=1)
