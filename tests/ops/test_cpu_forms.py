"""Forms for decode steps on a CPU give the definitions' results, or hand the call to them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from decode_cases import Case
from operators import BY_NAME
from places import Place
from test_mass_select import CASES as MASSES

from hf_sparsekv.ops.attention.sparse_decode import cpu as decode_cpu
from hf_sparsekv.ops.attention.sparse_decode import reference as decode_reference
from hf_sparsekv.ops.selection.mass_select import NONE, TOTALS
from hf_sparsekv.ops.selection.mass_select import cpu as mass_cpu
from hf_sparsekv.ops.selection.mass_select import reference as mass_reference
from hf_sparsekv.ops.selection.mass_select.reference import LENGTHS
from hf_sparsekv.ops.selection.token_score import cpu as score_cpu
from hf_sparsekv.ops.selection.token_score import reference as score_reference
from hf_sparsekv.ops.selection.topk_select import cpu as select_cpu
from hf_sparsekv.ops.selection.topk_select import reference as select_reference
from hf_sparsekv.ops.storage.append import append
from hf_sparsekv.ops.storage.append import cpu as append_cpu
from hf_sparsekv.ops.storage.append import reference as append_reference

close = {"rtol": 2e-5, "atol": 2e-5, "equal_nan": True}


@pytest.fixture
def definitions(monkeypatch):
    """Counts how often a call was handed to the definition."""
    calls = []
    for module, name in (
        (score_reference, "token_score"),
        (select_reference, "token_select"),
        (decode_reference, "sparse_decode"),
    ):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=function, **k: calls.append(f) or f(*a, **k))
    return calls


def row(blocks: list[int], length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[length, len(blocks) * size]]).int(), torch.tensor([blocks]).int()


BLOCKS = {"in a row": [2, 3, 4, 5, 6], "scattered": [4, 0, 6, 1, 2], "one": [3]}
blocks_of = pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())


@pytest.mark.few
@pytest.mark.parametrize("first", [False, True], ids=["", "one row"])
@pytest.mark.parametrize("case", MASSES.values(), ids=MASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mass_select(case, dtype, first):
    args, named = case.make(Place("cpu", dtype))
    if first:
        args = tuple(t[:1] for t in args)
        named["stored"] = None if named["stored"] is None else named["stored"][:1]
    n, lists = args[0].shape[-1], args[3].shape[:2]
    totals = torch.zeros(2, len(TOTALS) + LENGTHS, dtype=torch.int64)
    want = mass_reference.mass_select(*args, **named)
    kept = torch.full((*lists, n), 7, dtype=torch.int32), torch.full(lists, 7, dtype=torch.int32)
    for out in (None, kept):
        totals[1] = 0
        got = mass_cpu.mass_select(*args, **named, totals=totals[1], out=out)
        assert torch.equal(got.bins == NONE, want.bins == NONE)
        away = (got.bins.int() - want.bins.int()).abs()
        assert not away.numel() or (away.max() <= 1 and (away > 0).float().mean() < 0.01)  # on the border of two bins
        limits = {name: named[name] for name in ("threshold", "min_tokens", "max_tokens")}
        taken, count, mass, cut, capped = mass_reference.take(got.bins, **limits)
        assert torch.equal(got.count, count) and torch.equal(got.cut, cut)
        torch.testing.assert_close(got.mass, mass, rtol=1e-5, atol=1e-6)
        for one, these in zip(got.ids.flatten(0, 1), taken.flatten(0, 1)):
            assert torch.equal(one[: int(these.sum())], these.nonzero()[:, 0].int())
        added = torch.zeros_like(totals[0])
        mass_reference.add_up(added, args[4], count, mass, capped)
        assert torch.equal(added[:3], totals[1, :3]) and torch.equal(added[5:], totals[1, 5:])
    assert got.ids is kept[0] and got.count is kept[1]


@blocks_of
@pytest.mark.parametrize("reduce", ["mean", "max", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_token_score_of_one_row(definitions, blocks, reduce, dtype):
    rows, table = row(blocks, 200, 16)
    q = torch.randn(1, 6, 24).to(dtype)
    codes = torch.randint(0, 256, (8, 2, 16, 5), dtype=torch.uint8)
    qparams, norms = torch.randn(8, 2, 16, 2).half(), torch.rand(1, 2, 2, 10) + 0.1
    channels = torch.stack([torch.randperm(24)[:10] for _ in range(2)])[None].int()
    given = q, codes, qparams, channels, rows, table, None, reduce
    got = score_cpu.token_score(*given, sinks=4, norms=norms, fill=False)
    assert not definitions
    torch.testing.assert_close(got, score_reference.token_score(*given, sinks=4, norms=norms), **close)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_token_score_that_is_not_finite(value, reduce):
    rows, table = row([1, 0], 50, 16)
    q, codes = torch.randn(1, 4, 8), torch.randint(0, 256, (2, 2, 16, 2), dtype=torch.uint8)
    qparams, named = torch.randn(2, 2, 16, 2).half(), {"sinks": 2, "norms": torch.rand(1, 2, 2, 4) + 0.1}
    qparams[0, 1, 3, 1] = value
    channels = torch.arange(4).int().expand(1, 2, -1)
    q[0, 0, 1] = value
    given = q, codes, qparams, channels, rows, table, None, reduce
    expected = score_reference.token_score(*given, **named)
    torch.testing.assert_close(score_cpu.token_score(*given, **named), expected, **close)


@pytest.mark.parametrize("n", [5, 64, 700])
def test_token_select(n):
    """Distinct scores, ties at the border, too few, NaN in one head and a tie in the other."""
    scores = torch.randn(4, 2, n)
    scores[1] = torch.randint(0, 3, (2, n)).float()
    scores[2, 0, 2:] = -math.inf
    scores[3, 0, 1] = math.nan
    scores[3, 1] = scores[3, 1].round()
    rows = torch.tensor([[900, 896]] * 4).int()
    for k in {1, 2, n // 2, n - 1, n, n + 3}:
        for some in (scores, *scores.split(1)):
            for given in (None, rows[: len(some)], torch.tensor([[n, n // 2]] * len(some)).int()):
                got = select_cpu.token_select(some, None, k, 1, rows=given)
                assert torch.equal(got, select_reference.token_select(some, None, k, 1, rows=given))


def test_token_select_does_not_sort(definitions):
    select_cpu.token_select(torch.randn(1, 3, 900), None, 100, 16)
    assert not definitions


@pytest.mark.pairwise(once=("needed", "tokens"))
@blocks_of
@pytest.mark.parametrize("needed", [None, (7, 2), (0, 20), (0, 0), (9999, 1)], ids=str)
@pytest.mark.parametrize("tokens", [32, None, "all"], ids=["means", "tokens", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("extra", [{}, {"softcap": 3.0}, {"sink_logits": True}, {"latents": True}], ids=str)
def test_attention_of_one_row(definitions, blocks, tokens, dtype, extra, needed):
    """NaN in all that may not be read: entries of the ring, other blocks, sinks in blocks, means of nothing."""
    heads, group, dk, dv, size, sinks, ring = 2, 3, 24, 16, 16, 4, 37
    latents, extra = extra.get("latents", False), {k: v for k, v in extra.items() if k != "latents"}
    width = dk if latents else dk + dv
    sealed = len(blocks) * size
    rows, table = row(blocks, sealed + 21, size)
    kv, recent = torch.full((8, heads, size, width), math.nan), torch.full((1, heads, sinks + ring, width), math.nan)
    kv[blocks] = torch.randn(len(blocks), heads, size, width)
    recent[:, :, :sinks] = torch.randn(1, heads, sinks, width)
    recent[:, :, sinks + torch.arange(sealed, sealed + 21) % ring] = torch.randn(1, heads, 21, width)
    means = torch.randn(8, heads, width)
    if extra:
        extra = {name: torch.randn(heads * group) if value is True else value for name, value in extra.items()}
    ids = None
    if tokens != "all":
        kv[blocks[0], :, :sinks] = math.nan
        ids = [torch.randperm(sealed - sinks)[: sealed // 2].sort().values + sinks for _ in range(heads)]
        ids = torch.stack(ids)[None].int()
    if tokens == 32:
        extra |= {"means": means.to(dtype), "mean_tokens": 32}
    if needed is not None and tokens != "all":
        extra["used"] = torch.tensor([needed]).int()
        ids[torch.arange(ids.shape[-1]) >= extra["used"][..., None]] = 1 << 20  # as nothing was written there
    q = torch.randn(1, heads * group, dk).to(dtype)
    given = q, kv.to(dtype), rows, table, ids, recent.to(dtype)
    named = {"granularity": "all" if ids is None else "token", "value_dim": dv, "sinks": sinks, "scale": 0.2, **extra}
    counts = torch.zeros(2, 1, heads, dtype=torch.int64)
    got = decode_cpu.sparse_decode(*given, attended=counts[0], **named)
    assert not definitions and got.dtype == dtype
    expected = decode_reference.sparse_decode(*given, attended=counts[1], **named)
    assert torch.equal(*counts) and not expected.isnan().any()
    torch.testing.assert_close(got, expected, **(close if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.01}))


@pytest.mark.parametrize("granularity", ["token", "block", "all"])
@pytest.mark.parametrize("batch", [1, 3])
def test_attention_in_other_ways(place32, granularity, batch):
    """Tables with holes, empty rows, lists that are padded, several rows: as the definition has it."""
    if place32.device != "cpu":
        pytest.skip("of tensors on a CPU")
    for case in (Case(batch=batch), Case(batch=batch, softcap=5.0), Case(batch=batch, cap=0, chosen=0)):
        args, named = replace(case, span=2 if granularity == "token" else None).make(place32, granularity)
        got, expected = (m.sparse_decode(*args, **named) for m in (decode_cpu, decode_reference))
        torch.testing.assert_close(got, expected, **close)


@pytest.mark.parametrize("case", BY_NAME["append"].cases)
def test_append_in_all_ways(place32, case):
    operator = BY_NAME["append"]
    if place32.device != "cpu":
        pytest.skip("of tensors on a CPU")
    given = operator.call(place32, *operator.cases[case])
    expected = operator.expected(given)
    for one, other in zip(operator.results(append_cpu.append, given), expected):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("past", [0, 12, 13, 500])
def test_append_one_token(past):
    k, v = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 3)
    rings = torch.zeros(2, 1, 2, 4 + 13, 7)
    table = torch.tensor([[past, 0]]).int()
    append(k, v, None, rings[0], table[:, 0], 4)
    append_reference.append(k, v, None, rings[1], table[:, 0], 4)
    assert torch.equal(*rings)


@pytest.mark.parametrize("length", [1, 21, 60])
def test_attention_of_a_row_without_blocks(definitions, length):
    """A short prompt: everything is in the ring."""
    rows, table = row([], length, 16)
    recent = torch.full((1, 2, 4 + 64, 16), math.nan)
    recent[:, :, 4 : 4 + length] = torch.randn(1, 2, length, 16)
    given = torch.randn(1, 6, 8), torch.randn(3, 2, 16, 16), rows, table, None, recent
    named = {"granularity": "all", "value_dim": 8, "sinks": 4, "scale": 0.3}
    got = decode_cpu.sparse_decode(*given, **named)
    assert not definitions
    torch.testing.assert_close(got, decode_reference.sparse_decode(*given, **named), **close)


def test_labels_are_made_anew_once_codes_were_written():
    rows, table = row([1, 0, 2], 60, 16)
    q, codes = torch.randn(1, 4, 8), torch.randint(0, 256, (4, 2, 16, 2), dtype=torch.uint8)
    qparams, channels = torch.randn(4, 2, 16, 2).half(), torch.arange(4).int().expand(1, 2, -1)
    given, named = (q, codes, qparams, channels, rows, table, None, "max"), {"sinks": 2}
    named["norms"] = torch.rand(1, 2, 2, 4) + 0.1
    for change in (lambda: None, lambda: codes[2].fill_(7), lambda: qparams[:1].zero_()):
        change()
        for _ in range(2):
            got = score_cpu.token_score(*given, **named)
            torch.testing.assert_close(got, score_reference.token_score(*given, **named), **close)
