"""Progressive attention: the definition against Algorithm 1 written line by line, the kernels against it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

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

UNREADABLE = math.nan


@dataclass
class Case:
    """Shapes of one call, and what else is asked of it."""

    batch: int = 2
    heads: int = 2
    group: int = 4
    dk: int = 64
    dv: int = 64
    block_size: int = 16
    n: int = 23  # blocks a row
    sinks: int = 4
    ring: int = 29
    spread: float = 2.0  # of the logits: how peaked the attention is
    threshold: float = 0.9
    group_reduce: str = "all"
    min_blocks: int = 1
    max_blocks: int | None = None
    estimate: str = "as_min"
    softcap: float | None = None
    learned_sink: bool = False
    placed: bool = False
    first: int = 3  # blocks of the first round

    def make(self, place) -> dict:
        """Arguments by name: rows share blocks, some are missing or hold padding; NaN in all that may not be read."""
        all_slots, width = self.n + 2, self.dk + self.dv
        flags = place.randint(0, 8, all_slots, self.block_size, dtype=torch.uint8).clamp_max(1)
        flags[0] = 3
        fill = (flags == 1).sum(-1, dtype=torch.int32)
        kv = place.randn(all_slots, self.heads, self.block_size, width)
        kv[..., : self.dk] *= self.spread
        kv = torch.where((flags == 1)[:, None, :, None], kv, UNREADABLE)
        slots = torch.stack([place.randperm(all_slots)[: self.n] for _ in range(self.batch)])
        slots = slots.masked_fill(place.rand(self.batch, self.n) < 0.1, -1)
        near_valid = place.rand(self.batch, self.sinks + self.ring) > 0.3
        near_kv = place.randn(self.batch, self.heads, self.sinks + self.ring, width)
        near_kv = torch.where(near_valid[:, None, :, None], near_kv, UNREADABLE)
        q = place.randn(self.batch, self.heads * self.group, self.dk)
        ids, tokens = self.rank(place, fill, slots)
        given = {
            "q": q,
            "kv": kv,
            "flags": flags,
            "slots": slots,
            "ids": ids,
            "tokens": tokens,
            "near_kv": near_kv,
            "near_valid": near_valid,
            "value_dim": self.dv,
            "scale": self.dk**-0.5,
            "threshold": self.threshold,
            "group_reduce": self.group_reduce,
            "min_blocks": self.min_blocks,
            "max_blocks": self.max_blocks,
            "softcap": self.softcap,
            "sink_logits": place.randn(self.heads * self.group) if self.learned_sink else None,
            "estimate": self.estimate,
            "logits": None if self.estimate == "as_min" else self.logits(place, q, kv, flags, slots),
            "logit_scale": 2.0,
        }
        if self.placed:
            given |= self.in_frames(place, kv, slots, ids)
        return given

    def rank(self, place, fill, slots):
        """Random orders of the blocks that have tokens."""
        ids = torch.full((self.batch, self.heads, self.n), -1, dtype=torch.int32, device=place.device)
        tokens = torch.zeros_like(ids)
        for row in range(self.batch):
            at = slots[row].clamp_min(0).long()
            live = ((slots[row] >= 0) & (fill[at] > 0)).nonzero().flatten()
            for head in range(self.heads):
                mixed = live[place.randperm(len(live)).long()]
                ids[row, head, : len(live)] = mixed.int()
                tokens[row, head, : len(live)] = fill[slots[row, mixed].long()]
        return ids, tokens

    def logits(self, place, q, kv, flags, slots):
        """Halves of the largest logit of each block, and a little more or noise; anything where there is none."""
        keys = torch.where((flags == 1)[:, None, :, None], kv[..., : self.dk].float(), 0.0)
        q = q.float().view(self.batch, self.heads, self.group, self.dk)
        logits = torch.einsum("bhgd,bnhtd->bhgnt", q, keys[slots.clamp_min(0).long()]) * self.dk**-0.5
        usable = (flags == 1)[slots.clamp_min(0).long()][:, None, None]
        best = logits.masked_fill(~usable, -1e4).amax(-1)
        best = self.softcap * torch.tanh(best / self.softcap) if self.softcap else best
        best = best + (0.2 if self.estimate == "bound" else place.randn(*best.shape).float())
        return best.flatten(1, 2).contiguous() / 2

    def in_frames(self, place, kv, slots, ids):
        """Some blocks in frames in any order, the others by the place of their slot."""
        count = kv.shape[0] * self.heads
        frame_of = (place.randperm(count) * 2).view(kv.shape[0], self.heads)
        frames = place.nan(2 * count, self.block_size, kv.shape[-1])
        frames[frame_of.flatten().long()] = kv.flatten(0, 1)
        home = place.rand(kv.shape[0], self.heads) < 0.4
        slot = slots[:, None].expand(-1, self.heads, -1).gather(-1, ids.clamp_min(0).long())
        head = torch.arange(self.heads, device=kv.device)[None, :, None]
        at = slot.clamp_min(0).long(), head
        places = torch.where(home[at], -(slot + 2), frame_of[at])
        kv = torch.where(home[..., None, None], kv, UNREADABLE)
        return {"frames": frames, "places": torch.where(ids < 0, -1, places).int(), "kv": kv}

    def state(self, place) -> WalkState:
        state = WalkState.empty(self.batch, self.heads, place.device, chosen=9)
        state.limits[1] = self.first
        return state

    def walk(self, place, given: dict, **changes) -> Walk:
        batch, heads = self.batch, self.heads
        counts = {
            name: torch.zeros(batch, heads, dtype=torch.int64, device=given["q"].device)
            for name in ("attended", "from_host")
        }
        return Walk(**{**given, "state": self.state(place), **counts, **changes})


def on_cpu(given: dict) -> dict:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def algorithm_1(case: Case, given: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PSA's Algorithm 1, a block at a time: the output, the blocks used, and the share at which each head stopped."""
    g = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in on_cpu(given).items()
    }
    batch, heads, group, dk = case.batch, case.heads, case.group, case.dk
    out = torch.zeros(batch, heads * group, case.dv, dtype=torch.float64)
    used = torch.zeros(batch, heads, dtype=torch.int32)
    mass = torch.ones(batch, heads)

    def attention(q, k, v):  # O and AS
        logits = k @ q * g["scale"]
        if case.softcap:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        weight = logits.exp()
        return weight @ v / weight.sum(), weight.sum()

    for row in range(batch):
        for head in range(heads):
            order = [b for b in g["ids"][row, head].tolist() if b >= 0]
            counts = dict(zip(order, g["tokens"][row, head].tolist()))
            queries = g["q"][row, head * group : (head + 1) * group]
            o_acc, as_acc, as_min = [], [], [math.inf] * group
            for i, q in enumerate(queries):
                seen = g["near_kv"][row, head][g["near_valid"][row]]
                o, as_ = attention(q, seen[:, :dk], seen[:, dk:]) if len(seen) else (torch.zeros(case.dv), 0.0)
                if case.learned_sink:
                    sink = g["sink_logits"][head * group + i].exp()
                    o, as_ = o * as_ / (as_ + sink), as_ + sink
                o_acc.append(o)
                as_acc.append(as_)
            left, sum_min = sum(counts.values()), math.inf
            ratios: list[list[float]] = []
            for b in order if case.max_blocks is None else order[: case.max_blocks]:
                slot = g["slots"][row, b]
                tokens = (g["flags"][slot] == 1).nonzero().flatten()
                kv = g["kv"][slot, head, tokens]
                if case.placed and (at := int(g["places"][row, head, g["ids"][row, head].tolist().index(b)])) >= 0:
                    kv = g["frames"][at, tokens]
                used[row, head] += 1
                left -= counts[b]
                each = [attention(q, kv[:, :dk], kv[:, dk:]) for q in queries]
                sum_min = min(sum_min, sum(as_ for _, as_ in each) / counts[b])
                for i, (o, as_) in enumerate(each):
                    o_acc[i] = (as_acc[i] * o_acc[i] + as_ * o) / (as_acc[i] + as_)
                    as_acc[i] = as_acc[i] + as_
                    as_min[i] = min(as_min[i], as_ / counts[b])
                if case.estimate == "as_min":
                    over, summed = [as_min[i] * left for i in range(group)], sum_min * left
                else:
                    logit = g["logits"][row, head * group : (head + 1) * group] * 2
                    expected = {j: [counts[j] * float(logit[i, j].exp()) for i in range(group)] for j in order}
                    rest = order[order.index(b) + 1 :]
                    over = [sum(expected[j][i] for j in rest) for i in range(group)]
                    summed = sum(over)
                    if case.estimate == "scores":
                        own = [float(as_) / expected[b][i] for i, (_, as_) in enumerate(each)]
                        ratios.append([*own, float(sum(as_ for _, as_ in each)) / sum(expected[b])])
                        *means, mean = (sum(column) / len(ratios) for column in zip(*ratios))
                        over, summed = [m * o for m, o in zip(means, over)], mean * summed
                if case.group_reduce == "sum":
                    shares = [sum(as_acc) / (sum(as_acc) + summed)]
                else:
                    shares = [as_acc[i] / (as_acc[i] + over[i]) for i in range(group)]
                mass[row, head] = float(min(shares))
                if mass[row, head] > case.threshold and used[row, head] >= case.min_blocks:
                    break
            out[row, head * group : (head + 1) * group] = torch.stack(o_acc)
    return out, used, mass


CASES = {
    "usual": Case(),
    "one block": Case(n=1, batch=1),
    "no blocks": Case(n=0),
    "low": Case(threshold=0.5, spread=4.0),
    "high": Case(threshold=0.98, spread=3.0, n=37),
    "everything": Case(threshold=1.0),
    "sum": Case(group_reduce="sum", spread=3.0),
    "capped": Case(max_blocks=5, threshold=0.99),
    "at least": Case(min_blocks=15, threshold=0.5),
    "bound": Case(estimate="bound", spread=5.0),
    "bound of a sum": Case(estimate="bound", spread=5.0, group_reduce="sum", max_blocks=15),
    "softcap": Case(softcap=2.0),
    "bound of capped logits": Case(softcap=5.0, estimate="bound", spread=4.0),
    "scores": Case(estimate="scores", spread=3.0),
    "scores of a sum": Case(estimate="scores", spread=3.0, group_reduce="sum", group=3),
    "scores, everything": Case(estimate="scores", threshold=1.0, n=9),
    "scores, few": Case(estimate="scores", threshold=0.6, spread=4.0, min_blocks=4, max_blocks=9, learned_sink=True),
    "scores of no blocks": Case(estimate="scores", n=0),
    "scores of huge logits": Case(estimate="scores", spread=60.0, threshold=0.99),
    "learned sink": Case(learned_sink=True, spread=1.0),
    "odd": Case(batch=3, heads=1, group=3, dk=80, dv=48, block_size=32, n=11, sinks=0, ring=7),
    "one head": Case(heads=1, group=1, batch=1, dk=32, dv=32, spread=4.0),
    "in frames": Case(placed=True),
    "reads ahead": Case(first=100),
    "huge logits": Case(spread=60.0, threshold=0.99),
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
    tokens, near = given["tokens"].cpu(), given["near_valid"].cpu()
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
    assert (ahead >= (used + used // 4 + 4).clamp_max(case.max_blocks or 1000)).all()
    ids = torch.nn.functional.pad(given["ids"].cpu(), (0, 9), value=-1)[..., :9]
    expected = ids.masked_fill(torch.arange(9) >= ahead[..., None], -1)
    assert torch.equal(walk.state.chosen.cpu(), expected)


@pytest.mark.parametrize("rounds, first", [(2, 1), (3, 1), (9, 1), (2, 7), (3, 500)])
@pytest.mark.parametrize(
    "name", ["usual", "high", "sum", "bound", "capped", "everything", "odd", "scores", "scores of a sum"]
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


@pytest.mark.parametrize("name", ["high", "scores"])
@pytest.mark.parametrize("m", [1, 2, 5, 64])
def test_micro_batches_do_not_show(place32, m, name):
    """As the host drives it: m blocks at a time, and a flag for each row."""
    case = CASES[name]
    given = case.make(place32)
    expected = case.walk(place32, given)
    whole = progressive_decode(expected)
    walk = case.walk(place32, given)
    walk.state.limits[1] = m
    done, number = torch.zeros(4, dtype=torch.int32, device=place32.device), 0
    while not (done < 0).all():
        number += 1
        walk.attend(near=number == 1)
        walk.verify(step=m, last=False, done=done, number=number)
        assert (done.abs() == number).all()
        assert number < 50
    torch.testing.assert_close(walk.merge(), whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(walk.state.used, expected.state.used)


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
        verify=partial(kernels.verify, **{k: v for k, v in how.items() if k == "masses"}),
        merge=kernels.merge,
    )
    for walk in (want, got):
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


@pytest.mark.parametrize(
    "name", ["high", "sum", "bound", "bound of a sum", "capped", "learned sink", "scores", "scores of a sum"]
)
def test_chunks_of_a_walk(place32, name):
    """More blocks than the verifier holds at a time; near buffer and blocks in several tiles."""
    case = replace(CASES[name], block_size=32, n=70, batch=1)
    want, got, expected, found = both(place32, case, masses=64, tile=16)
    assert torch.equal(got.state.used.cpu(), want.state.used)
    torch.testing.assert_close(got.state.mass.cpu(), want.state.mass, rtol=1e-4, atol=1e-5)
    place32.close(found, expected, ratio=5e-6)


def test_flags_of_rows(place32):
    """``done`` says of each row whether it goes on, as the reference's does."""
    case = CASES["high"]
    given = case.make(place32)
    walks = case.walk(Place32("cpu"), on_cpu(given)), case.walk(place32, given)
    walks[0].operators, walks[1].operators = reference, kernels
    flags = [torch.zeros(4, dtype=torch.int32, device=device) for device in ("cpu", place32.device)]
    for walk in walks:
        walk.state.limits[1] = 4
    for number in range(1, 12):
        for walk, done in zip(walks, flags):
            walk.attend(near=number == 1)
            walk.verify(step=4, last=False, done=done, number=number)
        assert torch.equal(flags[0], flags[1].cpu())
        assert torch.equal(walks[0].state.limits, walks[1].state.limits.cpu())
    assert (flags[0] < 0).all()
