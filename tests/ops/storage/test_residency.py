"""Pages of chosen blocks: the kernels against their definition, and what the definition promises."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.storage.residency import FREE, PageState
from hf_sparsekv.ops.storage.residency.reference import residency as reference
from hf_sparsekv.ops.storage.residency.reference import windows
from hf_sparsekv.ops.storage.residency.triton import Config, residency

POISON = 12345
STATE = ("owner", "stamp", "hand", "now", "enabled", "counters")
SMALL = {"window": 32, "config": Config(look=32, tile=32)}  # so that small cases take several of each


class Pair:
    """The same pages twice: on the CPU for the reference, and where the kernel runs."""

    def __init__(self, place, pages: int, tables: list[tuple[int, int]]) -> None:
        self.place, self.states = place, []
        for device in ("cpu", place.device):
            state = PageState.empty(pages, device, most_layers=len(tables))
            for layer, shape in enumerate(tables):
                state.set_table(layer, torch.full(shape, -1, dtype=torch.int32, device=device))
            self.states.append(state)

    def advance(self) -> None:
        for state in self.states:
            state.now += 1

    def call(self, ids: torch.Tensor, block_table: torch.Tensor, layer: int, keep: int, **how) -> tuple:
        """One call of both; they agree. The kernel writes into what was poisoned."""
        window = {"window": how["window"]} if "window" in how else {}
        expected = reference(ids.cpu(), block_table.cpu(), self.states[0], layer, keep, **window)
        given = {
            "page_ids": torch.full(ids.shape, POISON, dtype=torch.int32, device=self.place.device),
            "copies": torch.full((ids.numel(), 2), POISON, dtype=torch.int32, device=self.place.device),
            "n_copies": torch.full((1,), POISON, dtype=torch.int32, device=self.place.device),
        }
        got = residency(ids, block_table, self.states[1], layer, keep, **given, **how)
        assert all(g is out for g, out in zip(got, given.values()))
        n = int(expected[2])
        assert int(got[2]) == n
        assert torch.equal(got[0].cpu(), expected[0])
        assert torch.equal(got[1][:n].cpu(), expected[1][:n])
        for name in STATE:
            assert torch.equal(getattr(self.states[1], name).cpu(), getattr(self.states[0], name)), name
        for table, other in zip(*(state.page_tables for state in self.states)):
            assert torch.equal(other.cpu(), table)
        return expected


def choose(place, batch: int, heads: int, k: int, n: int) -> torch.Tensor:
    """Ascending ids of 0 .. k of ``n`` blocks, -1 at the end."""
    ids = place.rand(batch, heads, n).argsort(-1)[..., :k]
    keep = place.randint(0, k + 1, batch, heads, 1)
    ids = ids.masked_fill(torch.arange(ids.shape[-1], device=ids.device) >= keep, n).sort(-1).values
    return torch.nn.functional.pad(ids.masked_fill(ids == n, -1), (0, k - ids.shape[-1]), value=-1).int()


@pytest.mark.pairwise
@pytest.mark.parametrize("pages", [1, 31, 32, 70, 200])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("keep", [0, 1])
def test_random_calls(place32, pages, batch, keep):
    """Two layers with different heads and pool sizes; rows share blocks; some entries of the block table are -1."""
    pair = Pair(place32, pages, [(40, 2), (25, 3)])
    for step in range(4):
        for layer, (capacity, heads) in enumerate(((40, 2), (25, 3))):
            ids = choose(place32, batch, heads, 9, 20)
            block_table = torch.stack([place32.randperm(capacity)[:20] for _ in range(batch)])
            if batch > 1 and step % 2:
                block_table[1] = block_table[0]
            block_table[-1, 13] = -1
            pair.call(ids, block_table, layer, keep, **SMALL)
        pair.advance()


def test_defaults(place32):
    """As it is called in use."""
    pair = Pair(place32, 100, [(64, 4)])
    block_table = torch.arange(64, dtype=torch.int32, device=place32.device).view(2, 32)
    for _ in range(3):
        pair.call(choose(place32, 2, 4, 16, 32), block_table, 0, 1)
        pair.advance()


def test_no_blocks(place32):
    pair = Pair(place32, 4, [(8, 2)])
    block_table = torch.full((2, 5), -1, dtype=torch.int32, device=place32.device)
    for k in (0, 3):
        ids = torch.full((2, 2, k), -1, dtype=torch.int32, device=place32.device)
        page_ids, _, n = pair.call(ids, block_table, 0, 1)
        assert (page_ids == -1).all() and n == 0


def test_views(place32):
    """Ids and physical blocks that are slices of larger buffers."""
    pair = Pair(place32, 30, [(64, 2)])
    ids, block_table = place32.nan(2, 3, 12, dtype=torch.int32), place32.nan(2, 40, dtype=torch.int32)
    ids[:, 1:, 2:9] = choose(place32, 2, 2, 7, 20)
    block_table[:, 5:25] = torch.stack([place32.randperm(64)[:20] for _ in range(2)])
    pair.call(ids[:, 1:, 2:9], block_table[:, 5:25], 0, 0, **SMALL)


def one_row(place, *blocks: int) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int32, device=place.device).view(1, 1, -1)


@pytest.fixture
def line(place32):
    """Four pages under one row of one head, whose block ``b`` lies in physical block ``b``."""
    pair = Pair(place32, 4, [(100, 1)])
    block_table = torch.arange(100, dtype=torch.int32, device=place32.device)[None]

    def choose_blocks(*blocks: int, keep: int = 0) -> list[int]:
        return pair.call(one_row(place32, *blocks), block_table, 0, keep)[0].flatten().tolist()

    choose_blocks.pair = pair
    return choose_blocks


def test_least_recently_used_goes_first(line):
    assert line(10, 11, 12) == [0, 1, 2]
    line.pair.advance()
    assert line(10, 12) == [0, 2]
    line.pair.advance()
    assert line(20) == [3]  # a free page
    assert line(21) == [1]  # 11, two steps old
    assert line(22, 23) == [0, 2]
    assert line(24) == [-26]  # all are of this step


def test_what_is_in_use_stays(line):
    assert line(10, 11, 12, 13, keep=1) == [0, 1, 2, 3]
    line.pair.advance()
    assert line(10, 20, keep=1) == [0, -22]  # of the last step
    line.pair.advance()
    assert line(20, 21, 22, 23, keep=1) == [1, 2, 3, -25]  # page 0 was chosen in the last step


def test_a_block_of_two_rows_is_fetched_once(place32):
    pair = Pair(place32, 3, [(10, 1)])
    block_table = torch.tensor([[4, 5, 6], [7, 5, 4], [9, 8, 5]], dtype=torch.int32, device=place32.device)
    ids = torch.tensor([[[0, 1]], [[1, 2]], [[1, 2]]], dtype=torch.int32, device=place32.device)
    page_ids, copies, n = pair.call(ids, block_table, 0, 0)
    assert page_ids.flatten().tolist() == [0, 1, 1, 0, 2, 1]
    assert copies[: int(n)].tolist() == [[4, 0], [5, 1], [8, 2]]
    assert pair.states[0].counters.tolist() == [6, 0, 3, 0]


def test_blocks_without_a_frame_leave_no_claim(place32):
    pair = Pair(place32, 1, [(10, 1)])
    block_table = torch.tensor([[4, 5], [5, 4]], dtype=torch.int32, device=place32.device)
    ids = torch.tensor([[[0, 1]], [[0, 1]]], dtype=torch.int32, device=place32.device)
    page_ids, _, n = pair.call(ids, block_table, 0, 0)
    assert page_ids.flatten().tolist() == [0, -7, -7, 0] and n == 1
    assert pair.states[0].page_tables[0].flatten().tolist() == [-1] * 4 + [0] + [-1] * 5
    assert pair.states[0].counters.tolist() == [4, 0, 1, 2]


def test_disabled_it_only_looks(place32):
    pair = Pair(place32, 4, [(20, 2)])
    block_table = torch.arange(20, dtype=torch.int32, device=place32.device).view(2, 10)
    pair.call(choose(place32, 2, 2, 3, 10), block_table, 0, 0)
    before = [getattr(pair.states[0], name).clone() for name in STATE if name != "enabled"]
    for state in pair.states:
        state.enabled.zero_()
    page_ids, _, n = pair.call(choose(place32, 2, 2, 8, 10), block_table, 0, 0)
    assert n == 0 and (page_ids >= 0).any() and (page_ids < -1).any()
    after = [getattr(pair.states[0], name) for name in STATE if name != "enabled"]
    assert all(torch.equal(a, b) for a, b in zip(before, after))


def test_old_ages_count_as_the_same(place32):
    pair = Pair(place32, 40, [(100, 1)])
    generator = torch.Generator().manual_seed(1)
    stamp = torch.randint(1, 700, (40,), generator=generator, dtype=torch.int32)
    stamp[::7] = FREE
    for state in pair.states:
        state.stamp.copy_(stamp)
        state.now.fill_(700)
        state.hand.fill_(17)
    block_table = torch.arange(100, dtype=torch.int32, device=place32.device)[None]
    pair.call(one_row(place32, *range(20, 35)), block_table, 0, 1, **SMALL)


def test_the_search_is_bounded():
    assert windows(1, 10**6, 8192) == (1, 4)
    assert windows(8192, 10**6, 8192) == (4, 7)
    assert windows(8192, 5000, 8192) == (1, 1)
    assert windows(0, 5000, 64) == (0, 3)


def test_bad_tables(place32):
    state = PageState.empty(3, place32.device, most_layers=1)
    table = torch.full((5, 4), -1, dtype=torch.int32, device=place32.device)
    for bad in (table.long(), table[:, ::2], table[0]):
        with pytest.raises(ValueError, match="contiguous int32"):
            state.set_table(0, bad)
    state.set_table(0, table)
    with pytest.raises(ValueError, match="at most 1 layers"):
        state.set_table(1, table)


@pytest.mark.gpu
def test_many_frames_on_the_device():
    """At the sizes of use: a million pages, 8192 entries a call."""
    from types import SimpleNamespace

    generator = torch.Generator().manual_seed(0)
    pair = Pair(SimpleNamespace(device="cuda"), 1_000_000, [(4096, 8)] * 3)
    block_table = torch.randperm(4096, generator=generator).int().view(8, 512).cuda()
    for state in pair.states:  # old contents without owners
        state.stamp.copy_(torch.randint(1, 400, (1_000_000,), generator=torch.Generator().manual_seed(1)))
        state.now.fill_(400)
    for step in range(6):
        for layer in range(3):
            ids = torch.rand(8, 8, 512, generator=generator).argsort(-1)[..., :128].sort(-1).values.int().cuda()
            pair.call(ids, block_table, layer, step % 2)
        pair.advance()


@pytest.mark.gpu
def test_captured():
    """A captured call goes on from where the pages are."""
    state, other = (PageState.empty(64, device) for device in ("cuda", "cpu"))
    for s in (state, other):
        s.set_table(0, torch.full((100, 2), -1, dtype=torch.int32, device=s.stamp.device))
    block_table = torch.arange(100, dtype=torch.int32).view(2, 50)
    ids = torch.zeros(2, 2, 16, dtype=torch.int32, device="cuda")
    held = [torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((2, 2, 16), (64, 2), (1,))]
    on_device = block_table.cuda()

    def run() -> None:
        residency(ids, on_device, state, 0, 1, page_ids=held[0], copies=held[1], n_copies=held[2])
        state.now.add_(state.enabled)

    state.enabled.zero_()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    state.enabled.fill_(1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        chosen = torch.rand(2, 2, 50, generator=generator).argsort(-1)[..., :16].sort(-1).values.int()
        ids.copy_(chosen)
        graph.replay()
        expected = reference(chosen, block_table, other, 0, 1)
        other.now += 1
        assert torch.equal(held[0].cpu(), expected[0])
        assert int(held[2]) == int(expected[2])
    assert torch.equal(state.counters.cpu(), other.counters)
