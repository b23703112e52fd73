"""Scores of all tokens from packed labels (CUDA C++), against their definition.

Queries, scales and zero points are such that scores are exact, so that they must be equal.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from inside import forget_kernels
from places import GUARD

from hf_sparsekv.ops.selection.token_score import token_score
from hf_sparsekv.ops.selection.token_score.labels import score_all
from hf_sparsekv.ops.selection.token_score.reference import token_score as reference

pytestmark = pytest.mark.gpu


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
    norms: bool = False

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
        full = [self.blocks, self.blocks // 2, 0] if self.ragged else [self.blocks]
        sealed = self.block_size * torch.tensor([full[row % len(full)] for row in range(self.batch)]).int()
        table = place.randperm(physical)[: self.batch * self.blocks].int().view(self.batch, self.blocks)
        norms = torch.tensor([[0.0], [1.0]], device=q.device).repeat(self.batch, self.heads, 1, channels.shape[-1])
        if self.norms:  # of the largest number in a query the spread is 1, so that its unit stays the same
            centre = place.randint(-50, 51, *channels.shape).float()
            spread = place.randint(1, 4, *channels.shape).float()
            spread[..., 0] = 1.0
            norms = torch.stack((centre, spread), 2)
        return {
            "q": q.flatten(1, 2).to(self.dtype),
            "codes": place.randint(0, 256, physical, self.heads, self.block_size, self.width, dtype=torch.uint8),
            "qparams": torch.stack((scale, zero), -1).half(),
            "channels": channels,
            "rows": torch.stack((sealed + 7, sealed), -1).to(q.device),
            "block_table": table,
            "reduce": self.reduce,
            "sinks": self.sinks,
            "norms": norms,
        }


def on_cpu(given: dict) -> dict:
    return {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in given.items()}


def rows_of(given: dict) -> int:
    """Rows of scores of each row of the batch: one for a KV head, or for a query head."""
    return given["q"].shape[1] if given["reduce"] == "none" else given["codes"].shape[1]


def scored(given: dict, fill: bool) -> torch.Tensor:
    """By this kernel, over memory that holds something else."""
    batch = given["q"].shape[0]
    n = given["block_table"].shape[1] * given["codes"].shape[2]
    memory = torch.full((batch, rows_of(given), n + GUARD), 12345.0, device="cuda")
    assert score_all(**given, out=memory[..., :n], fill=fill), "another kernel would show nothing"
    assert bool((memory[..., n:] == 12345.0).all()), "written after the end of a row"
    return memory[..., :n].cpu()


def check(given: dict, found: torch.Tensor, filled: bool) -> None:
    rest = on_cpu(given)
    expected = reference(**rest, block_ids=None)
    if not filled:
        behind = torch.arange(expected.shape[-1]) >= rest["rows"][:, 1:]
        assert (found == 12345.0).equal(behind[:, None].expand_as(found)), "what is behind a row is not its own"
        expected = expected.masked_fill(behind[:, None], 12345.0)
    assert torch.equal(found, expected)


CASES = {
    "blocks of 16": Case(),
    "blocks of 64": Case(block_size=64, sinks=70),
    "a head each": Case(group=1, width=32),
    "two heads": Case(group=2, width=32, dtype=torch.float16),
    "eight heads": Case(group=8, block_size=32),
    "sixteen heads": Case(group=16, heads=1),
    "the mean": Case(reduce="mean", group=8),
    "latents": Case(group=20, width=64, heads=1, block_size=64, blocks=12),
    "latents, small blocks": Case(group=7, width=64, heads=1),
    "latents, the mean": Case(reduce="mean", group=20, width=64, heads=1),
    "five heads": Case(group=5, blocks=7),
    "each query": Case(reduce="none", norms=True),
    "each of seven queries": Case(reduce="none", group=7, block_size=64, sinks=70),
    "each query, one": Case(reduce="none", group=1, width=32),
    "each of five queries": Case(reduce="none", group=5, norms=True, dtype=torch.float16),
    "each query, latents": Case(reduce="none", group=20, width=64, heads=1, block_size=64, blocks=12),
    "a block": Case(blocks=1, batch=1, ragged=False),
    "with norms": Case(norms=True),
    "with norms, seven heads": Case(norms=True, group=7, width=32, block_size=64, dtype=torch.float16),
    "with norms, latents": Case(norms=True, group=20, width=64, heads=1),
    "with norms, the mean": Case(norms=True, reduce="mean", group=8),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("fill", [False, True])
def test_exact(place32, case, fill):
    given = case.make(place32)
    check(given, scored(given, fill), fill)


@pytest.mark.parametrize("size, blocks", [(64, 512), (64, 2049), (16, 3000), (32, 700)])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_many_tokens(place32, size, blocks, batch):
    """Warps that look blocks up several times; and through the operator."""
    given = Case(blocks=blocks, block_size=size, batch=batch, heads=4, ragged=batch == 3).make(place32)
    check(given, scored(given, False), False)
    check(given, token_score(**given, block_ids=None).cpu(), True)


@pytest.mark.parametrize("width, group", [(16, 1), (16, 8), (32, 2), (32, 16), (64, 20)])
def test_ragged_rows_of_many_tiles(place32, width, group):
    for case in (Case(blocks=3000, heads=8), Case(blocks=700, block_size=128, batch=8, heads=8)):
        given = replace(case, width=width, group=group).make(place32)
        check(given, scored(given, False), False)


@pytest.mark.parametrize("width, group", [(16, 4), (32, 2), (64, 20)])
@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
def test_any_numbers(place32, width, group, reduce, norms):
    """Queries are rounded to a 32,512th of their largest number."""
    shape = {"blocks": 200, "block_size": 64, "width": width, "group": group, "norms": norms}
    case = Case(**shape, reduce=reduce, exact=False, ragged=False)
    given = case.make(place32)
    found, expected = scored(given, True), reference(**on_cpu(given), block_ids=None)
    torch.testing.assert_close(found, expected, rtol=0, atol=expected[expected > -math.inf].abs().max().item() / 5000)


@pytest.mark.parametrize("wild", ["a query", "half of a query", "a scale", "a zero point", "no block"])
def test_not_finite(place32, wild):
    """Scores that are no number are -inf; of the largest over heads, the others count."""
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
    check(given, scored(given, True), True)


def test_no_rows(place32):
    given = Case().make(place32)
    given |= {name: given[name][:0] for name in ("q", "channels", "rows", "block_table", "norms")}
    assert token_score(**given, block_ids=None).shape == (0, 2, 640)


def not_aligned(given: dict) -> dict:
    """With codes that begin four bytes behind where they may."""
    held = torch.empty(given["codes"].numel() + 4, dtype=torch.uint8, device=given["codes"].device)
    return {**given, "codes": held[4:].view_as(given["codes"]).copy_(given["codes"])}


def test_where_it_does_not_serve(place32):
    """Labels of other widths, or not aligned; queries of 32 bits, many heads, small blocks: Triton scores these."""
    others = Case(width=8), Case(width=128), Case(group=21, width=64), Case(dtype=torch.float32), Case(block_size=8)
    changes = [*(other.make(place32) for other in others), not_aligned(Case().make(place32))]
    for given in changes:
        assert not score_all(**given, out=torch.empty(0, device="cuda"), fill=True)
        torch.testing.assert_close(
            token_score(**given, block_ids=None).cpu(), reference(**on_cpu(given), block_ids=None), rtol=1e-3, atol=0.5
        )


def test_in_threads_that_are_new_to_the_gpu(place32):
    """They have no context yet. One compiles the kernel, the next one finds it."""
    given = Case().make(place32)
    found = [torch.full((3, 2, 640), 12345.0, device="cuda") for _ in range(2)]
    forget_kernels()
    for out in found:
        thread = threading.Thread(target=score_all, kwargs={**given, "out": out, "fill": True})
        thread.start()
        thread.join()
    for out in found:
        check(given, out.cpu(), True)
