"""Sparse prompts: estimates, choice and attention, each kernel against its definition, and these against plain sums."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hf_sparsekv.attention.sparse_prompt import WIDEST_FLOAT32
from hf_sparsekv.ops._prompts import (
    BLOCK,
    LONG,
    NEAR,
    POOL,
    SINKS,
    STEP,
    TILE,
    blocks_of,
    key_means,
    seen_blocks,
    step_of,
    tiles_of,
)
from hf_sparsekv.ops.attention.block_attention import reference as attention
from hf_sparsekv.ops.attention.block_attention import triton as attention_kernel
from hf_sparsekv.ops.attention.block_attention.config import Config
from hf_sparsekv.ops.selection.prompt_choice import reference as choice
from hf_sparsekv.ops.selection.prompt_choice import triton as choice_kernel
from hf_sparsekv.ops.selection.prompt_mass import reference as mass
from hf_sparsekv.ops.selection.prompt_mass import triton as mass_kernel


@dataclass(frozen=True)
class Case:
    """A piece of ``rows`` queries after ``past`` columns, and ``later`` keys after it."""

    rows: int
    past: int = 0
    batch: int = 1
    heads: int = 1
    group: int = 2
    dk: int = 32
    dv: int = 32
    later: int = 0
    start: tuple[int, ...] | None = None
    share: float = 0.8
    dense_from: int = 10**9
    step: int = STEP
    softcap: float | None = None
    sinks: bool = False

    def tensors(self, place):
        """Query, key and value as projections give them: transposed; and where rows begin."""
        n = self.past + self.rows + self.later

        def made(tokens, heads, dim):
            return place.randn(self.batch, tokens, heads, dim).transpose(1, 2)

        query, key = made(self.rows, self.heads * self.group, self.dk), made(n, self.heads, self.dk)
        value = made(n, self.heads, self.dv)
        # Some columns matter: without them every block has the same mass.
        key = key * (1 + 3 * (place.rand(self.batch, 1, n, 1) < 0.03)).to(key.dtype)
        start = None if self.start is None else torch.tensor(self.start, dtype=torch.int32, device=place.device)
        return query, key, value, start

    @property
    def scale(self) -> float:
        return 2 * self.dk**-0.5


CASES = {
    "one tile": Case(100),
    "three tiles": Case(300, group=1),
    "whole tiles": Case(384, heads=2),
    "after a past": Case(256, past=640, dk=64, dv=64),
    "after an odd past": Case(200, past=333, later=70),
    "two rows, padding": Case(330, batch=2, start=(0, 150)),
    "first tokens in two blocks": Case(300, past=384, batch=2, start=(61, 127), share=0.1),
    "nothing but padding in a tile": Case(300, past=64, batch=2, start=(70, 330)),
    "heads of 48": Case(260, past=128, dk=48, dv=40),
    "heads of 80": Case(200, past=64, dk=80, dv=80, start=(70,)),
    "heads of 96": Case(200, past=130, dk=96, dv=96, later=70),
    "keys of 192": Case(200, past=64, dk=192, dv=128),
    "heads of 256": Case(200, past=64, dk=256, dv=256, group=1),
    "last tiles dense": Case(384, past=512, dense_from=800),
    "latents' heads": Case(140, past=192, dk=96, dv=64, group=1, heads=2),
    "fewer exact rows": Case(300, past=333, batch=2, start=(0, 150), step=32),
    "a cap": Case(260, past=130, softcap=1.5),
    "sinks": Case(260, past=130, sinks=True),
    "a cap, sinks, padding": Case(200, past=64, batch=2, start=(0, 75), softcap=3.0, sinks=True, dk=48, dv=40),
    "everything": Case(256, past=256, share=1.0),
}


def estimated(case: Case, place):
    query, key, value, start = case.tensors(place)
    means = key_means(key, start)
    return (
        query,
        key,
        value,
        start,
        mass.prompt_mass(query, key, means, case.scale, case.past, start, case.step, case.softcap),
    )


def of_tiles(case: Case, exact: torch.Tensor) -> torch.Tensor:
    return exact.unflatten(2, (-1, TILE // case.step))


def readable(case: Case, start, device) -> torch.Tensor:
    """Which blocks any query of each tile sees, bool ``[batch or 1, 1, tiles, blocks]``."""
    block = torch.arange(blocks_of(case.past + case.rows), device=device)
    first = torch.zeros(1, dtype=torch.int32, device=device) if start is None else start
    last = (torch.arange(1, tiles_of(case.rows) + 1, device=device) * TILE).clamp_max(case.rows) + case.past - 1
    seen = (block * BLOCK <= last[:, None]) & (block >= first[:, None, None] // BLOCK)
    return (seen & (last >= first[:, None])[..., None])[:, None]


def skip_if_exact(case: Case, place) -> None:
    if place.device == "cuda" and place.dtype == torch.float32 and case.dk > WIDEST_FLOAT32:
        pytest.skip("on a GPU, such heads in float32 are read exactly")


@pytest.mark.few
@pytest.mark.parametrize("name", CASES)
def test_mass(place, name):
    """What tiles see of it; log-sum-exps are compared as masses."""
    case = CASES[name]
    skip_if_exact(case, place)
    query, key, _, start, expected = estimated(case, place)
    given = [t if t is None else t.cpu() for t in (query, key, key_means(key, start), start)]
    expected = mass.prompt_mass(*given[:3], case.scale, case.past, given[3], case.step, case.softcap)
    about = case.scale, case.past, start, case.step, case.softcap
    got = mass_kernel.prompt_mass(query, key, key_means(key, start), *about)
    seen = readable(case, start, place.device)
    ratio = 1e-5 if place.dtype == torch.float32 else 2e-3
    place.close(got[0].masked_fill(~seen, 0), expected[0].masked_fill(~seen.cpu(), 0), ratio)
    one, other = (
        of_tiles(case, t).masked_fill(~seen.to(t.device)[:, :, :, None], float("-inf")) for t in (got[1], expected[1])
    )
    assert torch.equal(one.isinf().cpu(), other.isinf())
    top = other.amax(-1, keepdim=True).nan_to_num(neginf=0.0)  # or squares would be infinite
    place.close((one.cpu() - top).exp2(), (other - top).exp2(), ratio)


@pytest.mark.parametrize("name", CASES)
def test_choice(place32, name):
    """The same lists from the same estimates, but for blocks within rounding of the last one."""
    case = CASES[name]
    *_, start, (pooled, exact) = estimated(case, place32)
    wanted = torch.full(pooled.shape[:2], case.share, device=place32.device)
    args = pooled, exact, wanted, case.past, case.rows, case.dense_from, start
    ids, counts, covered = choice_kernel.prompt_choice(*args)
    expected = choice.prompt_choice(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in args))
    assert torch.equal(ids.cpu(), expected[0])
    assert torch.equal(counts.cpu(), expected[1])
    torch.testing.assert_close(covered.cpu(), expected[2], equal_nan=True, rtol=1e-5, atol=1e-6)


def test_some_heads_choose_again(place32):
    case = CASES["after a past"]
    *_, start, (pooled, exact) = estimated(case, place32)
    some = torch.tensor([[True, False]], device=place32.device)
    low, high = (torch.full(pooled.shape[:2], share, device=place32.device) for share in (0.5, 0.99))
    for choose in (choice.prompt_choice, choice_kernel.prompt_choice):
        first = choose(pooled, exact, low, case.past, case.rows, 10**9, start)
        other = choose(pooled, exact, high, case.past, case.rows, 10**9, start)
        both = choose(
            pooled, exact, high, case.past, case.rows, 10**9, start, only=some, into=tuple(t.clone() for t in first)
        )
        for got, one, two in zip(both, other, first):
            torch.testing.assert_close(got[:, :1], one[:, :1], equal_nan=True)
            torch.testing.assert_close(got[:, 1:], two[:, 1:], equal_nan=True)
        assert (other[1] > first[1]).any()


HOWS = {
    "one": Config(many=1, warps=4, stages=2),
    "two": Config(many=2),
    "half a tile": Config(rows=64, many=1, warps=4, stages=1),
    "descriptors": Config(many=1, descriptors=True, stages=3),
    "two by descriptors": Config(many=2, descriptors=True, heads_first=True),
}


@pytest.mark.few
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", CASES)
def test_attention(place, name, how):
    if place.dtype == torch.float32 and place.device == "cuda" and HOWS[how].many * HOWS[how].stages > 2:
        pytest.skip("pieces of float32 of this many do not fit the shared memory")
    case = CASES[name]
    skip_if_exact(case, place)
    if place.device == "cuda" and case.dk > 128 and HOWS[how].many > 1:
        pytest.skip("two blocks of such heads do not fit the shared memory, and one is taken")
    query, key, value, start, (pooled, exact) = estimated(case, place)
    wanted = torch.full(pooled.shape[:2], case.share, device=place.device)
    lists = choice.prompt_choice(pooled, exact, wanted, case.past, case.rows, case.dense_from, start)[:2]
    sinks = 4 * place.randn(query.shape[1]) if case.sinks else None
    args = query, key, value, *lists, case.scale, case.past, start, None, case.softcap, sinks
    got = attention_kernel.block_attention(*args, config=HOWS[how])
    place.close(got, attention.block_attention(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in args)))


# ---------------------------------------------------------------------- the definitions


def dense(case: Case, query, key, start) -> torch.Tensor:
    """True shares of all keys, float64 ``[batch, Hq, rows, past + rows]``; zeros for queries that see nothing."""
    end = case.past + case.rows
    key = key[:, :, :end].repeat_interleave(case.group, 1).double()
    s = query.double() @ key.transpose(-1, -2) * case.scale
    s = s if case.softcap is None else case.softcap * torch.tanh(s / case.softcap)
    at, columns = torch.arange(case.past, end)[:, None], torch.arange(end)
    first = torch.zeros(1) if start is None else start
    s = s.masked_fill(~((columns <= at) & (columns >= first[:, None, None]))[:, None], float("-inf"))
    return s.softmax(-1).nan_to_num(0)


def by_blocks(share: torch.Tensor) -> torch.Tensor:
    n = share.shape[-1]
    return torch.nn.functional.pad(share, (0, -n % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1)


class Here:
    """A place for the definitions alone."""

    device, dtype = "cpu", torch.float32

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def randn(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def rand(self, *shape):
        return torch.rand(shape, generator=self.generator)


@pytest.mark.parametrize("name", CASES)
def test_exact_rows_and_what_is_covered_are_true(name):
    case, here = CASES[name], Here()
    query, key, _, start, (pooled, exact) = estimated(case, here)
    share = by_blocks(dense(case, query, key, start))
    rows = torch.arange(case.step - 1, case.rows, case.step)
    found = exact[:, :, : len(rows)].double()
    found = (found - found.logsumexp(-1, keepdim=True)).nan_to_num(float("-inf"))
    by = torch.softmax(exact[:, :, : len(rows)].double() * 0.6931471805599453, -1).nan_to_num(0)
    torch.testing.assert_close(by, share[:, :, rows], atol=1e-5, rtol=1e-4)
    ids, counts, covered = choice.prompt_choice(
        pooled, exact, torch.full(pooled.shape[:2], case.share), case.past, case.rows, case.dense_from, start
    )
    for tile in range(pooled.shape[2]):
        row = tile * TILE + (1 + (case.past // TILE + tile) % (TILE // case.step)) * case.step - 1
        for batch in range(case.batch):
            for head in range(pooled.shape[1]):
                mine = ids[batch, head, tile, : counts[batch, head, tile]].long()
                got = covered[batch, head, tile]
                if not got.isnan():
                    want = share[batch, head, row, mine].sum()
                    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)


def test_long_prompts_have_fewer_exact_rows():
    assert step_of(LONG - 1) == STEP
    assert step_of(LONG) == 2 * STEP


def test_means_leave_padding_out():
    at = POOL // 2 + POOL
    key = Here().randn(2, 1, 2 * POOL + 8, 4)
    start = torch.tensor([0, at], dtype=torch.int32)
    means = key_means(key, start)
    torch.testing.assert_close(means[0, 0, 2], key[0, 0, 2 * POOL :].mean(0))
    torch.testing.assert_close(means[1, 0, 1], key[1, 0, at : 2 * POOL].mean(0))
    assert not means[1, 0, 0].any()
    torch.testing.assert_close(key_means(key)[1, 0, 1], key[1, 0, POOL : 2 * POOL].mean(0))


def test_the_first_tokens_blocks_and_near_ones_are_always_chosen():
    case = Case(256, past=1024, share=0.01)
    *_, (pooled, exact) = estimated(case, Here())
    ids, counts, _ = choice.prompt_choice(pooled, exact, torch.full((1, 2), 0.01), case.past, case.rows, 10**9)
    for tile in range(2):
        own = (case.past + tile * TILE) // BLOCK
        assert ids[0, 0, tile, : counts[0, 0, tile]].tolist() == [0, *range(own - NEAR, own + TILE // BLOCK)]
    for start in (60, 61, 63, 64, 127):
        first = torch.tensor([start], dtype=torch.int32)
        ids, counts, _ = choice.prompt_choice(
            pooled, exact, torch.full((1, 2), 1e-9), case.past, case.rows, 10**9, first
        )
        sinks = range(start // BLOCK, (start + SINKS - 1) // BLOCK + 1)
        own = case.past // BLOCK
        assert ids[0, 0, 0, : counts[0, 0, 0]].tolist() == [*sinks, *range(own - NEAR, own + TILE // BLOCK)]
    assert torch.equal(seen_blocks(1024, 256, None, torch.device("cpu")), torch.tensor([[18, 20]]))


def test_pieces_choose_as_the_whole_does():
    """Pieces of whole tiles, whose last mean is of as many keys."""
    case = Case(512, dk=64, dv=64)
    query, key, value, _ = case.tensors(Here())
    wanted = torch.full((1, 2), 0.8)

    def attended(past, rows):
        k, v = key[:, :, : past + rows], value[:, :, : past + rows]
        q = query[:, :, past : past + rows]
        made = mass.prompt_mass(q, k, key_means(k), case.scale, past)
        ids, counts, _ = choice.prompt_choice(*made, wanted, past, rows, 10**9)
        return attention.block_attention(q, k, v, ids, counts, case.scale, past), counts

    whole, counts = attended(0, 512)
    parts = [attended(past, 256) for past in (0, 256)]
    assert torch.equal(torch.cat([part[1] for part in parts], 2), counts)
    torch.testing.assert_close(torch.cat([part[0] for part in parts], 2), whole)
    assert (counts[0, :, 3] < 8).any()
