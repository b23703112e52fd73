"""Copies of chosen tokens: the kernels against their definition, and what the definition promises."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.storage.device_tokens import EMPTY, TokenSlots
from hf_sparsekv.ops.storage.device_tokens import bring_tokens as public_bring_tokens
from hf_sparsekv.ops.storage.device_tokens.reference import age_class, looked_at
from hf_sparsekv.ops.storage.device_tokens.reference import bring_tokens as reference
from hf_sparsekv.ops.storage.device_tokens.reference import locate_tokens as locate_reference
from hf_sparsekv.ops.storage.device_tokens.reference import young_tokens as young_reference
from hf_sparsekv.ops.storage.device_tokens.triton import Config, bring_tokens, locate_tokens, young_tokens
from hf_sparsekv.ops.storage.quantise.reference import dequantise, quantise

POISON = 12345
WINDOW, SMALL = 32, Config(listed=32, tile=4, copying=6)  # so that small cases take several of each


class Pair:
    """The same slots twice: on the CPU for the reference, and where the kernel runs."""

    def __init__(
        self, place, batch=2, heads=3, room=32, blocks=9, size=8, width=40, lanes=None, total=None, split=None
    ) -> None:
        lanes = [(row * room, room) for row in range(batch)] if lanes is None else lanes
        batch, total = len(lanes), total or batch * room
        self.place, self.size, self.total, self.columns = place, size, total, blocks * size
        self.kv, self.coded = place.randn(batch * blocks + 3, heads, size, width), {}
        self.stored = self.kv
        if split is not None:  # of codes
            self.stored, scales = quantise(self.kv, split)
            self.kv, self.coded = (
                dequantise(self.stored, scales, split, place.dtype),
                {"scales": scales, "split": split},
            )
        self.block_table = place.randperm(batch * blocks + 3)[: batch * blocks].view(batch, blocks)
        self.counters = [torch.zeros(2, dtype=torch.int64, device=where) for where in ("cpu", place.device)]

        def full(where, *shape, value):
            return torch.full(shape, value, dtype=torch.int32, device=where)

        self.held = [
            TokenSlots(
                torch.zeros(heads, total, width, dtype=place.dtype, device=where),
                full(where, heads, total, value=-1),
                full(where, heads, total, value=EMPTY),
                full(where, batch, heads, blocks * size, value=-1),
                full(where, batch, heads, value=0),
                torch.tensor(lanes, dtype=torch.int32, device=where),
            )
            for where in ("cpu", place.device)
        ]

    def choose(self, k: int, ordered: bool = False, least: int = 0) -> torch.Tensor:
        """``least`` to ``k`` columns of each row and head, padded with -1."""
        batch, heads = self.held[0].now.shape
        ids = self.place.rand(batch, heads, self.columns).argsort(-1)[..., :k].int()
        if ordered:
            ids = ids.sort(-1).values
        end = self.place.randint(least, k + 1, batch, heads, 1)
        return ids.masked_fill(torch.arange(ids.shape[-1], device=ids.device) >= end, -1)

    def bring(self, ids: torch.Tensor, used: torch.Tensor | None = None, enabled=None, how: dict | None = None):
        """Both; they agree, and slots and columns agree with each other."""
        cpu, there = self.held
        named = [{"used": used, "enabled": enabled, "counters": self.counters[i]} for i in (0, 1)]
        named[0] |= {name: named[0][name].cpu() for name in ("used", "enabled") if named[0][name] is not None}
        how = {"window": WINDOW, "config": SMALL} if how is None else how
        windows = {name: value for name, value in how.items() if name == "window"}
        named[0] |= {name: t.cpu() if name == "scales" else t for name, t in self.coded.items()}
        reference(ids.cpu(), self.stored.cpu(), self.block_table.cpu(), cpu, **named[0], **windows)
        bring_tokens(ids, self.stored, self.block_table, there, **named[1], **self.coded, **how)
        for name, want, got in zip(TokenSlots._fields, cpu, there):
            assert torch.equal(got.cpu(), want), name
        assert torch.equal(self.counters[1].cpu(), self.counters[0])
        self.consistent()

    def consistent(self) -> None:
        """Each slot that is taken holds its column's token, and the column knows its slot."""
        held, size = self.held[0], self.size
        kv, table = self.kv.cpu(), self.block_table.cpu()
        owned = torch.zeros(self.total, dtype=torch.bool)
        for row, (first, room) in enumerate(held.lanes.tolist()):
            lane = slice(first, first + room)
            owned[lane] = True
            for head in range(held.now.shape[1]):
                taken = (held.columns[head, lane] >= 0).nonzero().flatten()
                column = held.columns[head, lane][taken].long()
                assert torch.equal(held.slots[row, head, column], taken.int())
                assert int((held.slots[row, head] >= 0).sum()) == len(taken)
                stored = kv[table[row, column // size].long(), head, column % size]
                assert torch.equal(held.kv[head, lane][taken], stored)
        assert bool((held.columns[:, ~owned] == -1).all() and (held.stamps[:, ~owned] == EMPTY).all())

    def locate(self, ids: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
        """Places of both, which agree where they mean something, and lead to the tokens."""
        cpu, there = self.held
        counted = None if used is None else used.cpu()
        table = self.block_table.cpu()
        want = locate_reference(ids.cpu(), cpu.slots, cpu.lanes, table, self.total, self.size, used=counted)
        out = torch.full(ids.shape, POISON, dtype=torch.int32, device=ids.device)
        named = {"used": used, "out": out}
        got = locate_tokens(ids, there.slots, there.lanes, self.block_table, self.total, self.size, **named)
        assert got is out
        counts = torch.full(ids.shape[:2], ids.shape[-1]) if used is None else counted
        means = torch.arange(ids.shape[-1]) < counts[..., None]
        assert torch.equal(got.cpu()[means], want[means])
        pages, kv = cpu.kv.view(-1, self.size, self.kv.shape[-1]), self.kv.cpu()
        for row, head, i in means.nonzero().tolist():
            column, place = int(ids[row, head, i]), int(want[row, head, i])
            if column < 0:
                assert place == -1
                continue
            page, at = place // self.size, place % self.size
            token = pages[page, at] if page >= 0 else kv[-(page + 2), head, at]
            block = int(self.block_table[row, column // self.size])
            assert torch.equal(token, kv[block, head, column % self.size])
        return want


@pytest.mark.pairwise
@pytest.mark.parametrize("room", [8, 32, 40, 96])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("k", [1, 7, 33])
@pytest.mark.parametrize("ragged", [False, True])
def test_random_calls(place, room, batch, k, ragged):
    """Fewer slots than a selection has tokens, and more than there are tokens."""
    pair = Pair(place, batch, room=room)
    for _ in range(5):
        ids, used = pair.choose(k, ordered=not ragged), None
        if ragged:
            used = (ids >= 0).sum(-1).int()
            ids = torch.where(ids < 0, POISON, ids)  # is not read
        pair.bring(ids, used)
        pair.locate(ids, used)


@pytest.mark.pairwise
@pytest.mark.parametrize("room", [8, 40, 96])
@pytest.mark.parametrize("queries", [2, 3, 17])
@pytest.mark.parametrize("k", [1, 7, 33])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("split", [None, 24])
def test_several_queries_of_one_row(place, room, queries, k, ragged, split):
    """One selection: each token counts once, for the first query that has it. Some queries choose nothing."""
    pair = Pair(place, 1, room=room, split=split)
    heads = pair.held[0].now.shape[1]
    for turn in range(4):
        ids = place.rand(queries, heads, pair.columns).argsort(-1)[..., :k].int().sort(-1).values
        ids[1:, :, ::2] = ids[:1, :, ::2]  # much is chosen by several
        ids = ids.sort(-1).values
        ids[..., 1:] = ids[..., 1:].masked_fill(ids[..., 1:] == ids[..., :-1], pair.columns)
        used = place.randint(0, k + 1, queries, heads).int()
        used[queries // 2] = 0
        ids = ids.sort(-1).values
        used = torch.minimum(used, (ids < pair.columns).sum(-1).int())
        behind = torch.arange(k, device=ids.device) >= used[..., None]
        ids = ids.masked_fill(behind, pair.columns if ragged else -1)  # not read, or none
        pair.bring(ids, used if ragged else None)
        assert int(pair.held[0].now.max()) <= turn + 1
        whole = ids.masked_fill(behind, -1).transpose(0, 1).reshape(1, heads, -1)
        chosen = sum(len(mine[mine >= 0].unique()) for mine in whole[0])
        counted = int(pair.counters[0][0])
        assert counted == chosen if not turn else counted >= chosen


def test_queries_need_one_row_or_as_many(place):
    pair = Pair(place, 2)
    ids = pair.choose(4)[[0, 0, 1]]
    for bring in (reference, bring_tokens):
        with pytest.raises(ValueError, match="ids of 3 queries need the slots of one row or of as many, got 2"):
            bring(ids, pair.stored, pair.block_table, pair.held[1])


@pytest.mark.pairwise
@pytest.mark.parametrize("width, split", [(40, 24), (64, 32), (33, 16)])
@pytest.mark.parametrize("config", [SMALL, Config()])
def test_codes(place, width, split, config):
    """Slots get what codes stand for."""
    pair = Pair(place, width=width, split=split)
    for _ in range(3):
        ids = pair.choose(20)
        pair.bring(ids, how={"window": WINDOW, "config": config})
        pair.locate(ids)


@pytest.mark.parametrize("ragged", [False, True])
def test_rooms_of_rows_differ(place, ragged):
    """Rows with more room than others, with none, in any order, and slots of nobody between them."""
    pair = Pair(place, lanes=[(48, 8), (0, 0), (0, 40), (64, 96)], total=176)
    for _ in range(5):
        ids, used = pair.choose(33, ordered=not ragged), None
        if ragged:
            used = (ids >= 0).sum(-1).int()
            ids = torch.where(ids < 0, POISON, ids)
        pair.bring(ids, used)
        assert bool((pair.locate(ids, used)[1] < 0).all()), "what has no room is read where it lives"


def test_lanes_change_between_calls(place32):
    """They are read on the device: a row that grows at its end keeps what it holds."""
    pair = Pair(place32, lanes=[(0, 16), (40, 8)], total=64)
    ids = pair.choose(16)
    pair.bring(ids)
    before = [int((held >= 0).sum()) for held in pair.held[0].slots]
    for held in pair.held:
        held.lanes[0, 1] = 40
    assert [int((held >= 0).sum()) for held in pair.held[0].slots] == before
    for _ in range(3):
        pair.bring(ids)
        pair.locate(ids)
    assert pair.counters[0][0] > 2 * pair.counters[0][1], "with room for all they are copied once"


def test_who_chooses_nothing_does_not_grow_older(place32):
    """A row without a token in a step: what it chose last is as young as before."""
    pair = Pair(place32)
    pair.bring(pair.choose(9, least=1))
    before = pair.held[0].now[1].clone()
    for _ in range(3):
        ids = pair.choose(9, least=1)
        ids[1] = -1
        pair.bring(ids)
    now = pair.held[0].now
    assert torch.equal(now[1], before) and bool((now[0] == 4).all())


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_young_tokens(place32, steps):
    """Several layers at once, literally."""
    layers, heads, lanes, total = 3, 2, [(1024, 2048), (0, 0), (16, 1000)], 3100
    now = place32.randint(0, 40, layers, len(lanes), heads)
    stamps = place32.randint(0, 40, layers, heads, total)
    stamps[stamps % 5 == 0] = EMPTY
    lane = torch.tensor(lanes, dtype=torch.int32, device=place32.device)
    got = young_tokens(stamps, now, lane, steps)
    want = young_reference(stamps.cpu(), now.cpu(), lane.cpu(), steps)
    assert torch.equal(got.cpu(), want)
    for i, row, head in ((0, 0, 1), (2, 1, 0), (1, 2, 1)):
        held = stamps[i, head, lanes[row][0] : sum(lanes[row])].tolist()
        assert want[i, row, head] == sum(int(now[i, row, head]) - stamp < steps for stamp in held)
    assert young_tokens(stamps[:0], now[:0], lane, steps).shape == (0, 3, 2)


def test_young_tokens_of_calls(place32):
    """The choices of the last two of three selections."""
    pair, chosen = Pair(place32, 1, 1), ([0, 1, 2], [2, 3], [3, 9, 11])
    for ids in chosen:
        pair.bring(torch.tensor(ids, dtype=torch.int32, device=place32.device).view(1, 1, -1))
    held = pair.held[1]
    for steps in (1, 2, 3):
        got = young_tokens(held.stamps[None], held.now[None], held.lanes, steps)
        assert int(got) == len(set().union(*chosen[-steps:]))


def test_defaults(place16):
    """As it is called in use: one look at everything."""
    pair = Pair(place16, 1, 2, room=128, blocks=16, size=16, width=128)
    for _ in range(3):
        pair.bring(pair.choose(64, ordered=True), how={})


def test_the_oldest_give_way(place32):
    """Four of eight slots a selection; what was chosen before comes back only where it has been given up."""
    pair = Pair(place32, 1, 1, room=8, blocks=4, size=8)

    def ids(*columns: int) -> torch.Tensor:
        return torch.tensor(columns, dtype=torch.int32, device=place32.device).view(1, 1, -1)

    for columns in ((0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)):
        pair.bring(ids(*columns))
    assert pair.counters[0].tolist() == [12, 8]
    pair.bring(ids(8, 9))  # 4 and 5 have not been chosen for longest
    assert pair.held[0].columns.flatten().tolist() == [0, 1, 2, 3, 8, 9, 6, 7]
    assert (pair.locate(ids(0, 4, 9, -1)) >= 0).flatten().tolist() == [True, False, True, False]
    assert pair.held[0].now.item() == 4


def test_too_many_tokens(place32):
    """Tokens that are chosen now never give way to each other: the first ones get the slots."""
    pair = Pair(place32, 1, 1, room=8, blocks=4, size=8)
    many = torch.arange(31, -1, -1, dtype=torch.int32, device=place32.device).view(1, 1, -1)
    for _ in range(2):
        pair.bring(many)
        assert pair.held[0].columns.flatten().tolist() == list(range(31, 23, -1))
    assert pair.counters[0].tolist() == [64, 8]


def test_nothing_is_changed_when_disabled(place32):
    pair = Pair(place32)
    pair.bring(pair.choose(9))
    before = [t.clone() for t in pair.held[0]]
    pair.bring(pair.choose(9), enabled=torch.zeros(1, dtype=torch.int32, device=place32.device))
    assert all(torch.equal(t, was) for t, was in zip(pair.held[0], before))
    pair.bring(pair.choose(9, least=1), enabled=torch.ones(1, dtype=torch.int32, device=place32.device))
    assert torch.equal(pair.held[0].now, before[4].cpu() + 1)


def test_nothing_chosen(place32):
    pair = Pair(place32)
    for k in (0, 3):
        ids = torch.full((2, 3, k), -1, dtype=torch.int32, device=place32.device)
        pair.bring(ids)
        pair.locate(ids)
    assert not pair.held[0].now.any(), "a selection of nothing is none: what is held gets no older"


def test_no_blocks_yet(place32):
    """An empty table, as in a layer whose first block is not full."""
    ids = torch.full((1, 2, 3), -1, dtype=torch.int32, device=place32.device)
    slots, table, lanes = ids[..., :0], ids[0, :1, :0], torch.zeros(1, 2, dtype=torch.int32, device=place32.device)
    assert torch.equal(locate_tokens(ids, slots, lanes, table, 8, 8).cpu(), ids.cpu())
    assert torch.equal(locate_reference(ids.cpu(), slots.cpu(), lanes.cpu(), table.cpu(), 8, 8), ids.cpu())


def test_views(place32):
    """Ids and tables that are slices of larger buffers."""
    pair = Pair(place32)
    ids, table, kv = place32.nan(2, 5, 12, dtype=torch.int32), place32.nan(2, 20, dtype=torch.int32), pair.kv
    ids[:, 1:4, 2:9], table[:, 5:14] = pair.choose(7), pair.block_table
    pair.block_table, pair.kv = table[:, 5:14], torch.cat((kv, kv), dim=-1)[..., : kv.shape[-1]]
    pair.bring(ids[:, 1:4, 2:9])
    pair.locate(ids[:, 1:4, 2:9])


def test_slots_that_are_no_view(place32):
    pair = Pair(place32)
    held = pair.held[1]
    turned = held.columns.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="columns must be contiguous"):
        bring_tokens(pair.choose(3), pair.kv, pair.block_table, held._replace(columns=turned))
    lanes = held.lanes.T.contiguous().T
    with pytest.raises(ValueError, match="lanes must be contiguous"):
        locate_tokens(pair.choose(3), held.slots, lanes, pair.block_table, pair.total, pair.size)


def test_windows_take_turns():
    assert [looked_at(3, 0, now, 100, 32) for now in range(5)] == [(0, 32), (32, 64), (64, 96), (96, 100), (0, 32)]
    assert [looked_at(12, 0, now, 100, 32) for now in range(4)] == [(0, 64), (32, 96), (64, 100), (64, 100)]
    assert looked_at(3, 70, 0, 100, 32) == looked_at(12, 0, 0, 100, 32), "few that may give way"
    assert looked_at(40, 0, 2, 100, 32) == looked_at(26, 0, 3, 100, 32) == looked_at(1, 100, 1, 100, 32) == (0, 100)
    assert looked_at(0, 0, 3, 100, 32) == (96, 96) and looked_at(9, 0, 7, 20, 32) == (0, 20)


def test_ages():
    assert age_class(torch.tensor([0, 1, 2, 3, 4, 127, 128, 1 << 30])).tolist() == [0, 1, 2, 2, 3, 7, 8, 8]


def test_a_step_chooses_much_of_what_others_chose(place32):
    """Selections that change slowly are mostly there, whatever their order."""
    pair = Pair(place32, 1, 1, room=64, blocks=32, size=8)
    scores = place32.rand(1, 1, 256)
    for _ in range(12):
        scores = 0.9 * scores + 0.1 * place32.rand(1, 1, 256)
        pair.bring(scores.topk(24, sorted=True).indices.int())
    chosen, copied = pair.counters[0].tolist()
    assert chosen == 12 * 24 and copied < chosen / 3


@pytest.mark.gpu
def test_blocks_in_host_memory(place):
    """Read in place over the link; and what is not pinned takes the reference."""
    pair = Pair(place)
    kv, ids = pair.kv.cpu(), pair.choose(9)
    for host in (kv.pin_memory(), kv):
        held = TokenSlots(*(t.clone() for t in pair.held[1]))
        public_bring_tokens(ids, host, pair.block_table, held)
        want = TokenSlots(*(t.clone() for t in pair.held[0]))
        reference(ids.cpu(), kv, pair.block_table.cpu(), want)
        assert all(torch.equal(got.cpu(), t) for got, t in zip(held, want))
