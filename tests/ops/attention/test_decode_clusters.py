"""Attention over chosen tokens by clusters of thread blocks (CUDA C++) against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_cases import RATIO, Case, check, config_of, expect, in_codes, in_pages
from places import Place

from hf_sparsekv.ops.attention.sparse_decode import triton as launches
from hf_sparsekv.ops.attention.sparse_decode.triton import sparse_decode

pytestmark = pytest.mark.gpu

PLAIN = Case(span=2)
LONG = Case(batch=1, heads=1, cap=80, chosen=40, ring=70, span=1)
CASES = {
    "usual": PLAIN,
    "a head each": Case(group=1, dk=128, dv=128, block_size=64, cap=3, chosen=2, heads=1, span=1),
    "eight heads": Case(group=8, dk=128, dv=128, span=4, cap=9, chosen=5, heads=1),
    "five heads": Case(group=5, learned_sink=True),
    "no sinks": Case(sinks=0, ring=40, block_size=32),
    "more sinks than tokens": Case(batch=3, sinks=40, rows=((125, 112), (20, 16), (0, 0)), span=2),
    "long and short": Case(heads=1, cap=18, chosen=9, batch=3, rows=((300, 288), (3, 0), (33, 32)), span=1),
    "nothing chosen": Case(chosen=0, span=1),
    "nothing cached": Case(chosen=0, cap=0, span=2),
    "learned sinks alone": Case(learned_sink=True, rows=((0, 0), (9, 0)), span=1),
    "many tiles": replace(LONG, group=2),
    "many chosen": replace(LONG, chosen=60),
}


def wild(what: str, args: list, named: dict) -> tuple[list, dict]:
    """Something that is read is no number, or far from all others."""
    q, kv, recent_kv = args[0], args[1], args[5]
    if what == "a key":
        recent_kv[0, 0, 0, 3] = torch.nan
    elif what == "a value":
        recent_kv[0, 0, 0, q.shape[2] + 3] = torch.nan
    elif what == "an infinite key":
        recent_kv[0, 0, 0, : q.shape[2]] = torch.inf
    elif what == "an infinite query":
        q[1, 5, 0] = torch.inf  # nothing of weight is left
        for t in (kv, recent_kv, named["means"]):
            t[..., 0] = -1
    elif what == "a query":
        q[1, 5] = torch.nan
    else:
        named["scale"] = 100.0
    args[1] = kv
    return args, named


@pytest.fixture(params=[None, 1, 2, 8])
def cut(request, monkeypatch):
    """How the kernel is cut; a test that took another kernel would show nothing."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU has no clusters")

    def attend(*args, **named):
        assert attended(*args, **named), "Triton's kernel would serve"
        return True

    attended = launches.attend_clusters
    monkeypatch.setattr(launches, "attend_clusters", attend)
    return {"clusters": request.param}


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def place16(request) -> Place:
    return Place("cuda", request.param)


WILD = ("a key", "a value", "an infinite key", "a query", "an infinite query", "large logits")
# Large logits of codes are other ones: the definition rounds keys.
WILD = [(False, what) for what in WILD] + [(True, what) for what in WILD[:-1]]
CODED = pytest.mark.parametrize("coded", [False, True], ids=["16 bits", "codes"])


@CODED
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_reference(place16, case, coded, cut):
    check(place16, case, "token", coded=coded, **cut)


@CODED
@pytest.mark.parametrize("case", [LONG, PLAIN, CASES["eight heads"]], ids=["long", "usual", "eight heads"])
def test_pages(place16, case, coded, cut):
    args, named = in_pages(place16, *case.make(place16, "token"))
    if coded:
        args, named = in_codes(args, named)
    expected, want_attended = expect(args, named)
    attended = torch.full_like(want_attended, 1000, device="cuda")
    config = config_of(args, named, **cut)
    place16.close(sparse_decode(*args, **named, attended=attended, config=config), expected, ratio=RATIO[place16.dtype])
    assert torch.equal(attended.cpu(), want_attended)


@pytest.mark.parametrize("coded, what", WILD)
def test_not_finite(place16, cut, what, coded):
    args, named = wild(what, *PLAIN.make(place16, "token"))
    if coded:
        args, named = in_codes(args, named)
    got = sparse_decode(*args, **named, config=config_of(args, named, **cut)).cpu()
    expected = expect(args, named)[0]
    assert torch.equal(got.isnan(), expected.isnan())
    place16.close(got.nan_to_num(), expected.nan_to_num(), ratio=RATIO[place16.dtype])


@pytest.mark.parametrize("what", ["a stored key", "a stored value"])
def test_codes_of_what_is_no_number(place16, cut, what):
    """Their scale is not."""
    args, named = PLAIN.make(place16, "token")
    token = int(args[4][0, 0, 2])
    args[1][args[3][0, token // 16], 0, token % 16, 3 if what == "a stored key" else args[0].shape[2] + 3] = torch.nan
    args, named = in_codes(args, named)
    got = sparse_decode(*args, **named, config=config_of(args, named, **cut)).cpu()
    expected = expect(args, named)[0]
    assert expected.isnan().any() and torch.equal(got.isnan(), expected.isnan())
    place16.close(got.nan_to_num(), expected.nan_to_num(), ratio=RATIO[place16.dtype])


@CODED
@pytest.mark.parametrize("batch, chosen", [(1, 24), (1, 80), (8, 24), (33, 24)])
@pytest.mark.parametrize("group, heads", [(4, 8), (8, 2)])
def test_many_tokens(place16, batch, chosen, group, heads, coded, cut):
    """As many as a step attends to, of long rows, again and again over memory that is in use; and more than a block's
    threads read at once, to count them."""
    shape = {"group": group, "dk": 128, "dv": 128, "block_size": 64, "ring": 80, "span": 4}
    case = Case(batch=batch, heads=heads, cap=chosen * 5 // 3, chosen=chosen, **shape)
    args, named = case.make(place16, "token")
    if coded:
        args, named = in_codes(args, named)
    expected, config = expect(args, named)[0], config_of(args, named, **cut)
    first = sparse_decode(*args, **named, config=config)
    place16.close(first, expected, ratio=RATIO[place16.dtype])
    for _ in range(20):
        assert torch.equal(sparse_decode(*args, **named, config=config), first)
