"""Which rows decode: Algorithm 1 of SparseServe, and what it leaves open."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from hf_sparsekv.serving.admission import OVERTAKEN, READMIT, SPARE, Candidate, admit, room_for
from hf_sparsekv.serving.reading_order import ReadingOrder
from hf_sparsekv.serving.room import Room
from hf_sparsekv.serving.sampling import Sampling
from hf_sparsekv_config.serving import ServingConfig


def test_first_come_first_served_while_they_fit():
    rows = [Candidate(40), Candidate(30), Candidate(30), Candidate(10)]
    assert admit(rows, 100) == [True, True, False, True]  # the third waits, the last one passes it
    assert [row.overtaken for row in rows] == [0, 0, 1, 0]
    assert admit(rows, 100) == [True, True, False, True]
    assert rows[2].overtaken == 1  # who runs already passes nobody


def test_more_room_than_was_counted():
    """So that little of what a step chooses has no copy; no more than the row has tokens, unless more was counted."""
    assert room_for(0, 320) == 0, "nothing is known"
    assert room_for(100, 320) == round(SPARE * 100) > 100
    assert room_for(300, 320) == 320
    assert room_for(400, 320) == 400


def test_the_oldest_row_runs_whatever_it_needs():
    rows = [Candidate(500), Candidate(1)]
    assert admit(rows, 100) == [True, False]
    assert admit(rows[1:], 0) == [True]


def test_what_was_held_back_comes_back_when_there_is_room_beside_it():
    old, late = Candidate(50), Candidate(48)
    assert admit([old, late], 100) == [True, False]  # 98 of 100: it would go again soon
    old.need = 100 * READMIT - 48
    assert admit([old, late], 100) == [True, True]
    old.need = 52
    assert admit([old, late], 100) == [True, True]  # it stays as long as it fits
    old.need = 53
    assert admit([old, late], 100) == [True, False]


def test_a_request_is_overtaken_a_few_times_only():
    old, large = Candidate(50), Candidate(60)
    small = []
    for _ in range(OVERTAKEN + 5):
        small.append(Candidate(1))
        admit([old, large, *small], 100)
    assert large.overtaken == OVERTAKEN
    assert [row.runs for row in small] == [True] * OVERTAKEN + [False] * 5
    assert admit([large, *small], 100)[0] and large.overtaken == 0


def test_never_more_than_fits_beside_the_oldest():
    draw = random.Random(3)
    rows: list[Candidate] = []
    for _ in range(500):
        if draw.random() < 0.3 and len(rows) < 20:
            rows.append(Candidate(draw.randint(0, 60)))
        elif rows and draw.random() < 0.3:
            del rows[draw.randrange(len(rows))]
        for row in rows:
            row.need = max(0, row.need + draw.randint(-2, 2))
        found = admit(rows, 100)
        assert [row.runs for row in rows] == found and (not rows or found[0])
        used = sum(row.need for row in rows if row.runs)
        assert used <= max(100, rows[0].need if rows else 0)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("by_need", [False, True])
@pytest.mark.parametrize("overtaken", [0, 1, 2])
def test_a_row_for_each_and_one_more_where_a_row_waits_or_may(overtaken, by_need, waits):
    """A waiting row moves out of the way of those that decode; requests that are overtaken may have to wait."""
    needed = 2 + 1 + overtaken + (waits or (by_need and overtaken > 0))
    for most in (needed - 1, needed):
        rows = SimpleNamespace(rows=(0, 1), active=(0,) if waits else (0, 1), max_rows=most, slots=64 * by_need)
        room = Room(SimpleNamespace(rows=rows, serving=SimpleNamespace(working_set=True)), None)
        assert room.has_place(overtaken) == (most == needed)


@pytest.mark.parametrize(("left", "in_a_turn"), [(40, 100), (100, 40), (100, 100)])
def test_only_a_prompt_that_is_read_in_one_turn_and_shorter_than_what_is_left_overtakes(left, in_a_turn):
    """What is left of the one in prefill counts, not its length; and no pass is longer than a chunk."""
    longest = min(left - 1, in_a_turn, 64)
    for tokens in (longest, longest + 1):
        request = SimpleNamespace(ids=range(tokens), blocks=1, known=(0, 0, 0), arrived=0.0, begun=0.0)
        request.sampling = Sampling()
        pace = SimpleNamespace(tokens_in=lambda ms, at: in_a_turn)
        rows = SimpleNamespace(cache=SimpleNamespace(config=SimpleNamespace(block_size=16)))
        work = SimpleNamespace(
            serving=ServingConfig(chunk=64), pace=pace, reading=SimpleNamespace(left=left), rows=rows
        )
        queue_s = SimpleNamespace(add=lambda seconds: None)
        intake = SimpleNamespace(waiting=[request], counts=SimpleNamespace(queue_s=queue_s))
        blocks = SimpleNamespace(fits=lambda request, others: True, reserve=lambda request: None)
        order = ReadingOrder(work, intake, blocks, SimpleNamespace(has_place=lambda overtaken: overtaken == 1))
        order.reading = SimpleNamespace(blocks=9)
        assert order.turn() is (request if tokens == longest else order.reading)
        assert order.turn() is order.reading, "every second turn is the longer prompt's"
