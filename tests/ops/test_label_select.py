"""Scores and selection in one launch, against their definition.

Queries, scales and zero points are such that scores are exact: many are equal, and all ids must be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from hf_sparsekv.ops.label_select import label_select
from hf_sparsekv.ops.label_select.reference import label_select as reference
from hf_sparsekv.ops.token_score.reference import token_score
from hf_sparsekv.ops.topk_select.cluster import select_by_labels
from hf_sparsekv.ops.topk_select.config import Config


@dataclass
class Case:
    blocks: int = 40
    block_size: int = 16
    group: int = 4
    width: int = 16
    batch: int = 3
    heads: int = 2
    dtype: torch.dtype = torch.bfloat16
    reduce: str = "max"
    sinks: int = 4
    ragged: bool = True
    exact: bool = True

    def make(self, place) -> dict:
        dim, physical = 4 * self.width, self.batch * self.blocks + 5
        channels = torch.stack([place.randperm(dim)[: 2 * self.width] for _ in range(self.batch * self.heads)])
        channels = channels.int().view(self.batch, self.heads, -1)
        q = place.randint(-9, 10, self.batch, self.heads, self.group, dim).float()
        q = torch.where(place.rand(*q.shape) < 0.2, 1 + 1 / 128, q)
        if self.exact:  # the largest of a query is 127, in units of a 128th
            q.scatter_(-1, channels.long()[:, :, None, :1].expand(-1, -1, self.group, -1), 127.0)
            if self.reduce == "mean":
                q[:] = q[:, :, :1]
        else:
            q = place.randn(*q.shape)
        scale = 2.0 ** place.randint(-3, 1, physical, self.heads, self.block_size)
        zero = place.randint(-8, 9, physical, self.heads, self.block_size) / 8
        if not self.exact:
            scale, zero = place.rand(*scale.shape) / 4, place.randn(*scale.shape)
        sealed = torch.full((self.batch,), self.blocks * self.block_size, dtype=torch.int32)
        if self.ragged:
            sealed[1:] = torch.tensor([self.blocks // 2 * self.block_size, 0])[: self.batch - 1]
        table = place.randperm(physical)[: self.batch * self.blocks].int().view(self.batch, self.blocks)
        return {
            "q": q.flatten(1, 2).to(self.dtype),
            "codes": place.randint(0, 256, physical, self.heads, self.block_size, self.width, dtype=torch.uint8),
            "qparams": torch.stack((scale, zero), -1).half(),
            "channels": channels,
            "rows": torch.stack((sealed + 7, sealed), -1).to(q.device),
            "block_table": table,
            "reduce": self.reduce,
            "sinks": self.sinks,
        }


def on_cpu(given: dict) -> dict:
    return {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in given.items()}


def check(given: dict, k: int, found: torch.Tensor) -> None:
    assert torch.equal(found.cpu(), reference(**on_cpu(given), k=k))


def by_cluster(given: dict, k: int, blocks: int | None = 8, out=None) -> torch.Tensor:
    found = select_by_labels(**given, k=k, out=out, config=Config(clusters=blocks))
    assert found is not None, "another kernel would show nothing"
    return found


CASES = {
    "blocks of 16": Case(),
    "blocks of 64": Case(block_size=64, sinks=70),
    "a head each": Case(group=1, width=32),
    "two heads": Case(group=2, width=32, dtype=torch.float16),
    "eight heads": Case(group=8, block_size=32),
    "sixteen heads": Case(group=16, heads=1),
    "the mean": Case(reduce="mean", group=8),
    "five heads": Case(group=5, blocks=7),
    "a block": Case(blocks=1, batch=1, ragged=False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("k", [1, 60, 5000])
def test_two_steps(place32, case, k):
    """Where no cluster serves: few tokens."""
    given = case.make(place32)
    out = torch.full((case.batch, case.heads, k), 12345, dtype=torch.int32, device=place32.device)
    assert label_select(**given, k=k, out=out) is out
    check(given, k, out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("k", [1, 60, 5000])
@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_few_tokens(place32, case, k, blocks):
    given = case.make(place32)
    out = torch.full((case.batch, case.heads, k), 12345, dtype=torch.int32, device=place32.device)
    check(given, k, by_cluster(given, k, blocks, out))


@pytest.mark.gpu
@pytest.mark.parametrize("size, blocks", [(64, 512), (64, 2049), (16, 3000), (32, 700)])
@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("k", [256, 1024])
def test_many_tokens(place32, size, blocks, batch, k):
    """As many blocks of a cluster as are the default, and through the operator."""
    given = Case(blocks=blocks, block_size=size, batch=batch, heads=4, ragged=batch == 3).make(place32)
    check(given, k, by_cluster(given, k, None))
    check(given, k, label_select(**given, k=k))


@pytest.mark.gpu
@pytest.mark.parametrize("width, group", [(16, 4), (32, 2)])
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_any_numbers(place32, width, group, reduce):
    """Rounded queries: what is chosen scores no less than what is not, up to a 30,000th of the largest."""
    case = Case(blocks=600, block_size=64, width=width, group=group, reduce=reduce, exact=False, ragged=False)
    given = case.make(place32)
    found = by_cluster(given, 700).long()
    assert (found.diff(dim=-1) > 0).all() and (found >= case.sinks).all()
    rest = {
        name: given[name] for name in ("q", "codes", "qparams", "channels", "rows", "block_table", "reduce", "sinks")
    }
    scores = token_score(**{**rest, "block_ids": None})
    error = scores[scores > -math.inf].abs().max() / 10_000
    worst = scores.gather(-1, found).amin(-1)
    others = scores.scatter(-1, found, -math.inf).amax(-1)
    assert (worst > -math.inf).all() and (worst >= others - error).all()


@pytest.mark.gpu
@pytest.mark.parametrize("wild", ["a query", "half of a query", "a scale", "a zero point", "no block"])
def test_not_finite(place32, wild):
    """Scores that are no number are never chosen; of the largest over heads, the others count."""
    given = Case(blocks=300, ragged=False).make(place32)
    if wild == "a query":
        given["q"][0, 1] = math.nan
        given["q"][1] = math.inf
    elif wild == "half of a query":
        given["q"][0, 1, ::2] = -math.inf
        given["q"][1, ::2, 1::2] = math.nan
    elif wild == "a scale":
        given["qparams"][::3, :, ::2, 0] = math.nan
    elif wild == "a zero point":
        given["qparams"][::3, :, ::2, 1] = math.nan
    else:
        given["block_table"][0, ::3] = -1
    for k in (60, 4000):
        check(given, k, by_cluster(given, k))


@pytest.mark.gpu
def test_where_it_does_not_serve(place32):
    """Labels of other widths or of 16 bits, queries of 32, odd blocks: in two steps, with the same result."""
    for change in (Case(width=8), Case(width=64), Case(dtype=torch.float32), Case(block_size=8)):
        given = change.make(place32)
        assert select_by_labels(**given, k=9, out=None, config=Config(clusters=8)) is None
        check(given, 9, label_select(**given, k=9))
