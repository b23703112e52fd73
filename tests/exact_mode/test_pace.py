"""How many tokens are drafted, by what they cost and how many are accepted."""

from __future__ import annotations

import math
import random

import pytest

from hf_sparsekv.exact_mode.pace import Expected, Next, Pace
from hf_sparsekv.exact_mode.text import Added

pytestmark = pytest.mark.quick


def run(pace: Pace, accepts: float, draft: float, dense: float, more: float, tokens: int, rows: int = 1) -> dict:
    """A text of so many tokens: seconds, and how often there were how many drafts.

    A pass over ``n`` tokens takes ``dense + more * n``; the first of each kind ten times as long.
    """
    chance, seen, counts, seconds, made = random.Random(0), set(), {}, 0.0, 0.0
    while made < tokens:
        drafts, steps = pace.next(sparse=True)
        steps = min(steps, math.ceil(tokens - made))
        counts[drafts] = counts.get(drafts, 0) + 1
        if not drafts:
            cost = steps * dense
            pace.stepped(dense * (1 if "dense" in seen else 10))
            seen.add("dense")
            seconds, made = seconds + cost, made + steps
            continue
        got = []
        for _ in range(rows):
            agreed = [chance.random() < accepts for _ in range(drafts)]
            got.append(agreed.index(False) if False in agreed else drafts)
        verify = dense + more * (drafts + 1)
        first = 1 if drafts in seen else 10
        seen.add(drafts)
        added = Added(rows, sum(got), sum(n < drafts for n in got), min(got) + 1)
        pace.drafted(drafts, added, drafts * draft * first, verify * first)
        seconds, made = seconds + drafts * draft + verify, made + sum(got) / rows + 1
    return {"seconds": seconds, "counts": counts}


def test_dense_where_drafts_cost_as_much():
    """And little is lost to the attempts."""
    found = run(Pace(16), 0.9, draft=0.0053, dense=0.0054, more=0.0003, tokens=3000)
    assert found["seconds"] < 1.03 * 3000 * 0.0054
    assert set(found["counts"]) == {0, 3}


def test_many_drafts_where_they_are_cheap_and_right():
    found = run(Pace(16), 0.97, draft=0.005, dense=0.022, more=0.0002, tokens=2000, rows=8)
    assert found["seconds"] < 0.5 * 2000 * 0.022
    assert max(found["counts"], key=found["counts"].get) >= 5


def test_few_drafts_where_many_are_wrong():
    found = run(Pace(16), 0.6, draft=0.005, dense=0.022, more=0.0002, tokens=2000)
    assert 1 <= max(found["counts"], key=found["counts"].get) <= 4
    assert found["seconds"] < 0.85 * 2000 * 0.022


def test_drafts_begin_again_when_they_are_accepted_again():
    pace, costs = Pace(16), {"draft": 0.007, "dense": 0.01, "more": 0.0001, "tokens": 600}
    assert run(pace, 0.05, **costs)["counts"][0] > 4
    later = run(pace, 0.98, **{**costs, "draft": 0.003, "tokens": 3000})["counts"]
    assert sum(n for drafts, n in later.items() if drafts) > 50 * later.get(0, 0)


def test_as_many_as_are_asked_for_if_steps_select():
    pace = Pace(16, fixed=5)
    assert pace.next(sparse=True) == Next(5)
    assert pace.next(sparse=False).drafts == 0


def test_no_more_than_there_is_room_for():
    found = run(Pace(2), 0.99, draft=0.001, dense=0.02, more=0.0001, tokens=500)
    assert max(found["counts"]) == 2


@pytest.mark.few
@pytest.mark.parametrize("dense", [0.002, 0.005, 0.02])
@pytest.mark.parametrize("more", [0.0001, 0.002])
@pytest.mark.parametrize("share", [0.3, 0.8, 1.0, 1.3])
@pytest.mark.parametrize("accepts", [0.0, 0.5, 0.8, 0.9])
def test_never_much_slower_than_dense(accepts, share, more, dense):
    """However wrong and slow drafts are: after the first rounds, which any call has to make."""
    pace, costs = Pace(16), {"draft": share * dense, "dense": dense, "more": more}
    run(pace, accepts, **costs, tokens=40)
    assert run(pace, accepts, **costs, tokens=6000)["seconds"] < 1.03 * 6000 * dense


def test_drafts_that_cannot_pay_are_tried_rarely():
    found = run(Pace(16), 1.0, draft=0.0049, dense=0.005, more=0.001, tokens=5000)
    assert found["counts"][3] <= 3 + 5000 // 512


@pytest.mark.parametrize(
    ("faster", "slower", "tried"),
    [
        (0.0001, {}, False),
        (0.0015, {}, True),
        (0.0015, {4: 0.004, 8: 0.009, 16: 0.02}, False),
        (0.003, {4: 0.0005, 8: 0.001}, True),
        (0.01, {}, True),  # more than a step takes
    ],
)
def test_what_is_expected_says_whether_drafts_are_tried_at_once(faster, slower, tried):
    """Of dense steps of 5 ms. Otherwise they are tried once, much later."""
    pace = Pace(16)
    pace.expected = Expected(faster, slower)
    for _ in range(2):
        assert not pace.next(sparse=True).drafts
        pace.stepped(0.005)
    assert (pace.next(sparse=True) == Next(3)) == tried
    if not tried:
        pace.stepped(0.005)
        assert pace.next(sparse=True) == Next(3)


def test_drafts_of_the_text_itself_are_verified_while_they_are_right():
    """Nothing but their verification is lost to them, so they may be wrong more often than those of steps."""
    pace = Pace(16)
    run(pace, 0.8, draft=0.005, dense=0.009, more=0.0002, tokens=200)
    assert pace.looks_up(3) and 1 <= pace.best_of(2, 3) <= 2
    for _ in range(20):
        pace.looked_up(3, Added(1, 3, 0, 4), 0.0095)
    assert pace.best_of(16, 3) > 7, "wider ones are tried"
    assert pace.acceptance < 0.9, "steps draft as they did"
    for _ in range(200):
        pace.looked_up(3, Added(1, 0, 1, 1), 0.0095)
    assert not pace.looks_up(3)
    assert not Pace(16, fixed=4).looks_up(4)
