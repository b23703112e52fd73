"""The kernels in CUDA C++, run on a CPU thread by thread, against their definitions.

Small clusters and bins, so that few entries reach every path; threads take turns in an order of chance.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cuda_on_cpu import COMPILER, CpuKernel, build
from inside import kernel_is
from mass_parts import parts_of, whole
from places import Place
from test_label_scores import CASES, Case, check, not_aligned, on_cpu, rows_of
from test_topk_clusters import ALL
from test_topk_select import COUNTS, row_lengths

from hf_sparsekv.ops import _device
from hf_sparsekv.ops.selection.partial_sums import PartialSums
from hf_sparsekv.ops.selection.token_score import labels
from hf_sparsekv.ops.selection.token_score.reference import token_score as reference_score
from hf_sparsekv.ops.selection.topk_select import cluster
from hf_sparsekv.ops.selection.topk_select.config import Config
from hf_sparsekv.ops.selection.topk_select.reference import block_select as reference_block
from hf_sparsekv.ops.selection.topk_select.reference import token_select as reference_token

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler is installed")
SHAPES = {  # blocks of a cluster: threads, bins, scores of a bin that a block hands out, blocks on a processor
    2: {"THREADS": 64, "LOG_BINS": 6, "LIST": 8, "RESIDENT": 2},
    4: {"THREADS": 128, "LOG_BINS": 4, "LIST": 3, "RESIDENT": 1},
}


FEW = (  # of the cases of labels: kernels of other shapes are other programs
    *("blocks of 64", "the mean", "five heads", "latents, small blocks", "a block"),
    *("each of seven queries", "with norms", "with norms, latents"),
)


@pytest.fixture
def place() -> Place:
    return Place("cpu", torch.float32)


@pytest.fixture(params=SHAPES, ids=lambda blocks: f"{blocks} blocks")
def clusters(request):
    return request.param


@pytest.fixture
def select(request, clusters, monkeypatch):
    """Selects by clusters of so many blocks, over memory that holds something else; in turns of another order each."""
    shape, name = SHAPES[clusters], "topk_select_cluster_kernel"
    defined = {**shape, "CLUSTER": clusters, "MARGIN": cluster.MARGIN}
    defined |= getattr(request, "param", {})
    kernel = build("hf_sparsekv.ops.selection.topk_select", "cluster.cu", name, **defined)
    monkeypatch.setattr(cluster, "THREADS", shape["THREADS"])
    kernel_is(monkeypatch, cluster, lambda scores, config: (kernel, clusters))

    def run(scores, k, *, blocks=None, block_size=0, rows=None, tokens=1, turns=1):
        found = []
        for turn in range(turns):
            kernel.seed = 1000 * k + turn
            out = torch.full((*scores.shape[:2], k), 12345, dtype=torch.int32)
            assert cluster.select_clusters(scores, blocks, k, block_size, rows, tokens, out, Config())
            found.append(out)
        assert all(torch.equal(one, found[0]) for one in found)
        run.meetings = kernel.meetings
        return found[0]

    return run


@pytest.mark.pairwise
@pytest.mark.parametrize("n", [1, 65, 200, 1037, 3333])
@pytest.mark.parametrize("k", COUNTS)
@pytest.mark.parametrize("kind", ALL)
def test_selection(place, kind, k, n, select):
    scores, k = ALL[kind](place, n), max(1, COUNTS[k](n))
    assert torch.equal(select(scores, k), reference_block(scores, k))


@pytest.mark.few
@pytest.mark.slow
@pytest.mark.parametrize("select", [{"LIST": 64, "LOG_BINS": 6}], indirect=True)
@pytest.mark.parametrize("k", [20, 300, 900])
@pytest.mark.parametrize("kind", ["random", "descending"])
def test_usual_rows_need_one_pass(place, kind, k, select):
    """A guess that never held would give the same ids, in twice the time."""
    scores = ALL[kind](place, 1037)
    assert torch.equal(select(scores, k), reference_block(scores, k))
    assert select.meetings == 0
    select(torch.zeros(1, 1, 1037), k)
    assert select.meetings > 0


@pytest.mark.parametrize("n", [997, 1536])
def test_rows_that_are_not_aligned(place, n, select):
    """Each of another residue; what lies beside them is larger."""
    scores = torch.full((3, 1, n + 9), math.inf)
    for skip in range(1, 4):
        scores[skip - 1, 0, skip : skip + n] = place.randn(n)
        rows = scores[skip - 1 : skip, :, skip : skip + n]
        assert torch.equal(select(rows, 99), reference_block(rows, 99))


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


def scores_of(given: dict, fill: bool, monkeypatch, warps: int | None = None, sums=None) -> torch.Tensor:
    """``warps``: that share a list, at most; an even number. ``sums``: these are added up, too."""
    batch, q_heads, heads, size = *given["q"].shape[:2], *given["codes"].shape[1:3]
    defined = {"THREADS": 64, "BLOCK": size, "WIDTH": given["codes"].shape[3], "GROUP": q_heads // heads}
    defined |= {"MEAN": int(given["reduce"] == "mean"), "EACH_QUERY": int(given["reduce"] == "none")}
    defined |= {"BFLOAT16": int(given["q"].dtype == torch.bfloat16)}
    if sums is not None:
        defined |= {"SUMS": 1, "DIM": given["q"].shape[2]}
    kernel = build("hf_sparsekv.ops.selection.token_score", "labels.cu", "token_score_labels_kernel", **defined)
    monkeypatch.setattr(labels, "THREADS", 64)
    kernel_is(monkeypatch, labels, lambda *shape: kernel)
    monkeypatch.setattr(CpuKernel, "resident", lambda self, threads, where: 1)
    if warps is not None:
        gpu = replace(_device.H200, processors=batch * heads * warps // 2)
        monkeypatch.setattr(_device, "gpu_of", lambda t: gpu)
    out = torch.full((batch, rows_of(given), given["block_table"].shape[1] * size), 12345.0)
    assert labels.score_all(**given, out=out, fill=fill, sums=sums)
    return out


SUMMED = {
    "usual": Case(),
    "blocks of 64": Case(block_size=64, blocks=12),
    "one head": Case(group=1, heads=1, dtype=torch.float16),
    "eight heads": Case(group=8, blocks=12, block_size=32),
    "seven heads, with norms": Case(group=7, norms=True, exact=False),
    "many channels": Case(width=32, block_size=64, blocks=9),
    "wide codes": Case(width=64, block_size=64, blocks=9, group=3),
}


@pytest.mark.few(case=[SUMMED[name] for name in ("usual", "one head", "seven heads, with norms", "wide codes")])
@pytest.mark.pairwise(once=("case",))
@pytest.mark.parametrize("coming", [0, 1], ids=["", "keys to come"])
@pytest.mark.parametrize("warps", [2, 20])
@pytest.mark.parametrize("case", SUMMED.values(), ids=SUMMED)
def test_sums_beside_scores(case, warps, coming, monkeypatch, place):
    """Every part has its block's tokens and a share of the recent ones; rows of no token, and of recent ones alone."""
    given = replace(case, reduce="none").make(place)
    q, sinks, ring = given["q"], given["sinks"], 37
    rows = given["rows"] = torch.cat((given["rows"][:1], torch.tensor([[0, 0], [19, 0]], dtype=torch.int32)))
    rows[0, 0] = rows[0, 1] + 30
    near = place.randn(len(rows), given["codes"].shape[1], sinks + ring, 2 * q.shape[2]).to(q.dtype)
    sums = PartialSums(near, (rows[:, 0] - coming).clamp_min(0) if coming else None, 2**-9)
    scores = scores_of(given, False, monkeypatch, warps=warps, sums=sums)
    named = {"scale": sums.scale, "stored": sums.stored, "sinks": sinks}
    want = parts_of((scores, q, given["channels"], near, rows), named)
    torch.testing.assert_close(whole(sums.parts), whole(want.parts), rtol=1e-4, atol=1e-4)
    plain = scores_of(given, False, monkeypatch, warps=warps)
    assert torch.equal(plain.nan_to_num(), scores.nan_to_num())


def test_sums_of_what_is_no_number(monkeypatch, place):
    given = replace(Case(), reduce="none").make(place)
    near = place.randn(3, 2, 41, 2 * given["q"].shape[2]).to(given["q"].dtype)
    given["q"][0, 1], near[1, 0, 0] = math.nan, math.inf
    sums = PartialSums(near, None, 2**-9)
    scores_of(given, False, monkeypatch, warps=4, sums=sums)
    found = whole(sums.parts).unflatten(0, (3, 2))
    assert found[0, 0, 1, 0] == -math.inf
    assert not found[0, 0, 1, 1:].isfinite().any()
    assert not found[1, 0, :, 1].isfinite().any()
    assert found[1, 1].isfinite().all()


@pytest.mark.few(case=[CASES[name] for name in FEW])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_scores(case, monkeypatch, place):
    given = case.make(place)
    for fill in (False, True):
        check(given, scores_of(given, fill, monkeypatch), fill)


@pytest.mark.few
@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("missing", [False, True], ids=["all blocks", "some blocks"])
def test_scores_of_many_tiles(missing, size, width, monkeypatch, place):
    """Two warps of 9 tiles each, or of 18 (more blocks than lanes); rows end in the first few, or where one does."""
    tiles = 36 if size == 16 else 18
    shape = {"blocks": 64 * tiles // size, "block_size": size, "width": width}
    given = Case(batch=9, heads=1, **shape, ragged=False).make(place)
    half = 32 * tiles
    ends = (16, 64, 96, 128, 192, 256, half, half + 32, half + 256)
    given["rows"][:, 1] = torch.tensor([end // size * size for end in ends])
    given["rows"][8, 1] = 64 * tiles
    if missing:
        given["block_table"][:, 1::3] = -1
    for fill in (False, True):
        check(given, scores_of(given, fill, monkeypatch, warps=2), fill)


@pytest.mark.parametrize("tiles", [1, 5, 6, 10, 25])
def test_scores_of_few_tiles(tiles, monkeypatch, place):
    """Six warps a list at most, of which the last has fewer tiles than others, or a part of one."""
    for blocks in (4 * tiles, 4 * tiles - 1):
        given = Case(blocks=blocks, heads=1).make(place)
        for fill in (False, True):
            check(given, scores_of(given, fill, monkeypatch, warps=6), fill)


def test_codes_that_are_not_aligned(monkeypatch, place):
    given = not_aligned(Case().make(place))
    kernel_is(monkeypatch, labels, None)
    assert not labels.score_all(**given, out=torch.empty(3, 2, 640), fill=True)


def test_what_lies_behind_a_row_is_not_looked_up(monkeypatch, place):
    """Blocks of the table from a row's end on are any."""
    given = Case(blocks=30).make(place)
    expected = scores_of(given, True, monkeypatch, warps=2)
    for row, sealed in enumerate(given["rows"][:, 1]):
        given["block_table"][row, sealed // 16 :] = 1 << 30
    assert torch.equal(scores_of(given, True, monkeypatch, warps=2), expected)


@pytest.mark.parametrize("wild", ["queries", "scales", "no block"])
def test_scores_that_are_no_number(wild, monkeypatch, place):
    given = Case(blocks=160, ragged=False).make(place)  # more blocks than a warp looks up at once
    if wild == "queries":
        given["q"][0, 1], given["q"][1, ::2, 1::2], given["q"][2] = math.nan, -math.inf, math.inf
    elif wild == "scales":
        given["qparams"][::3, :, ::2, 0], given["qparams"][1::3, :, ::2, 1] = math.nan, math.nan
    else:
        given["block_table"][0, ::3] = -1
    expected = reference_score(**on_cpu(given), block_ids=None)
    assert torch.equal(scores_of(given, True, monkeypatch, warps=2), expected)
