"""Attention by clusters of thread blocks (CUDA C++), run on a CPU thread by thread, against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_on_cpu import COMPILER, CpuKernel, build
from decode_cases import RATIO, Case, in_codes, in_pages
from inside import kernel_is
from places import Place
from test_decode_clusters import CASES, CODED, PLAIN, WILD, wild

from hf_sparsekv.ops.attention.sparse_decode import cluster
from hf_sparsekv.ops.attention.sparse_decode.reference import sparse_decode as reference

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed")


@pytest.fixture(params=[1, 2, 4], ids=lambda blocks: f"{blocks} blocks")
def attend(request, monkeypatch):
    """Attends by clusters of so many blocks, and checks the result, denominators and counts."""

    def run(args, named, turns=1, ids=None):
        q, kv, pages = args[0], args[1], named.get("pages")
        sink = named["sink_logits"]
        kind = {"PAGED": int(pages is not None), "CODES": int(kv.dtype == torch.int8)}
        kernel = decode_kernel(q, kv.shape[2], q.shape[1] // kv.shape[1], request.param, sink, **kind)
        kernel_is(monkeypatch, cluster, lambda *shape: kernel)
        monkeypatch.setattr(cluster, "THREADS", 64)
        lists = {"attended": torch.full(args[5].shape[:2], 1000), "from_host": torch.full(args[5].shape[:2], 5)}
        want = {**{name: t.clone() for name, t in lists.items()}, "lse": torch.full(q.shape[:2], math.nan)}
        expected = reference(*args, **named, **want)
        usual = dict.fromkeys(("pages", "means", "mean_tokens", "columns", "scales"))
        usual |= {name: t for name, t in named.items() if name not in ("granularity", "value_dim", "softcap")}
        for turn in range(turns):
            kernel.seed = turn
            found = {**{name: t.clone() for name, t in lists.items()}, "lse": torch.full(q.shape[:2], math.nan)}
            out = torch.full_like(q, math.nan)
            given = [*args[:4], args[4] if ids is None else ids, args[5]]
            assert cluster.attend_clusters(*given, **usual, **found, out=out, clusters=request.param)
            compare(out, found["lse"], expected, want["lse"])
            assert all(torch.equal(found[name], want[name]) for name in lists)
        return out

    return run


def compare(out, lse, expected, want_lse) -> None:
    """Equal up to rounding; where the definition gives NaN, both of the kernel's are no numbers."""
    lost = expected.isnan().all(-1)
    assert torch.equal(out.isnan(), expected.isnan())
    Place("cpu", out.dtype).close(out[~lost].nan_to_num(), expected[~lost].nan_to_num(), ratio=RATIO[out.dtype])
    Place("cpu", torch.float32).close(lse[~lost], want_lse[~lost], ratio=1e-5)


def decode_kernel(q, size, group, blocks, sink, **kind) -> CpuKernel:
    defined = {"THREADS": 64, "CLUSTER": blocks, "GROUP": group, "DIM": q.shape[2], **kind}
    defined |= {"LOG_BLOCK": size.bit_length() - 1, "BFLOAT16": int(q.dtype == torch.bfloat16)}
    defined["SINK_BYTES"] = 4 if sink is None else sink.element_size()
    return build("hf_sparsekv.ops.attention.sparse_decode", "cluster.cu", "sparse_decode_cluster_kernel", **defined)


def make(case: Case, dtype: torch.dtype, coded: bool, paged: bool = False) -> tuple[list, dict]:
    """A call: what blocks hold ``coded``, some of it on pages."""
    place = Place("cpu", dtype)
    args, named = case.make(place, "token")
    if paged:
        args, named = in_pages(place, args, named)
    return in_codes(args, named) if coded else (args, named)


FEW = ("usual", "five heads", "nothing chosen", "many chosen", "long and short", "learned sinks alone")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])


@pytest.mark.few(case=[CASES[name] for name in FEW])
@pytest.mark.pairwise
@CODED
@DTYPES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(case, dtype, coded, attend):
    attend(*make(case, dtype, coded))


@pytest.mark.few
@CODED
def test_in_any_order(coded, attend):
    attend(*make(PLAIN, torch.bfloat16, coded), turns=4)


@pytest.mark.slow
@CODED
def test_to_pages(coded, attend):
    attend(*make(PLAIN, torch.bfloat16, coded, paged=True))


@pytest.mark.slow
@pytest.mark.pairwise
@DTYPES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_codes_beside_pages(case, dtype, attend):
    """Both kinds among 32 entries."""
    attend(*make(case, dtype, coded=True, paged=True))


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("dim", [64, 128])
def test_codes_are_exact(dim, dtype, attend):
    """Each of them in a value, the only one that is attended; and in the key, whose logit is the denominator's."""
    heads = 256 // dim
    case = Case(batch=1, heads=heads, dk=dim, dv=dim, cap=1, rows=((16, 16),), sinks=0)
    args, named = make(case, dtype, coded=True)
    codes = torch.arange(-128, 128).view(heads, dim)
    args[1].copy_(torch.cat((codes, codes.flip(-1)), dim=-1)[:, None])
    named["scales"].fill_(0.25)
    named["scales"][..., :dim] = 0
    args[4][:], args[4][..., 0] = -1, 7
    want = (codes.flip(-1) / 4).to(dtype).repeat_interleave(case.group, 0)
    assert torch.equal(attend(args, named)[0], want)


@pytest.mark.slow
@DTYPES
def test_light_tokens_in_codes(dtype, attend):
    """A ten thousandth of the largest weight, which has no value, times their scales: they are all there is."""
    case = Case(batch=1, group=1, cap=1, rows=((16, 16),), sinks=0)
    args, named = case.make(Place("cpu", dtype), "token")
    args[1][:, :, 0, :64], args[1][:, :, 0, 64:] = 1.2 * args[0][0], 0
    attend(*in_codes(args, named))


@DTYPES
def test_infinite_values_in_codes(dtype, attend):
    """Such an entry is the largest there is, in float16 an infinite one; others of its token are numbers."""
    args, named = Case(batch=1, heads=1, cap=1, rows=((16, 16),), sinks=0).make(Place("cpu", dtype), "token")
    args[1][..., 64 + 5] = math.inf
    attend(*in_codes(args, named))


@pytest.mark.parametrize("what", ["a key", "a value"])
@DTYPES
def test_codes_of_what_is_no_number(what, dtype, attend):
    """Their scale is not."""
    args, named = PLAIN.make(Place("cpu", dtype), "token")
    token = int(args[4][0, 0, 2])
    args[1][args[3][0, token // 16], 0, token % 16, 3 if what == "a key" else 64 + 3] = math.nan
    attend(*in_codes(args, named))


@pytest.mark.few(attend=[2])
def test_places_of_an_empty_row_are_not_attended(attend):
    """A captured step may still hold the last ones."""
    place = Place("cpu", torch.float16)
    args, named = in_pages(place, *Case(dk=64, dv=64, rows=((125, 112), (9, 0))).make(place, "token"))
    stale = args[4].clone()
    stale[1] = stale[0].abs()
    attend(args, named, ids=stale)


@pytest.mark.few(attend=[4])
def test_chosen_tokens_that_are_not_sealed(attend):
    """They are neither attended nor missing from what a mean stands for."""
    args, named = Case(batch=2, heads=2, span=2, rows=((125, 112), (45, 40))).make(Place("cpu", torch.float16), "token")
    args[4][1] = args[4][0]
    attend(args, named)


@pytest.mark.few
@pytest.mark.parametrize("coded, what", WILD)
def test_that_is_not_finite(what, coded, attend):
    args, named = wild(what, *PLAIN.make(Place("cpu", torch.bfloat16), "token"))
    attend(*(in_codes(args, named) if coded else (args, named)))


def test_where_it_does_not_serve(monkeypatch):
    """Nothing is launched: Triton's kernels do these."""
    kernel_is(monkeypatch, cluster, lambda *shape: pytest.fail("it would be launched"))
    given = {"dk": 64, "dv": 64}
    unlike = [Case(), Case(**given, group=9), Case(dk=64, dv=32), Case(dk=96, dv=96), Case(dk=128, dv=64)]
    unlike += [Case(batch=1, heads=1, group=4, latents=True, dk=64, dv=64), Case(**given, block_size=24)]
    calls = [
        case.make(Place("cpu", torch.float32 if i == 0 else torch.float16), "token") for i, case in enumerate(unlike)
    ]
    for change in (
        "ids of 64 bits",
        "keys apart",
        "no row",
        "misaligned",
        "many tokens",
        "codes apart",
        "misaligned codes",
        "scales apart",
        "misaligned scales",
        "scales far apart",
        "codes without scales",
        "scales without codes",
    ):
        args, named = make(Case(**given), torch.float16, coded="codes" in change or "scales" in change)
        if change == "ids of 64 bits":
            args[4] = args[4].long()
        elif change in ("keys apart", "codes apart"):
            args[1] = args[1].repeat_interleave(2, -1)[..., ::2]
        elif change == "misaligned codes":
            args[1] = torch.nn.functional.pad(args[1], (8, 8))[..., 8:-8]
        elif change == "scales apart":
            named["scales"] = named["scales"].repeat_interleave(2, -1)[..., ::2]
        elif change == "misaligned scales":
            named["scales"] = torch.nn.functional.pad(named["scales"], (1, 7))[..., 1:-7]
        elif change == "scales far apart":
            named["scales"] = named["scales"][:1].as_strided((1, *named["scales"].shape[1:]), (1 << 32, 144, 1))
        elif change == "codes without scales":
            named["scales"] = None
        elif change == "scales without codes":
            args[1] = args[5].new_zeros(args[1].shape)
        elif change == "many tokens":
            args[4] = args[4].repeat(1, 1, cluster.MOST_TOKENS)
        elif change == "misaligned":
            args[5] = torch.nn.functional.pad(args[5], (1, 7))[..., 1:-7]
        else:
            args = [t[:0] if i in (0, 2, 3, 4, 5) else t for i, t in enumerate(args)]
        calls.append((args, named))
    names = ("attended", "pages", "from_host", "lse", "means", "mean_tokens", "columns", "scales")
    for args, named in calls:
        rest = {"sinks": named["sinks"], "scale": 1.0, "sink_logits": None, **dict.fromkeys(names)}
        rest["scales"] = named.get("scales")
        out = args[0].new_empty(*args[0].shape[:2], named["value_dim"])
        assert not cluster.attend_clusters(*args, **rest, out=out, clusters=1)
