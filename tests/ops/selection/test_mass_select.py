"""Tokens up to a share of the attention mass: the kernels against the definition, and what the definition promises."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from decode_cases import valid_entries
from torch import Tensor

from hf_sparsekv.ops.selection.mass_select import BINS, MASS_ONE, NONE, TOTALS, reference
from hf_sparsekv.ops.selection.mass_select import triton as kernels
from hf_sparsekv.ops.selection.mass_select.reference import LENGTHS

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of the interpreter


@dataclass
class Case:
    batch: int = 2
    heads: int = 2
    group: int = 3
    dk: int = 48
    channels: int = 12
    n: int = 700
    sinks: int = 3
    ring: int = 45
    spread: float = 3.0
    size: int = 256  # of a chunk
    softcap: float | None = None
    learned_sink: bool = False
    group_reduce: str = "all"
    threshold: float = 0.9
    min_tokens: int = 20
    max_tokens: int | None = None
    rows: tuple[tuple[int, int], ...] | None = None  # length and sealed tokens of each
    coming: int = 0  # tokens of each row whose keys are not there yet

    def make(self, place) -> tuple[tuple, dict]:
        """Scores with holes; NaN in near entries that hold nothing, and in scores behind the sealed tokens."""
        lists = (self.batch, self.heads)
        scores = place.randn(self.batch, self.heads * self.group, self.n).float() * self.spread
        hidden = place.rand(*lists, self.n) < 0.1
        scores[hidden.repeat_interleave(self.group, 1)] = -torch.inf
        rows = self.rows
        if rows is None:  # a ring with some room; fewer tokens, the ring full
            rows = ((self.n + self.ring - 12, self.n), *((self.n * 2 // 3 + self.ring, self.n * 2 // 3),) * 9)
        rows = torch.tensor(rows[: self.batch], dtype=torch.int32, device=scores.device)
        scores[(torch.arange(self.n, device=scores.device) >= rows[:, 1:])[:, None].expand_as(scores)] = torch.nan
        near = place.randn(*lists, self.sinks + self.ring, 2 * self.dk)
        there = torch.stack(((rows[:, 0] - self.coming).clamp_min(0), rows[:, 1]), 1)
        stored = torch.where(rows[:, 0] > 0, there[:, 0], 50)  # rows that get no token attend to nothing
        near = torch.where(valid_entries(there, self.sinks, self.ring)[:, None, :, None], near, torch.nan)
        q = place.randn(self.batch, self.heads * self.group, self.dk)
        channels = [place.randperm(self.dk)[: self.channels] for _ in range(self.batch * self.heads)]
        args = scores, q, torch.stack(channels).view(*lists, -1), near, rows
        named = {"sinks": self.sinks, "scale": self.dk**-0.5, "softcap": self.softcap}
        named |= {"threshold": self.threshold, "min_tokens": self.min_tokens, "max_tokens": self.max_tokens}
        named |= {"group_reduce": self.group_reduce, "stored": stored if self.coming else None}
        named["sink_logits"] = place.randn(self.heads * self.group) if self.learned_sink else None
        return args, named


CASES = {
    "usual": Case(),
    "one head": Case(batch=1, heads=1, group=1),
    "low": Case(threshold=0.4, min_tokens=0),
    "near tokens alone": Case(threshold=0.01, min_tokens=0),
    "high": Case(threshold=0.999),
    "everything": Case(threshold=1.0, spread=60.0),
    "flat": Case(spread=0.0, threshold=0.5),
    "sum": Case(group_reduce="sum"),
    "sum with a sink": Case(group_reduce="sum", learned_sink=True, softcap=4.0),
    "at least": Case(min_tokens=123, threshold=0.1),
    "more than there is": Case(min_tokens=5000),
    "capped": Case(max_tokens=33),
    "capped among equals": Case(max_tokens=33, spread=0.0),
    "softcap": Case(softcap=2.0),
    "learned sink": Case(learned_sink=True),
    "one chunk": Case(n=200),
    "many chunks": Case(n=2600, size=128, batch=1),
    "nothing stored": Case(n=0),
    "no sinks": Case(sinks=0, ring=70),
    "latents": Case(heads=1, group=20, dk=72, channels=20),
    "wide latents": Case(heads=1, group=17, dk=576, channels=128, batch=1, n=300),
    "huge logits": Case(spread=400.0),
    "empty rows": Case(batch=3, rows=((0, 0), (2, 0), (700, 672)), min_tokens=0),
    "short rows": Case(batch=4, rows=((45, 0), (20, 16), (64, 64), (17, 16)), sinks=20, n=2600, learned_sink=True),
    "a long row among short ones": Case(batch=4, rows=((2640, 2600), (70, 64), (1000, 976), (9, 0)), n=2600, size=128),
    "keys that are still to come": Case(coming=1),
    "of short rows": Case(batch=4, rows=((0, 0), (1, 0), (700, 672), (65, 64)), coming=1, min_tokens=0, sinks=20),
    "an empty row, sum": Case(rows=((0, 0), (729, 700)), group_reduce="sum"),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def cpu(args: tuple, named: dict) -> tuple[tuple, dict]:
    def move(x):
        return x.cpu() if isinstance(x, Tensor) else x

    return tuple(map(move, args)), {name: move(x) for name, x in named.items()}


def check(got, totals: Tensor, args: tuple, named: dict, rest: int) -> None:
    """The bins to one, as shares are rounded; all else exactly what these bins make. ``rest``: ids after the chosen."""
    args, named = cpu(args, named)
    want = reference.mass_select(*args, **named)
    bins, ids, totals = got.bins.cpu(), got.ids.cpu(), totals.cpu()
    assert torch.equal(bins == NONE, want.bins == NONE)
    if bins.numel():
        away = (bins.int() - want.bins.int()).abs()
        assert away.max() <= 1 and (away > 0).float().mean() < 0.01
    limits = {name: named[name] for name in ("threshold", "min_tokens", "max_tokens")}
    taken, count, mass, cut, capped = reference.take(bins, **limits)
    assert torch.equal(got.count.cpu(), count)
    assert torch.equal(got.cut.cpu(), cut)
    torch.testing.assert_close(got.mass.cpu(), mass, rtol=1e-5, atol=1e-5)
    for row, head in torch.cartesian_prod(*map(torch.arange, count.shape)).tolist():
        columns = taken[row, head].nonzero()[:, 0].int()
        assert torch.equal(ids[row, head, : len(columns)], columns)
        assert (ids[row, head, len(columns) :] == rest).all()
    there = args[4][:, 0] > 0  # rows that hold nothing choose nothing, and are not counted
    count, mass, capped = count[there], mass[there], capped[there]
    found = dict(zip(TOTALS, totals.tolist()))
    assert found["walks"] == count.numel() == totals[len(TOTALS) :].sum()
    assert found["used"] == count.sum()
    assert found["capped"] == capped.sum()
    assert found["mass"] == pytest.approx(float(mass.double().sum()) * MASS_ONE, rel=1e-4, abs=1e-4 * MASS_ONE)
    assert found["worst"] == pytest.approx(float(1 - got.mass.cpu()[there].min()) * MASS_ONE, abs=2)
    for b, times in enumerate(totals[len(TOTALS) :].tolist()):
        low, high = (0, 1) if b == 0 else (2 ** (b - 1) + 1, 2**b)
        assert times == ((count >= low) & (count <= high)).sum(), b


@pytest.mark.pairwise(once=("case",))
@EVERY
def test_kernels_against_references(place, case):
    args, named = case.make(place)
    totals = torch.zeros(len(TOTALS) + LENGTHS, dtype=torch.int64, device=args[0].device)
    check(kernels.mass_select(*args, **named, totals=totals, config=case.size), totals, args, named, -1)


@EVERY
def test_the_definition_says_what_it_means(case):
    """By plain sums, without logarithms, bins or a common scale."""
    from places import Place

    args, named = case.make(Place("cpu", torch.float32))
    if case.spread > 50:
        return  # whose exponentials no float holds
    found = reference.mass_select(*args, **named)
    scores, q, channels, near, rows = args
    there = torch.stack(((rows[:, 0] - case.coming).clamp_min(0), rows[:, 1]), 1)
    valid = valid_entries(there, case.sinks, case.ring)
    scores[scores.isnan()] = -torch.inf
    for row in range(case.batch):
        for head in range(case.heads):
            shares, near_shares = [], []
            for g in range(head * case.group, (head + 1) * case.group):

                def mass(products: Tensor) -> Tensor:
                    logits = products.double() * named["scale"]
                    return (logits if case.softcap is None else case.softcap * (logits / case.softcap).tanh()).exp()

                keys = near[row, head, valid[row], : case.dk]
                true = mass(keys @ q[row, g])
                own = channels[row, head].long()
                recent = keys[valid[row, : case.sinks].sum() :]
                over = (mass(recent @ q[row, g]) / mass(recent[:, own] @ q[row, g, own])).mean()
                over = over if len(recent) else 1.0
                held = mass(scores[row, g]).masked_fill(scores[row, g] == -torch.inf, 0.0) * over
                first = true.sum() + (named["sink_logits"][g].double().exp() if case.learned_sink else 0)
                shares.append(held if case.group_reduce == "sum" else held / (first + held.sum()))
                near_shares.append(first)
            share = torch.stack(shares)
            if case.group_reduce == "sum":
                share = share.sum(0) / (sum(near_shares) + share.sum())
            else:
                share = share.amax(0)
            share = share.nan_to_num(0.0)  # where there is nothing at all
            bins = found.bins[row, head].int()
            assert torch.equal(bins == NONE, share == 0)
            live = share > 0
            said = (-(bins[live].double() + 0.5) / 8).exp2()
            off = (said / share[live].clamp(max=1 - 1e-9)).log2().abs()
            assert (off[bins[live] < BINS - 1] <= 1 / 16 + 1e-3).all()
            taken = torch.zeros(case.n, dtype=torch.bool)
            ids = found.ids[row, head, : found.count[row, head]].long()
            assert (found.ids[row, head, found.count[row, head] :] == -1).all()
            assert (ids.diff() > 0).all()
            taken[ids] = True
            best = share[~taken & live].max() if bool((~taken & live).any()) else 0.0
            assert not taken.any() or best <= share[taken].min() * 2**0.126
            rest, count = float(share[~taken].sum()), int(taken.sum())
            assert found.mass[row, head] == pytest.approx(max(0, 1 - rest), abs=0.05 * rest + 1e-6)
            if case.max_tokens is None and count < live.sum():
                assert rest <= (1 - case.threshold) * 1.05 + 1e-9
            if count > max(case.min_tokens, 0) and case.max_tokens is None and case.threshold < 1:
                at_cut = float(share[bins == found.cut[row, head]].sum())
                assert rest + at_cut > (1 - case.threshold) * 0.95  # the last bin was needed
            if case.max_tokens is not None:
                assert count <= case.max_tokens


@pytest.mark.parametrize("group_reduce", ["all", "sum"])
def test_what_is_no_number(place32, group_reduce):
    """A query that is NaN, near keys that are NaN or infinite: the other heads and tokens count as before."""
    args, named = Case(group_reduce=group_reduce).make(place32)
    scores, q, _, near, *_ = args
    scores[0, 0] = -torch.inf  # as NaN in its query makes it
    q[0, 0] = torch.nan
    near[1, 0, 9], near[1, 1, 9] = torch.inf, torch.nan
    scores[1, 4, 17] = torch.inf
    got = kernels.mass_select(*args, **named, config=256)
    args, named = cpu(args, named)
    want = reference.mass_select(*args, **named)
    assert torch.equal(got.bins.cpu() == NONE, want.bins == NONE)
    assert (got.bins.cpu().int() - want.bins.int()).abs().max() <= 1
    assert (got.mass.cpu() - want.mass).abs().max() < 0.02
    assert ((got.mass >= 0) & (got.mass <= 1)).all()
    assert got.bins[1, 1, 17] == 0, "what is infinite has all the mass"


def test_strided_tensors(place32):
    """A query and scores of other strides than contiguous ones."""
    args, named = Case().make(place32)
    scores, q, channels, near, rows = args
    want = kernels.mass_select(*args, **named, config=256)
    q = torch.stack((q, q), -1)[..., 0]
    near = torch.cat((near, near), 1)[:, : near.shape[1]]
    scores = torch.cat((scores, scores), 2)[..., : scores.shape[2]]
    got = kernels.mass_select(scores, q, channels, near, rows, **named, config=256)
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.mass, want.mass)


def test_where_ids_are_written(place32):
    """Rows that are further apart than they are wide; what lies between is left alone."""
    args, named = Case(n=208).make(place32)
    want = kernels.mass_select(*args, **named, config=256)
    for select, more in ((kernels.mass_select, {"config": 256}), (reference.mass_select, {})):
        ids = torch.full((2, 2, 256), 7, dtype=torch.int32, device=args[0].device)
        count = torch.zeros(2, 2, dtype=torch.int32, device=ids.device)
        select(*args, **named, **more, out=(ids[..., :208], count))
        assert torch.equal(ids[..., :208], want.ids) and torch.equal(count, want.count)
        assert (ids[..., 208:] == 7).all()
