"""Operators that choose, given NaN, infinities and the ends of float16: NaN is -inf, and all outputs are written.

Kernels against their definitions, and definitions by hand where both might be wrong together.
"""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from decode_cases import Case as Decode
from operator_calls import tensors
from operators import BY_NAME
from storage_operators import Seal

from hf_sparsekv.ops.attention.sparse_decode.reference import sparse_decode as reference_decode
from hf_sparsekv.ops.attention.sparse_decode.triton import sparse_decode
from hf_sparsekv.ops.layers.route.reference import route as reference_route
from hf_sparsekv.ops.layers.route.triton import route
from hf_sparsekv.ops.selection.block_score.reference import block_score as reference_blocks
from hf_sparsekv.ops.selection.query_predict.reference import query_predict as reference_predict
from hf_sparsekv.ops.selection.query_predict.triton import query_predict
from hf_sparsekv.ops.selection.token_score.reference import token_score as reference_tokens
from hf_sparsekv.ops.selection.topk_select.reference import block_select as reference_select
from hf_sparsekv.predictor.channels import ChannelStats

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of the interpreter

WILD = (nan, inf, -inf)


def same(got, expected):
    """Equal, NaN and infinities in the same places."""
    got, expected = got.cpu().float(), expected.float()
    assert torch.equal(got.isnan(), expected.isnan())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


# ---------------------------------------------------------------------- by their scores


def test_select_by_hand():
    scores = torch.tensor([[[nan, 2.0, -inf, inf, nan, -1.0]]])
    assert reference_select(scores, 2).tolist() == [[[1, 3]]]
    assert reference_select(scores, 5).tolist() == [[[1, 3, 5, -1, -1]]]


# ---------------------------------------------------------------------- scores


def wild_queries(place, heads, group, dk):
    """Rows: as usual; a head with NaN; one with each infinity; all NaN."""
    q = place.randn(4, heads, group, dk)
    q[1, :, 0, dk // 3] = nan
    q[2, 0, -1, 5], q[2, -1, 0, dk - 2] = inf, -inf
    q[3] = nan
    return q.flatten(1, 2)


@pytest.mark.pairwise
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("heads, group, dk", [(2, 4, 64), (1, 40, 64), (1, 20, 576), (2, 1, 80)])
def test_block_scores(place, heads, group, dk, reduce):
    operator, n = BY_NAME["block_score"], 37
    given = operator.call(place, 4, heads, group, dk, n, reduce) | {"q": wild_queries(place, heads, group, dk)}
    bounds, block_table = place.randn(n + 4, heads, 2, dk), given["block_table"]
    for physical_id, value in enumerate(WILD):
        bounds[physical_id, :, 0, 7] = bounds[physical_id + 3, -1, -1, dk - 1] = value
    bounds[6:9] = torch.tensor(WILD)[:, None, None, None]
    block_table[:, 30:] = -1
    sealed = torch.full((4,), 16 * n, dtype=torch.int32, device=place.device)
    given |= {"bounds": bounds, "rows": torch.stack((sealed + 3, sealed), 1)}
    operator.check(place, given, operator.expected(given), reduce)
    assert (given["out"][3] == -inf).all()
    assert given["out"][0].isfinite().any()


def test_block_score_by_hand():
    """One head of two is NaN: it is left out of a maximum, and spoils a mean."""
    q = torch.tensor([[[1.0, 0.0], [nan, 0.0]]])
    args = torch.tensor([[[[3.0, 1.0], [2.0, 1.0]]]]), torch.tensor([[17, 16]]).int(), torch.zeros(1, 1).int()
    named = {"tokens": 16, "sinks": 4}
    assert reference_blocks(q, *args, "max", **named).tolist() == [[[3.0]]]
    assert reference_blocks(q, *args, "mean", **named).tolist() == [[[-inf]]]


@pytest.mark.pairwise
@pytest.mark.parametrize("tensor_cores", [True, False])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("group, dk, width", [(4, 64, 16), (2, 96, 24), (16, 64, 64), (40, 80, 24)])
def test_token_scores(place, group, dk, width, reduce, tensor_cores):
    operator = BY_NAME["token_score"]
    given = operator.call(place, 4, 2, group, dk, width, 16, 6, 4, reduce, tensor_cores)
    given["q"] = wild_queries(place, 2, group, dk)
    given["rows"][2:] = given["rows"][1]
    given["channels"][:, :, 0], given["channels"][:, :, 1] = 5, dk - 2  # (twice, perhaps)
    for i, value in enumerate(WILD):
        given["qparams"][i, :, 3::5, 0] = given["qparams"][i, :, 4::5, 1] = value
    operator.check(place, given, operator.expected(given), reduce, tensor_cores)
    got = given["out"]
    assert (got[3] == -inf).all()
    assert got[0].isfinite().any()
    assert (got[2] == -inf).all() == (reduce == "mean"), "the mean of a group is one query, that of the others is not"


def test_token_score_by_hand():
    """A group's head that is infinite in a label channel scores nothing; in another channel it does not matter."""
    q = torch.tensor([[[1.0, 2.0, inf], [inf, 0.0, 0.0]]])
    codes, rows = torch.tensor([[[[3 | 1 << 4], [0]]]], dtype=torch.uint8), torch.tensor([[3, 2]]).int()
    qparams, norms = torch.tensor([[[[1.0, 0.0], [1.0, nan]]]]).half(), torch.tensor([[[[0.0, 0.0], [1.0, 1.0]]]])
    args = codes, qparams, torch.tensor([[[0, 1]]]).int(), rows, torch.zeros(1, 1).int(), None
    assert reference_tokens(q, *args, "max", sinks=0, norms=norms).tolist() == [[[5.0, -inf]]]
    assert reference_tokens(q, *args, "max", sinks=1, norms=norms).tolist() == [[[-inf, -inf]]]
    assert reference_tokens(q, *args, "mean", sinks=0, norms=norms).tolist() == [[[-inf, -inf]]]


@pytest.mark.pairwise
@pytest.mark.parametrize("tensor_cores", [True, False])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_ends_of_half_precision(place, reduce, tensor_cores):
    """Queries and keys as large as float16 has them: products are float32, and no score overflows."""
    top, labels, blocks = torch.finfo(torch.float16).max, BY_NAME["token_score"], BY_NAME["block_score"]
    given = labels.call(place, 2, 2, 4, 64, 16, 16, 6, 4, reduce, tensor_cores)
    given["q"] = (torch.sign(place.randn(2, 8, 64).float()) * top).to(place.dtype)
    stored = given["qparams"]
    stored.copy_(torch.where(stored.isnan(), stored, torch.sign(stored.float()).to(stored.dtype) * top))
    labels.check(place, given, labels.expected(given), reduce, tensor_cores)
    assert not (given["out"] == inf).any() and given["out"].isfinite().any()
    other = blocks.call(place, 2, 2, 4, 64, 7, reduce) | {"q": given["q"]}
    other["bounds"].copy_((torch.sign(place.randn(11, 2, 2, 64).float()) * top).to(place.dtype))
    blocks.check(place, other, blocks.expected(other), reduce)
    assert not other["out"].isnan().any() and not (other["out"] == inf).any()


# ---------------------------------------------------------------------- what scores are made of


def test_seal(place):
    """Bounds of a block with NaN are NaN in its channel; labels that float16 does not hold are held to its ends."""
    case = Seal(block_size=32, sealed=(3, 3))
    operator = BY_NAME["seal.seal"]
    given = operator.call(place, case)
    keys, index = given["recent_kv"][:, :, case.sinks :, : case.dk], given["index"]
    for i, value in enumerate(WILD):
        keys[0, :, 2 + 20 * (i % 2), 5 + i] = value
    keys[1, 0, 3], keys[1, 0, 6] = inf, -inf
    keys[1, 1, 20] = nan
    if place.dtype != torch.float16:
        keys[1, 0, 8:10] *= 1e6
        keys[1, 0, 10] = 1e30
    expected = operator.expected(given)
    operator.results(operator.functions[0], given)
    for got, want in zip(tensors(index), expected[-len(tensors(index)) :]):
        same(got, want)
    assert index.bounds.isnan().any()
    physical_id = int(given["block_table"][1, 3])
    assert index.qparams[physical_id, 0].isfinite().all()
    assert index.qparams[physical_id, 1, 20].isnan().all() and index.qparams[physical_id, 1, 21].isfinite().all()


def test_seal_by_hand():
    from hf_sparsekv.ops.storage.seal.reference import quantise_labels

    codes, params = quantise_labels(torch.tensor([[inf, 0.0], [-inf, 1.0], [1e9, -1e9], [nan, 1.0]]))
    assert params[:3].isfinite().all() and params[3].isnan().all()
    assert codes.flatten().tolist() == [15, 15 << 4, 15, 0]  # (the first label in the low four bits)


def test_channels_of_nan_come_last():
    stats = ChannelStats()
    keys = torch.arange(3.0)[None, None, :, None].repeat(1, 1, 1, 4)
    keys[..., 1], keys[0, 0, 0, 2] = 5 * keys[..., 1], nan
    stats.update(torch.ones(1, 1, 3, 4), keys, None)
    assert stats.ranking().tolist() == [[[1, 0, 3, 2]]]


def test_predicted_queries(place):
    """NaN and infinities before the last query are left out, in it they are the prediction's."""
    ring, position, count = list(BY_NAME["query_predict"].call(place, 1, 2, 17, 64, 16, 5).values())[:3]
    ring = ring[:1].repeat(4, 1, 1, 1)
    count, position = count[:1].repeat(4), position[:1].repeat(4)
    ring[0, 0, 1, 3], ring[1, 0, 4, 3], ring[2, 1, 2] = nan, nan, inf
    ring[3] = nan
    expected = reference_predict(ring.cpu(), position.cpu(), count.cpu(), 16, 1e-2)
    got = query_predict(ring, position, count, 16, 1e-2).cpu()
    assert torch.equal(got.isnan(), expected.isnan())
    place.close(got.nan_to_num(0.0), expected.nan_to_num(0.0), ratio=1e-2)
    assert torch.equal(got[0, 0].cpu(), ring[0, 0, 4].cpu())
    assert got[1, 0].isnan().any() and not got[1, 1].isnan().any()


# ---------------------------------------------------------------------- attention, experts


@pytest.mark.pairwise
@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("granularity", ["token", "block", "all"])
def test_attention_shows_nan(place, granularity, latents):
    """Attended NaN gives NaN for the rows and heads that attend to it, and for no others."""
    shape = {"latents": True, "heads": 1, "group": 5, "dk": 48, "dv": 32} if latents else {}
    rows = ((150, 144), (100, 96), (43, 32))
    args, named = Decode(batch=3, cap=9, chosen=9, rows=rows, **shape).make(place, granularity)
    args[0][1, 0, 3] = nan
    if granularity == "token":
        token = int(args[4][0, -1, 2])
    else:
        token = 8 * 16 + 5  # of the last block, which the first row alone reads
        args[4] = None if granularity == "all" else torch.arange(9).int().expand_as(args[4]).to(args[4])
    args[1][args[3][0, token // 16], -1, token % 16, 4] = nan
    expected = reference_decode(*(None if t is None else t.cpu() for t in args), **named)
    got = sparse_decode(*args, **named)
    assert torch.equal(got.isnan().cpu(), expected.isnan())
    place.close(got.nan_to_num(0.0), expected.nan_to_num(0.0))
    assert got[1, 0].isnan().all() and got[0, -1].isnan().all()
    assert got[2].isfinite().all() or granularity == "token"  # a row may share the block


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("shape", [(4, 64, 60, 4, 1, 1), (4, 100, 48, 6, 8, 4), (4, 33, 7, 7, 1, 1)], ids=str)
def test_experts(place32, shape, normalise):
    """NaN for some experts, and for all: distinct experts that there are."""
    tokens, d, count, k, groups, top_groups = shape
    x, weight, bias = place32.randn(tokens, d), place32.randn(count, d) / d**0.5, place32.rand(count)
    weight[1::3] = nan
    x[2], x[3, 3] = nan, inf
    bias[0] = -inf
    named = {"groups": groups, "top_groups": top_groups, "normalise": normalise, "scale": 1.8}
    want = reference_route(*(t.cpu() for t in (x, weight, bias)), k, **named)
    got = route(x, weight, bias, k, **named)
    assert torch.equal(got[2].cpu(), want[2])
    for one, other in zip(got[:2], want):
        same(one, other)
    index = got[2].cpu()
    assert ((index >= 0) & (index < count)).all()
    assert all(len(set(row)) == k for row in index.tolist())
    if count == 60:
        assert (index[:2] % 3 != 1).all(), "an expert that is NaN comes last"
