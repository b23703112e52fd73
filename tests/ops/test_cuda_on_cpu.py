"""The kernels in CUDA C++, run on a CPU thread by thread, against their definitions.

Small clusters and bins, so that few entries reach every path; threads take turns in an order of chance.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from conftest import Place
from cuda_on_cpu import COMPILER, CpuKernel, build
from decode_cases import RATIO, in_pages
from decode_cases import Case as Decode
from test_decode_clusters import CASES as DECODES
from test_decode_clusters import PLAIN, wild
from test_label_scores import CASES, Case, check, on_cpu
from test_small_linear import STREAMED, check_streamed
from test_topk_clusters import ALL
from test_topk_select import COUNTS, row_lengths

from hf_sparsekv.ops.small_linear import stream
from hf_sparsekv.ops.sparse_decode import cluster as decode
from hf_sparsekv.ops.sparse_decode.reference import sparse_decode as reference_decode
from hf_sparsekv.ops.token_score import labels
from hf_sparsekv.ops.token_score.reference import token_score as reference_score
from hf_sparsekv.ops.topk_select import cluster
from hf_sparsekv.ops.topk_select.config import Config
from hf_sparsekv.ops.topk_select.reference import block_select as reference_block
from hf_sparsekv.ops.topk_select.reference import token_select as reference_token

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed")
SHAPES = {  # blocks of a cluster: threads, bins, scores of a bin that a block hands out
    2: {"THREADS": 64, "LOG_BINS": 6, "LIST": 8},
    4: {"THREADS": 128, "LOG_BINS": 4, "LIST": 3},
}


@pytest.fixture
def place() -> Place:
    return Place("cpu", torch.float32)


@pytest.fixture(params=SHAPES, ids=lambda blocks: f"{blocks} blocks")
def select(request, monkeypatch):
    """Selects by clusters of so many blocks, over memory that holds something else; in turns of another order each."""
    shape, name = SHAPES[request.param], "topk_select_cluster_kernel"
    defined = {**shape, "CLUSTER": request.param, "RESIDENT": 1, "MARGIN": cluster.MARGIN}
    kernel = build("hf_sparsekv.ops.topk_select", "cluster.cu", name, **defined)
    monkeypatch.setattr(cluster, "THREADS", shape["THREADS"])
    monkeypatch.setattr(cluster, "_kernel", lambda scores, config: (kernel, request.param))

    def run(scores, k, *, blocks=None, block_size=0, rows=None, tokens=1, turns=1):
        found = []
        for turn in range(turns):
            kernel.seed = 1000 * k + turn
            out = torch.full((*scores.shape[:2], k), 12345, dtype=torch.int32)
            assert cluster.select_clusters(scores, blocks, k, block_size, rows, tokens, out, Config())
            found.append(out)
        assert all(torch.equal(one, found[0]) for one in found)
        return found[0]

    return run


@pytest.mark.pairwise
@pytest.mark.parametrize("n", [1, 65, 200, 1037])
@pytest.mark.parametrize("k", COUNTS)
@pytest.mark.parametrize("kind", ALL)
def test_selection(place, kind, k, n, select):
    scores, k = ALL[kind](place, n), max(1, COUNTS[k](n))
    assert torch.equal(select(scores, k), reference_block(scores, k))


@pytest.mark.pairwise
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("blocks", [1, 41])
@pytest.mark.parametrize("k", COUNTS)
def test_rows_of_their_own_length(blocks, block_size, k, select):
    n, k = blocks * block_size, max(1, COUNTS[k](blocks * block_size))
    rows = row_lengths(n, block_size)
    for tokens, width in ((1, n), (block_size, blocks)):
        clean = torch.randn(len(rows), 2, width)
        behind = (torch.arange(width) * tokens >= rows[:, 1:])[:, None].expand_as(clean)
        expected = reference_block(clean.masked_fill(behind, -math.inf), k)
        assert torch.equal(select(clean.masked_fill(behind, math.inf), k, rows=rows, tokens=tokens), expected)


def test_tokens_of_given_blocks(select):
    blocks = (torch.arange(30, dtype=torch.int32) * 3).expand(2, 3, 30)
    scores = torch.randn(2, 4, 30 * 16 + 3)[:, 1:, 1:481]
    expected = reference_token(scores, blocks, 77, 16)
    assert torch.equal(select(scores, 77, blocks=blocks, block_size=16, turns=5), expected)


def scores_of(given: dict, fill: bool, monkeypatch) -> torch.Tensor:
    batch, q_heads, heads, size = *given["q"].shape[:2], *given["codes"].shape[1:3]
    defined = {"THREADS": 64, "BLOCK": size, "WIDTH": given["codes"].shape[3], "GROUP": q_heads // heads}
    kinds = {"MEAN": int(given["reduce"] == "mean"), "BFLOAT16": int(given["q"].dtype == torch.bfloat16)}
    kernel = build("hf_sparsekv.ops.token_score", "labels.cu", "token_score_labels_kernel", **defined, **kinds)
    monkeypatch.setattr(labels, "THREADS", 64)
    monkeypatch.setattr(labels, "_kernel", lambda *shape: kernel)
    monkeypatch.setattr(CpuKernel, "resident", lambda self, threads, where: 1)
    out = torch.full((batch, heads, given["block_table"].shape[1] * size), 12345.0)
    assert labels.score_all(**given, out=out, fill=fill)
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_scores(case, monkeypatch, place):
    given = case.make(place)
    for fill in (False, True):
        check(given, scores_of(given, fill, monkeypatch), fill)


@pytest.mark.parametrize("wild", ["queries", "scales", "no block"])
def test_scores_that_are_no_number(wild, monkeypatch, place):
    given = Case(blocks=160, ragged=False).make(place)  # more blocks than a warp looks up at once
    if wild == "queries":
        given["q"][0, 1], given["q"][1, ::2, 1::2], given["q"][2] = math.nan, -math.inf, math.inf
    elif wild == "scales":
        given["qparams"][::3, :, ::2, 0], given["qparams"][1::3, :, ::2, 1] = math.nan, math.nan
    else:
        given["block_table"][0, ::3] = -1
    assert torch.equal(scores_of(given, True, monkeypatch), reference_score(**on_cpu(given), block_ids=None))


@pytest.fixture(params=[1, 2, 4], ids=lambda blocks: f"{blocks} blocks")
def attend(request, monkeypatch):
    """Attends by clusters of so many blocks, and checks the result, denominators and counts."""

    def run(args, named, turns=1, ids=None):
        q, kv, pages = args[0], args[1], named.get("pages")
        sink = named["sink_logits"]
        shape = q, kv.shape[2], q.shape[1] // kv.shape[1], request.param
        kernel = decode_kernel(*shape, named["granularity"] == "all", pages is not None, sink)
        monkeypatch.setattr(decode, "_kernel", lambda *shape: kernel)
        lists = {"attended": torch.full(args[5].shape[:2], 1000), "from_host": torch.full(args[5].shape[:2], 5)}
        want = {**{name: t.clone() for name, t in lists.items()}, "lse": torch.full(q.shape[:2], math.nan)}
        expected = reference_decode(*args, **named, **want)
        usual = {"pages": None, "used": None, "means": None, "mean_tokens": None, "columns": None}
        usual |= {name: t for name, t in named.items() if name not in ("granularity", "value_dim", "softcap")}
        for turn in range(turns):
            kernel.seed = turn
            found = {**{name: t.clone() for name, t in lists.items()}, "lse": torch.full(q.shape[:2], math.nan)}
            out = torch.full_like(q, math.nan)
            cut = {"clusters": request.param, "threads": 64}
            given = [*args[:4], args[4] if ids is None else ids, args[5]]
            assert decode.attend_clusters(*given, **usual, **found, out=out, **cut)
            compare(out, found["lse"], expected, want["lse"])
            assert all(torch.equal(found[name], want[name]) for name in lists)

    return run


def compare(out, lse, expected, want_lse) -> None:
    """Equal up to rounding; where the definition gives NaN, both of the kernel's are no numbers."""
    lost = expected.isnan().all(-1)
    assert torch.equal(out.isnan(), expected.isnan())
    Place("cpu", out.dtype).close(out[~lost].nan_to_num(), expected[~lost].nan_to_num(), ratio=RATIO[out.dtype])
    Place("cpu", torch.float32).close(lse[~lost], want_lse[~lost], ratio=1e-5)


def decode_kernel(q, size, group, blocks, every, paged, sink) -> CpuKernel:
    defined = {"THREADS": 64, "CLUSTER": blocks, "RESIDENT": 1, "GROUP": group, "DIM": q.shape[2], "ALL": int(every)}
    defined |= {"LOG_BLOCK": size.bit_length() - 1, "BFLOAT16": int(q.dtype == torch.bfloat16), "PAGED": int(paged)}
    defined["SINK_BYTES"] = 4 if sink is None else sink.element_size()
    return build("hf_sparsekv.ops.sparse_decode", "cluster.cu", "sparse_decode_cluster_kernel", **defined)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", DECODES.values(), ids=DECODES.keys())
@pytest.mark.parametrize("granularity", ["token", "all"])
def test_attention(case, granularity, dtype, attend):
    attend(*case.make(Place("cpu", dtype), granularity))


def test_attention_in_any_order(attend):
    attend(*PLAIN.make(Place("cpu", torch.bfloat16), "token"), turns=4)


def test_attention_to_pages(attend):
    place = Place("cpu", torch.bfloat16)
    attend(*in_pages(place, *PLAIN.make(place, "token")))


def test_places_of_an_empty_row_are_not_attended(attend):
    """A captured step may still hold the last ones."""
    place = Place("cpu", torch.float16)
    args, named = in_pages(place, *Decode(dk=64, dv=64, rows=((125, 112), (9, 0))).make(place, "token"))
    stale = args[4].clone()
    stale[1] = stale[0].abs()
    attend(args, named, ids=stale)


def test_attention_to_some_of_a_list(attend):
    args, named = PLAIN.make(Place("cpu", torch.float16), "token")
    named["used"] = torch.tensor([[3, 0], [5, 2]], dtype=torch.int32)
    args[4] = args[4].abs()
    attend(args, named)


@pytest.mark.parametrize("what", ["a key", "a value", "an infinite key", "a query", "large logits"])
def test_attention_that_is_not_finite(what, attend):
    place = Place("cpu", torch.bfloat16)
    attend(*wild(what, *PLAIN.make(place, "token")))


def test_no_attention_where_it_does_not_serve(monkeypatch):
    """Nothing is launched: Triton's kernels do these."""
    monkeypatch.setattr(decode, "_kernel", lambda *shape: pytest.fail("it would be launched"))
    given = {"dk": 64, "dv": 64}
    unlike = [Decode(), Decode(**given, group=9), Decode(dk=64, dv=32), Decode(dk=96, dv=96), Decode(dk=128, dv=64)]
    unlike += [Decode(batch=1, heads=1, group=4, latents=True, dk=64, dv=64), Decode(**given, block_size=24)]
    calls = [
        case.make(Place("cpu", torch.float32 if i == 0 else torch.float16), "token") for i, case in enumerate(unlike)
    ]
    for change in ("ids of 64 bits", "keys apart", "no row", "misaligned"):
        args, named = Decode(**given).make(Place("cpu", torch.float16), "token")
        if change == "ids of 64 bits":
            args[4] = args[4].long()
        elif change == "keys apart":
            args[1] = args[1].repeat_interleave(2, -1)[..., ::2]
        elif change == "misaligned":
            args[5] = torch.nn.functional.pad(args[5], (1, 7))[..., 1:-7]
        else:
            args = [t[:0] if i in (0, 2, 3, 4, 5) else t for i, t in enumerate(args)]
        calls.append((args, named))
    names = ("attended", "pages", "from_host", "lse", "used", "means", "mean_tokens", "columns")
    for args, named in calls:
        rest = {"sinks": named["sinks"], "scale": 1.0, "sink_logits": None, **dict.fromkeys(names)}
        out = args[0].new_empty(*args[0].shape[:2], named["value_dim"])
        assert not decode.attend_clusters(*args, **rest, out=out, clusters=1, threads=64)


def seeded(turn: int, where, **defined) -> CpuKernel:
    kernel = build("hf_sparsekv.ops.small_linear", "stream.cu", "small_linear_stream_kernel", **defined)
    kernel.seed = turn
    return kernel


@pytest.fixture(params=[1, 2], ids=lambda steps: f"{steps} steps")
def linear(request, monkeypatch):
    """A linear layer of these rows; in turns of another order each."""

    def run(x, weight, bias, activation):
        config = stream.Stream(threads=64, resident=1, steps=request.param)
        n = len(weight) if activation is None else len(weight) // 2
        found = []
        for turn in range(2):
            out = torch.full((len(x), n), math.nan, dtype=x.dtype)
            monkeypatch.setattr(stream, "_kernel", partial(seeded, turn))
            assert stream.stream_linear(x, weight, bias, activation, out, config)
            found.append(out)
        assert torch.equal(*found)
        return found[0]

    return run


@pytest.mark.pairwise
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", STREAMED.values(), ids=STREAMED.keys())
def test_linear(case, dtype, activation, linear):
    check_streamed(Place("cpu", dtype), *case, activation, linear)


def test_no_linear_layer_where_it_does_not_serve(monkeypatch):
    monkeypatch.setattr(stream, "_kernel", lambda where, **defined: pytest.fail("it would be launched"))
    x, weight = torch.ones(2, 64, dtype=torch.float16), torch.ones(16, 64, dtype=torch.float16)
    wrong = [
        (x.float(), weight.float()),
        (x, weight.bfloat16()),
        (x[:, 4:], weight[:, 4:]),
        (x[:, ::2], weight[:, ::2]),
    ]
    wrong += [(x[:0], weight), (x.repeat(9, 1), weight)]
    for x, weight in wrong:
        assert not stream.stream_linear(x, weight, None, None, x.new_empty(len(x), 16), stream.Stream())
