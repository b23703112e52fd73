"""The selection kernels against their definition: equal ids, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from selection_operators import wild_scores

from hf_sparsekv.ops._layout import whole
from hf_sparsekv.ops.selection.topk_select import cluster
from hf_sparsekv.ops.selection.topk_select.config import Config, tiles
from hf_sparsekv.ops.selection.topk_select.reference import block_select as reference_block
from hf_sparsekv.ops.selection.topk_select.reference import token_select as reference_token
from hf_sparsekv.ops.selection.topk_select.triton import block_select, scratch_size, token_select

# How a row is split: by one program, or by several that hold 64 entries each and share a sample.
SPLITS = {
    "one program": Config(clusters=False),
    "sample": Config(clusters=False, row=16, chunk=64, sample=32, fewest=64),
}
split = pytest.mark.parametrize("config", SPLITS.values(), ids=SPLITS.keys())


def ties(place, n):
    """Few distinct values: the lower position wins. Zeros of both signs are equal."""
    scores = place.randint(-2, 3, 2, 2, n).float()
    return torch.where(place.rand(2, 2, n) < 0.5, scores, -scores)


def missing(place, n):
    """Rows with none, few and all of their entries missing."""
    scores = place.randn(3, 2, n)
    scores[0, 1, n // 4 :] = -math.inf
    scores[1] = scores[1].masked_fill(place.rand(2, n) < 0.5, -math.inf)
    scores[2, 0] = -math.inf
    scores[2, 1, :-1] = -math.inf
    return scores


def extreme(place, n):
    """The largest and smallest finite numbers, infinity, denormal numbers, neighbours in the last bit."""
    top, small = torch.finfo(torch.float32).max, 1e-45
    values = torch.tensor([top, -top, math.inf, -math.inf, small, -small, 0.0, -0.0, 1.0, -1.0])
    near = torch.tensor(1.0).view(torch.int32) + torch.arange(30, dtype=torch.int32)
    values = torch.cat((values, near.view(torch.float32), -near.view(torch.float32)))
    return values[place.randperm(2 * n).cpu().long() % len(values)].view(1, 2, n).to(place.device)


def digits(place, n):
    """Random bit patterns: each of the four digits decides for some row."""
    bits = place.randint(-(2**31), 2**31 - 1, 2, 2, n, dtype=torch.int64)
    mask = torch.tensor([0xFFFFFFFF, 0x40FFFFFF, 0x4000FFFF, 0x400000FF], device=bits.device).view(2, 2, 1)
    bits = bits & mask
    scores = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)
    return torch.where(scores.isnan(), 0.0, scores)


FILL, GUARD = 12345, 16


class Guarded:
    """Memory for a result, with entries before, between and after its rows that nothing may write.

    Attributes:
        out: ``shape``, each row in one piece.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._all = torch.full((*shape[:-1], GUARD + shape[-1] + GUARD), FILL, dtype=torch.int32, device=device)
        self.out = self._all[..., GUARD : GUARD + shape[-1]]

    def check(self) -> None:
        """Nothing was written around it."""
        around = self._all.clone()
        around[..., GUARD : around.shape[-1] - GUARD] = FILL
        assert (around == FILL).all(), "written outside of the result"


SCORES = {
    "random": lambda place, n: place.randn(2, 2, n) * 100,
    "equal": lambda place, n: torch.tensor([3.5, -0.0], device=place.device)[:, None, None].repeat(1, 1, n),
    "ties": ties,
    "missing": missing,
    "extreme": extreme,
    "digits": digits,
    "not finite": wild_scores,
}
COUNTS = {
    "1": lambda n: 1,
    "few": lambda n: n // 8,
    "half": lambda n: n // 2,
    "most": lambda n: n - 1,
    "more": lambda n: n + 17,
}


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.pairwise
@split
@pytest.mark.parametrize("n", [1, 65, 128, 129, 200])
@pytest.mark.parametrize("k", COUNTS)
@pytest.mark.parametrize("kind", SCORES)
def test_against_reference(place32, kind, k, n, config):
    """Padded with -1 where fewer can be chosen: -inf and NaN never are."""
    scores, k = SCORES[kind](place32, n), COUNTS[k](n)
    guarded = Guarded((*scores.shape[:2], k), scores.device)
    held = Guarded((scratch_size(scores, k, config),), scores.device)
    out, scratch = guarded.out, held.out.fill_(-99)
    assert block_select(scores, k, out=out, scratch=scratch, config=config) is out
    guarded.check(), held.check()
    got, scores = out.cpu(), scores.cpu()
    assert torch.equal(got, reference_block(scores, k))
    assert (scores.gather(-1, got.clamp_min(0).long())[got >= 0] > -math.inf).all()


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.pairwise
@split
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("wild", [False, True])
def test_tokens(place32, wild, block_size, config):
    """Scores of given blocks become columns; without given blocks they are columns already."""
    batch, heads, n, k = 2, 2, 3, 21
    scores = wild_scores(place32, n * block_size)[1:, 1:3] if wild else place32.randn(batch, heads, n * block_size)
    blocks = torch.stack([place32.randperm(50)[:n].sort().values for _ in range(batch * heads)])
    blocks = blocks.view(batch, heads, n)
    blocks[1, 0, 1:] = -1
    scores[1, 0, block_size:] = -math.inf
    blocks[0, 1] = -1
    scores[0, 1] = -math.inf
    for ids in (blocks, None):
        expected = reference_token(scores.cpu(), None if ids is None else ids.cpu(), k, block_size)
        guarded = Guarded((batch, heads, k), place32.device)
        got = token_select(scores, ids, k, block_size, out=guarded.out, config=config)
        assert got is guarded.out
        assert torch.equal(got.cpu(), expected)
        guarded.check()


def row_lengths(n, block_size):
    """Rows of a batch: one as long as the scores, none, few, all but a block, and one whose ring alone has tokens."""
    sealed = [n, 0, block_size, max(0, n - block_size) // block_size * block_size, n // 2 // block_size * block_size, 0]
    return torch.tensor([(at + 5 * i, at) for i, at in enumerate(sealed)], dtype=torch.int32)


@pytest.mark.pairwise
@split
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("blocks", [1, 9, 41])
@pytest.mark.parametrize("k", COUNTS)
@pytest.mark.parametrize("hole", [math.nan, math.inf, 1e30])
def test_rows_of_their_own_length(place32, k, blocks, block_size, hole, config):
    """Entries after a row's sealed tokens are not read, whatever they hold."""
    n, k = blocks * block_size, COUNTS[k](blocks * block_size)
    rows = row_lengths(n, block_size).to(place32.device)
    for tokens, width in ((1, n), (block_size, blocks)):
        clean = place32.randn(len(rows), 2, width)
        clean[2:4, 1] = clean[2:4, 1].round()
        behind = (torch.arange(width, device=clean.device) * tokens >= rows[:, 1:])[:, None].expand_as(clean)
        scores = clean.masked_fill(behind, hole)
        expected = reference_block(clean.masked_fill(behind, -math.inf).cpu(), k)
        guarded = Guarded((*scores.shape[:2], k), scores.device)
        held = Guarded((scratch_size(scores, k, config),), scores.device)
        out, scratch = guarded.out, held.out.fill_(-99)
        how = {"rows": rows, "out": out, "scratch": scratch, "config": config}
        if tokens == 1:
            token_select(scores, None, k, block_size, **how)
            defined = reference_token(scores.cpu(), None, k, block_size, rows=rows.cpu())
        else:
            block_select(scores, k, block_size=block_size, **how)
            defined = reference_block(scores.cpu(), k, rows=rows.cpu(), block_size=block_size)
        assert torch.equal(defined, expected)
        assert torch.equal(out.cpu(), expected)
        guarded.check(), held.check()


@pytest.mark.parametrize("misled", [False, True])
def test_a_long_row_among_short_ones(place32, misled):
    """Each by a sample of its own, which may mislead; rows that the last step holds take none."""
    n, k, sample, room = 1280, 20, *((32, 128) if misled else (256, 256))
    config = Config(clusters=False, row=16, chunk=64, sample=sample, fewest=room)
    rows = torch.tensor([(1290, 1280), (640, 640), (64, 64), (400, 384), (9, 0)], dtype=torch.int32)
    scores = place32.randn(5, 2, n)
    for row in (0, 1, 3) if misled else ():
        at = sampled_at(int(rows[row, 1]), sample).to(scores.device)
        scores[row, 0, at] += 100.0
        scores[row, 1, at] -= 100.0
    scores = torch.where((torch.arange(n) >= rows[:, 1:])[:, None].to(scores.device), math.nan, scores)
    scratch = place32.nan(scratch_size(scores, k, config), dtype=torch.int32)
    how = {"rows": rows.to(scores.device), "scratch": scratch, "config": config}
    got = token_select(scores, None, k, 16, **how)
    assert torch.equal(got.cpu(), reference_token(scores.cpu(), None, k, 16, rows=rows))
    reached = scratch[whole(10) :][:200].view(5, 2, 20).cpu()
    least = torch.full((2,), torch.tensor(-torch.finfo(torch.float32).max).view(torch.int32) ^ 0x7FFFFFFF)
    assert torch.equal(scratch[4:6].cpu(), least), "a row that is held whole has no threshold"
    counts = [reached[row, :, : -(-int(sealed) // 64)].sum(1).tolist() for row, (_, sealed) in enumerate(rows)]
    for row in (0, 1, 3):
        assert counts[row][0] < k and counts[row][1] > room if misled else all(k <= n <= room for n in counts[row])
    assert counts[2] == [64, 64] and (reached[4] == place32.nan(1, dtype=torch.int32).cpu()).all()


@pytest.mark.parametrize("select", [reference_token, token_select])
def test_rows_that_are_refused(place32, select):
    scores, rows = place32.randn(2, 1, 32), torch.zeros(2, 2, dtype=torch.int32, device=place32.device)
    blocks = torch.zeros(2, 1, 2, dtype=torch.int32, device=place32.device)
    with pytest.raises(ValueError, match="leave them out where block_ids are given"):
        select(scores, blocks, 3, 16, rows=rows)
    with pytest.raises(ValueError, match=r"rows must be contiguous int32 \[2, 2\]"):
        select(scores, None, 3, 16, rows=rows[:1])


@pytest.mark.parametrize("select", [reference_block, block_select])
def test_rows_of_blocks_without_their_size(place32, select):
    scores, rows = place32.randn(2, 1, 32), torch.zeros(2, 2, dtype=torch.int32, device=place32.device)
    with pytest.raises(ValueError, match="give block_size"):
        select(scores, 3, rows=rows)
    with pytest.raises(ValueError, match=r"rows must be contiguous int32 \[2, 2\]"):
        select(scores, 3, rows=rows.long(), block_size=16)


@split
def test_views(place32, config):
    """Scores, block ids and result that are slices of larger buffers."""
    scores, out = place32.nan(2, 3, 150), place32.nan(2, 3, 40, dtype=torch.int32)
    scores[:, 1:, 10:106] = place32.randn(2, 2, 96)
    blocks = place32.nan(2, 3, 9, dtype=torch.int32)
    blocks[:, 1:, 2:8] = torch.arange(1, 12, 2, device=place32.device)
    token_select(scores[:, 1:, 10:106], blocks[:, 1:, 2:8], 33, 16, out=out[:, 1:, 4:37], config=config)
    expected = place32.nan(2, 3, 40, dtype=torch.int32).cpu()
    expected[:, 1:, 4:37] = reference_token(scores[:, 1:, 10:106].cpu(), blocks[:, 1:, 2:8].cpu(), 33, 16)
    assert torch.equal(out.cpu(), expected)


@split
def test_empty(place32, config):
    assert block_select(torch.zeros(2, 1, 5, device=place32.device), 0, config=config).shape == (2, 1, 0)
    none = torch.zeros(2, 1, 0, device=place32.device)
    assert (block_select(none, 3, config=config) == -1).all()
    assert (token_select(none, none.int(), 3, 16, config=config) == -1).all()


def test_a_long_row(place32):
    """At the sizes at which several programs share a row by default."""
    scores = place32.randn(1, 1, 20_000)
    for row in (scores, scores[..., :9000]):
        config = Config(clusters=False)
        assert torch.equal(block_select(row, 1024, config=config).cpu(), reference_block(row.cpu(), 1024))


def sampled_at(n, sample):
    """Positions that a sample of a row reads."""
    i = torch.arange(sample)
    return (i * n + (((i + 1) * 2654435761 & 0xFFFFFFFF) * n >> 32)) // sample


@pytest.mark.parametrize("k", [20, 60])
def test_a_sample_that_misleads(place32, k):
    """Too few entries reach the sample's score, or too many: then the whole row is searched. With given blocks."""
    n, config = 640, Config(clusters=False, row=16, chunk=64, sample=32, fewest=128)
    at = sampled_at(n, 32)
    assert at.unique().numel() == 32 and at.max() < n
    scores = place32.randn(1, 4, n)
    scores[:, 0, at.to(place32.device)] += 100.0
    scores[:, 1, at.to(place32.device)] -= 100.0
    scores[:, 2] = scores[:, 2].round()
    blocks = (torch.arange(40, dtype=torch.int32, device=place32.device) * 3).expand(1, 4, 40)
    scratch = place32.nan(scratch_size(scores, k, config), dtype=torch.int32)
    got = token_select(scores, blocks, k, 16, scratch=scratch, config=config)
    assert torch.equal(got.cpu(), reference_token(scores.cpu(), blocks.cpu(), k, 16))
    reached = scratch[whole(4) :][:40].view(4, 10).sum(1).tolist()
    assert reached[0] < k and reached[1] > 128, "the sample does not mislead"
    assert k <= reached[3] <= 128


def test_ids_that_no_cluster_takes(place32, monkeypatch):
    """Clusters serve these scores, so no scratch memory is asked for; ids of 64 bits go to kernels that need some."""
    monkeypatch.setattr(cluster, "serves", lambda scores, config: config.clusters is not False)
    scores, config = place32.randn(1, 2, 640), Config(row=16, chunk=64, sample=32, fewest=64)
    assert scratch_size(scores, 20, config) == 0
    blocks = 3 * torch.arange(40, device=place32.device).expand(1, 2, 40)
    expected = reference_token(scores.cpu(), blocks.cpu(), 20, 16)
    for scratch in (None, torch.empty(0, dtype=torch.int32, device=place32.device)):
        got = token_select(scores, blocks, 20, 16, scratch=scratch, config=config)
        assert torch.equal(got.cpu(), expected)


def test_k_beyond_what_a_program_holds(place32):
    """The last step searches the whole row."""
    assert tiles(40_000, 35_000) == (16_384, 32_768)
    scores = place32.randn(1, 1, 40_000)
    for k in (10_000, 35_000):
        assert torch.equal(block_select(scores, k).cpu(), reference_block(scores.cpu(), k))


@pytest.mark.parametrize(
    "n, k, expected",
    [
        (32_768, 2048, (2048, 4096)),
        (131_072, 1024, (4096, 4096)),
        (1 << 20, 1024, (8192, 8192)),
        (20_000, 8192, (2048, 16384)),
        (1_000_000, 20_000, (16384, 32768)),
        (1 << 24, 1024, (16384, 32768)),
    ],
)
def test_a_longer_row_takes_a_larger_sample(n, k, expected):
    assert tiles(n, k) == expected


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n, k", [(16_384, 4096), (16_385, 4096), (131_072, 1024), (1_000_000, 20_000), (1 << 20, 1024)]
)
def test_long_contexts(n, k):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 4, n, generator=generator)
    scores[1] = (scores[1] * 10).round()  # many ties
    scores[0, 0, n // 2 :] = -math.inf
    scores[0, 1] = scores[0, 1].bfloat16().float()
    scores[0, 2, k // 2 :] = -math.inf
    scores[0, 3] = scores[0, 3].sort().values
    config = Config(clusters=False)
    assert torch.equal(block_select(scores.cuda(), k, config=config).cpu(), reference_block(scores, k))


@pytest.mark.gpu
@pytest.mark.parametrize("batch, n, k", [(8, 32_768, 2048), (1, 131_072, 1024)])
@pytest.mark.parametrize(
    "config",
    [Config(), Config(clusters=False), Config(clusters=False, chunk=8192, warps=8)],
    ids=["default", "sample", "large chunks"],
)
def test_captured_beside_other_kernels(batch, n, k, config):
    """A graph that changes the scores just before and reads the ids just after, replayed many times."""
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randn(6, batch, 8, n, generator=generator, device="cuda")
    ids = [torch.empty(batch, 8, k, dtype=torch.int32, device="cuda") for _ in scores]
    found = torch.empty(6, batch, 8, k, dtype=torch.int32, device="cuda")
    work, shift = torch.empty_like(scores[0]), torch.zeros((), device="cuda")

    def run():
        for i, one in enumerate(scores):
            torch.mul(one, 1.0 + shift, out=work)
            token_select(work, None, k, 64, out=ids[i], config=config)
            found[i].copy_(ids[i])

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for turn in range(20):
        scores.copy_(scores.roll(1, -1))
        graph.replay()
        if turn % 10 == 9:
            assert torch.equal(found.cpu(), torch.stack([reference_token(one.cpu(), None, k, 64) for one in scores]))
