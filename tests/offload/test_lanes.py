"""How slots are shared out to rows, and that what a row holds stays with it."""

from __future__ import annotations

import random

import pytest
import torch

from hf_sparsekv.offload.lanes import Lanes, even_lanes, moved
from hf_sparsekv.policies.row_tokens import SPILL, needed_room

CPU = torch.device("cpu")
SIZE = 8


def check(lanes: Lanes) -> None:
    """Lanes lie apart, at whole blocks, and the device knows them."""
    end = 0
    for first, room in sorted(lane for lane in lanes.held if lane[1]):
        assert first >= end and first % SIZE == room % SIZE == 0
        end = first + room
    assert end <= lanes.slots and lanes.free == lanes.slots - sum(room for _, room in lanes.held)
    assert lanes.on(CPU).tolist() == [list(lane) for lane in lanes.held]


def test_first_fit():
    lanes = Lanes(4, 100, SIZE)
    assert lanes.slots == lanes.free == 96
    assert [lanes.give(row, 16) for row in range(4)] == [[]] * 4
    assert lanes.held == [(0, 16), (16, 16), (32, 16), (48, 16)]
    assert lanes.give(1, 0) == [] and lanes.held[1] == (0, 0)
    assert lanes.give(3, 32) == [], "it grows where it is"
    assert lanes.give(0, 8) == [] == lanes.give(0, 24), "into the gap that another has left"
    assert lanes.give(1, 16) == [] and lanes.held == [(0, 24), (80, 16), (32, 16), (48, 32)]
    check(lanes)


def test_a_lane_that_cannot_grow_in_place_moves_with_what_it_holds():
    lanes = Lanes(3, 64, SIZE)
    lanes.give(0, 16), lanes.give(1, 16)
    assert lanes.give(0, 24) == [(0, 32, 16)]
    assert lanes.give(2, 16) == [] and lanes.held == [(32, 24), (16, 16), (0, 16)]


def test_lanes_move_together_where_no_gap_is_large_enough():
    lanes = Lanes(4, 64, SIZE)
    for row in range(4):
        lanes.give(row, 16)
    lanes.give(0, 0), lanes.give(2, 0)
    assert lanes.give(0, 24) == [(48, 40, 16), (16, 24, 16)], "down before up"
    assert lanes.held == [(0, 24), (24, 16), (0, 0), (40, 16)]
    check(lanes)
    assert lanes.free == 8


def test_more_than_there_is():
    lanes = Lanes(2, 64, SIZE)
    lanes.give(0, 40)
    with pytest.raises(ValueError, match="32 slots were asked for, row 1 has 0 and 24 of 64 are free"):
        lanes.give(1, 32)
    with pytest.raises(ValueError, match="72 slots were asked for, row 0 has 40"):
        lanes.give(0, 72)
    assert lanes.held == [(0, 40), (0, 0)]


@pytest.mark.parametrize("at_once", [1, 1 << 20], ids=["layer by layer", "all at once"])
def test_anything_in_any_order_keeps_what_rows_hold(at_once, monkeypatch):
    """A memory of one number a slot: that of the row and of the slot in it."""
    monkeypatch.setattr("hf_sparsekv.offload.lanes._PIECE", at_once)
    chance, rows = random.Random(3), 5
    lanes = Lanes(rows, 160, SIZE)
    lanes.on(CPU)
    memory = torch.full((3, lanes.slots), -1)
    together = refused = 0
    for _ in range(3000):
        row, room = chance.randrange(rows), SIZE * chance.choice((0, 0, 1, 2, 3, 5, 8, 11))
        before = list(lanes.held)
        had = before[row][1]
        try:
            moves = lanes.give(row, room)
        except ValueError:
            assert room - had > lanes.free and lanes.held == before
            refused += 1
            continue
        together += len(moves) > 1
        moved((memory,), moves, 1)
        first, kept = lanes.held[row][0], min(room, had)
        memory[:, first + kept : first + room] = torch.arange(kept, room) + 1000 * row
        check(lanes)
        for one, (first, room) in enumerate(lanes.held):
            assert memory[0, first : first + room].tolist() == [1000 * one + i for i in range(room)]
            assert torch.equal(memory[0], memory[1]) and torch.equal(memory[0], memory[2])
    assert together > 20 and refused > 100


def test_an_interrupt_leaves_the_device_as_the_host_says():
    lanes = Lanes(2, 64, SIZE)

    class Stopped(torch.Tensor):
        def fill_(self, *args):
            raise KeyboardInterrupt

    lanes._on[CPU] = torch.zeros(2, 2, dtype=torch.int32).as_subclass(Stopped)
    with pytest.raises(KeyboardInterrupt):
        lanes.give(1, 16)
    check(lanes)


def test_even_lanes():
    assert even_lanes(3, 16, CPU).tolist() == [[0, 16], [16, 16], [32, 16]]


# ---------------------------------------------------------------------- working sets


def test_needed_room_literally():
    """The least room that leaves out no more than one in ``SPILL``."""
    chance = torch.Generator().manual_seed(1)
    held = torch.randint(0, 60, (40, 9), generator=chance)
    held[0], held[1], held[2, 1:] = 0, 7, 0
    for row, room in zip(held.tolist(), needed_room(held).tolist(), strict=True):

        def spills(room: int, row: list[int] = row) -> int:
            return sum(max(0, n - room) for n in row)

        assert spills(room) <= sum(row) // SPILL
        assert room == 0 or spills(room - 1) > sum(row) // SPILL


def test_one_head_that_wants_much_does_not_decide():
    """64 heads of 100 tokens and one of 300: nearly as if there were only those."""
    held = torch.full((1, 65), 100)
    held[0, 5] = 300
    assert 100 <= int(needed_room(held)) < 110
    held[0, :16] = 300
    assert int(needed_room(held)) > 250, "a quarter of them does"
