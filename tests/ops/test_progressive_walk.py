"""Progressive attention: the definition against Algorithm 1 written line by line, the kernels against it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from walk_cases import Case, algorithm_1, on_cpu

from hf_sparsekv.ops.progressive import (
    BINS,
    MASS_ONE,
    TOTALS,
    Walk,
    WalkState,
    block_masses,
    progressive_decode,
    reference,
)
from hf_sparsekv.ops.progressive import triton as kernels

CASES = {
    "usual": Case(),
    "one block": Case(n=1, batch=1),
    "no blocks": Case(n=0),
    "low": Case(threshold=0.5, spread=4.0),
    "high": Case(threshold=0.98, spread=3.0, n=37),
    "everything": Case(threshold=1.0, n=9),
    "sum": Case(group_reduce="sum", spread=3.0, group=3),
    "capped": Case(max_blocks=5, threshold=0.99),
    "at least": Case(min_blocks=15, threshold=0.5),
    "few": Case(threshold=0.6, spread=4.0, min_blocks=4, max_blocks=9, learned_sink=True),
    "sum with a sink": Case(spread=2.0, group_reduce="sum", group=3, learned_sink=True, threshold=0.7),
    "softcap": Case(softcap=2.0),
    "learned sink": Case(learned_sink=True, spread=1.0),
    "odd": Case(batch=3, heads=1, group=3, dk=80, dv=48, block_size=32, n=11, sinks=0, ring=7),
    "one head": Case(heads=1, group=1, batch=1, dk=32, dv=32, spread=4.0),
    "in frames": Case(paged=True),
    "reads ahead": Case(first=100),
    "latents": Case(latents=True, heads=1, group=20, dk=48, dv=32),
    "latents in frames": Case(latents=True, heads=1, group=5, dk=57, dv=40, paged=True, batch=3, spread=4.0),
    "many heads": Case(latents=True, heads=1, group=40, dk=80, dv=64, block_size=32, n=11, batch=1),
    "latents, all of it": Case(latents=True, heads=1, softcap=2.0, learned_sink=True, group_reduce="sum", max_blocks=9),
    "GLM-4.7-Flash": Case(latents=True, heads=1, group=20, dk=576, dv=512, batch=1, block_size=64, n=4),
    "huge logits": Case(spread=60.0, threshold=0.99),
    "paper": Case(estimate="as_min"),
    "paper, high": Case(estimate="as_min", threshold=0.98, spread=3.0, n=37),
    "paper's sum": Case(estimate="as_min", group_reduce="sum", spread=3.0, learned_sink=True),
    "paper, capped": Case(estimate="as_min", max_blocks=5, threshold=0.99, min_blocks=4),
    "paper, no blocks": Case(estimate="as_min", n=0),
    "paper, latents": Case(estimate="as_min", latents=True, heads=1, group=40, dk=80, dv=64, softcap=2.0, paged=True),
    "bound": Case(estimate="bound", spread=5.0),
    "bound of a sum": Case(estimate="bound", spread=5.0, group_reduce="sum", max_blocks=15),
    "bound of capped logits": Case(softcap=5.0, estimate="bound", spread=4.0),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@EVERY
def test_against_algorithm_1(place32, case):
    """The reference without a GPU, the kernels on one."""
    given = case.make(place32)
    walk = case.walk(place32, given)
    got = progressive_decode(walk)
    out, used, mass = algorithm_1(case, given)
    assert torch.equal(walk.state.used.cpu(), used)
    torch.testing.assert_close(walk.state.mass.cpu(), mass, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.cpu(), out.float(), rtol=1e-4, atol=1e-5)
    check_counts(walk, given, case)


def check_counts(walk: Walk, given: dict, case: Case) -> None:
    used = walk.state.used.cpu()
    tokens, near = given["tokens"].cpu(), given["recent_valid"].cpu()
    totals = dict(zip(TOTALS, walk.state.totals.tolist()))
    histogram = walk.state.totals[len(TOTALS) :].tolist()
    assert totals["walks"] == used.numel() == sum(histogram)
    assert totals["used"] == used.sum()
    assert totals["read"] >= totals["used"]
    for i, n in enumerate(histogram):
        low, high = (0, 1) if i == 0 else (2 ** (i - 1) + 1, 2**i)
        assert n == ((used >= low) & (used <= high)).sum(), i
    assert len(histogram) == BINS
    mass = walk.state.mass.cpu().double()
    assert totals["mass"] == pytest.approx(float(mass.sum()) * MASS_ONE, rel=1e-6)
    assert totals["worst"] == pytest.approx(float(1 - mass.min()) * MASS_ONE, rel=1e-6, abs=64)
    live = (tokens > 0).sum(-1)
    assert totals["capped"] == ((used < live) & (mass <= case.threshold)).sum()
    expected = near.sum(1)[:, None] + torch.stack(
        [tokens[i, j, : used[i, j]].sum() for i in range(case.batch) for j in range(case.heads)]
    ).view(case.batch, case.heads)
    assert torch.equal(walk.attended.cpu(), expected)
    ahead = walk.state.limits[1].cpu()
    assert not walk.state.limits[0].any()
    assert (ahead >= (used + used // 8 + 8).clamp_max(case.max_blocks or 1000)).all()
    ids = torch.nn.functional.pad(given["ids"].cpu(), (0, 9), value=-1)[..., :9]
    expected = ids.masked_fill(torch.arange(9) >= ahead[..., None], -1)
    assert torch.equal(walk.state.chosen.cpu(), expected)


@pytest.mark.parametrize("rounds, first", [(2, 1), (3, 1), (9, 1), (2, 7), (3, 500)])
@pytest.mark.parametrize(
    "name", ["usual", "high", "sum", "bound", "capped", "everything", "odd", "paper, high", "paper's sum", "latents"]
)
def test_rounds_do_not_show(place32, name, rounds, first):
    case = CASES[name]
    given = case.make(place32)
    expected = case.walk(place32, given)
    whole = progressive_decode(expected)
    case = replace(case, first=first)
    walk = case.walk(place32, given)
    got = progressive_decode(walk, rounds=rounds)
    assert torch.equal(walk.state.used, expected.state.used)
    torch.testing.assert_close(walk.state.mass, expected.state.mass, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-6)


def test_the_bound_holds(place32):
    """With bounds on what is left the true share is at least the threshold."""
    case = Case(estimate="bound", spread=5.0, n=40, threshold=0.9)
    walk = case.walk(place32, case.make(place32))
    progressive_decode(walk)
    masses = block_masses(walk).exp2()
    taken = torch.arange(masses.shape[2], device=masses.device) < walk.state.used[..., None] + walk.parts
    true = (masses * taken[..., None]).sum(2) / masses.sum(2)
    assert (true.amin(-1) > 0.9).all()
    assert (walk.state.used < (walk.tokens > 0).sum(-1)).any()


def test_rounds_are_checked(place32):
    case = Case()
    with pytest.raises(ValueError, match="at least 2"):
        progressive_decode(case.walk(place32, case.make(place32)), rounds=1)


# ---------------------------------------------------------------------- kernels


def both(place, case: Case, **how) -> tuple[Walk, Walk, torch.Tensor, torch.Tensor]:
    """The same rounds of the same walk by the references, on the CPU, and by the kernels."""
    given = case.make(place)
    want = case.walk(Place32("cpu"), on_cpu(given))
    got = case.walk(place, given)
    want.operators = reference
    got.operators = SimpleNamespace(
        attend=partial(kernels.attend, programs=7, **{k: v for k, v in how.items() if k == "tile"}),
        expect=partial(kernels.expect, **{k: v for k, v in how.items() if k == "masses"}),
        verify=partial(kernels.verify, **{k: v for k, v in how.items() if k == "masses"}),
        merge=kernels.merge,
        attend_used=kernels.attend_used,
    )
    for walk in (want, got):
        if walk.acc is not None:
            walk.acc.fill_(torch.nan)
        walk.lse.fill_(torch.nan)
    return want, got, progressive_decode(want), progressive_decode(got)


class Place32:
    """Enough of a place to make a state on."""

    def __init__(self, device: str) -> None:
        self.device = device


@EVERY
def test_kernels_against_references(place, case):
    want, got, expected, found = both(place, case)
    assert torch.equal(got.state.used.cpu(), want.state.used)
    for name in ("limits", "chosen"):
        assert torch.equal(getattr(got.state, name).cpu(), getattr(want.state, name)), name
    torch.testing.assert_close(got.state.mass.cpu(), want.state.mass, rtol=1e-4, atol=1e-5)
    place.close(found, expected)
    for name in ("attended", "from_host"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
    totals, others = got.state.totals.cpu(), want.state.totals
    exact = [i for i in range(len(totals)) if i not in (4, 5)]
    assert torch.equal(totals[exact], others[exact])
    assert torch.allclose(totals[4:6].double(), others[4:6].double(), rtol=1e-4, atol=1e-4 * MASS_ONE)


@pytest.mark.parametrize("name", ["usual", "high", "sum", "capped", "learned sink", "sum with a sink", "huge logits"])
def test_chunks_of_a_walk(place32, name):
    """More blocks than the verifier holds at a time; recent buffer and blocks in several tiles."""
    case = replace(CASES[name], block_size=32, n=70, batch=1)
    want, got, expected, found = both(place32, case, masses=64, tile=16)
    assert torch.equal(got.state.used.cpu(), want.state.used)
    torch.testing.assert_close(got.state.mass.cpu(), want.state.mass, rtol=1e-4, atol=1e-5)
    place32.close(found, expected, ratio=5e-6)


@pytest.mark.parametrize("name", ["usual", "sum", "few", "many heads"])
def test_what_a_verification_takes_at_a_time_does_not_show(place32, name):
    """Near parts and blocks in one tile or in many, of which some have near parts alone."""
    case = replace(CASES[name], n=70, batch=1, ring=300, first=40)
    walk = case.walk(place32, case.make(place32))
    block_masses(walk)
    walk.operators = kernels
    walk.expect()
    found = []
    for ahead, warps in ((16, 1), (32, 1), (64, 2), (128, 4), (256, 2)):
        walk.state = case.state(place32)
        for i in range(3):
            walk.verify(last=i == 2, certain=i > 0, ahead=ahead, warps=warps)
            found.append((walk.state.limits.clone(), walk.state.used.clone(), walk.state.mass.clone()))
    for i, (limits, used, mass) in enumerate(found[3:]):
        assert torch.equal(limits, found[i % 3][0])
        assert torch.equal(used, found[i % 3][1])
        torch.testing.assert_close(mass, found[i % 3][2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masses", [16, 4096])
@pytest.mark.parametrize("name", ["usual", "sum", "no blocks"])
def test_expectations(place32, name, masses):
    case = CASES[name]
    given = case.make(place32)
    walk = case.walk(place32, given)
    named = {"logit_scale": walk.logit_scale, "group_reduce": walk.group_reduce}
    got = kernels.expect(walk.logits, walk.ids, walk.tokens, masses=masses, **named)
    want = reference.expect(walk.logits.cpu(), walk.ids.cpu(), walk.tokens.cpu(), **named)
    for mine, expected in zip(got, want):
        torch.testing.assert_close(mine.cpu(), expected, rtol=1e-5, atol=1e-4)


def far_apart(place: Place32, n: int) -> dict[str, torch.Tensor]:
    """One block whose bound is beyond what floats relative to it can hold of the others, and a hole."""
    tokens = torch.full((1, 2, n), 16, dtype=torch.int32)
    tokens[0, 1, -1] = 0
    logits = torch.linspace(10, 8, n).repeat(1, 4, 1)
    logits[..., 0], logits[0, 3, 0], logits[0, 2, 1:] = 130.0, 600.0, -200.0
    ids = torch.arange(n, dtype=torch.int32).repeat(1, 2, 1)
    return {name: t.to(place.device) for name, t in (("logits", logits), ("ids", ids), ("tokens", tokens))}


def test_a_bound_that_was_far_too_high_hides_nothing(place32):
    """What is behind it may be all there is: a walk that goes by bounds reads on."""
    given = far_apart(place32, 4)
    lse = torch.tensor([0.0, 0.0, 13.0, 12.0, 11.0], device=place32.device)[:, None].expand(1, 2, 5, 2).contiguous()
    expected, behind, live = reference.expect(**given)
    state = WalkState.empty(1, 2, place32.device)
    state.limits[1] = 1
    made = {"expected": expected, "behind": behind, "live": live}
    named = {"parts": 1, "threshold": 0.98, "last": False, "estimate": "bound"}
    reference.verify(lse, given["tokens"], state, **named, **made)
    assert (state.limits[1] > 1).all(), "nothing was left to find, says a bound that has taken all the room"


def test_the_papers_estimates_have_no_kernel(place32):
    for name, verifier in (("usual", kernels), ("paper", reference), ("bound", reference)):
        walk = CASES[name].walk(place32, CASES[name].make(place32))
        walk.operators = kernels
        assert walk.verifier is verifier
    expected, behind, live = kernels.expect(walk.logits, walk.ids, walk.tokens)
    made = {"expected": expected, "behind": behind, "live": live}
    with pytest.raises(ValueError, match="only estimate='scores' has a kernel, got 'bound'"):
        kernels.verify(walk.lse, walk.tokens, walk.state, parts=walk.parts, threshold=0.9, estimate="bound", **made)
