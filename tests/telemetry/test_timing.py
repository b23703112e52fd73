"""TokenTimer with a clock that the test moves, and inside generate()."""

from __future__ import annotations

import pytest
import torch
from models import model, prompt
from transformers.generation.streamers import BaseStreamer

from hf_sparsekv.telemetry.timing import TokenTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow(BaseStreamer):
    """A streamer that takes half a second a call."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.got, self.ended = clock, [], False

    def put(self, value):
        self.got.append(value.tolist())
        self.clock.now += 0.5

    def end(self):
        self.ended = True


def feed(timer: TokenTimer, clock: Clock, *steps: tuple[float, list]) -> None:
    for seconds, tokens in steps:
        clock.now += seconds
        timer.put(torch.tensor(tokens))


def test_first_token_and_steps():
    clock = Clock()
    timer = TokenTimer(clock=clock)
    feed(timer, clock, (1.0, [[1, 2, 3]]), (4.0, [7]), (0.1, [8]), (0.3, [9]), (0.2, [9]))
    t = timer.summary()
    assert (t.tokens, t.ttft_s) == (4, 5.0)
    assert t.tpot_s == pytest.approx(0.2)
    assert (t.low_s, t.high_s) == (pytest.approx(0.12), pytest.approx(0.28))
    assert t.total_s == pytest.approx(5.6)
    assert "4 tokens, first after 5.00 s, then 200.0 ms each" in str(t)


def test_several_tokens_a_step():
    clock = Clock()
    timer = TokenTimer(clock=clock)
    feed(timer, clock, (0.0, [[1, 2]]), (2.0, [[5, 6]]), (0.9, [[7, 8, 9]]))
    t = timer.summary()
    assert (t.tokens, t.ttft_s) == (5, 2.0)
    assert timer.steps_s == [pytest.approx(0.3)] * 3


def test_batch_is_one_token_a_row():
    clock = Clock()
    timer = TokenTimer(clock=clock)
    feed(timer, clock, (0.0, [[1, 2], [3, 4]]), (1.0, [5, 6]), (1.0, [7, 8]))
    assert timer.summary().tokens == 2


def test_passes_on_and_leaves_its_time_out():
    clock = Clock()
    slow = Slow(clock)
    timer = TokenTimer(slow, clock=clock)
    feed(timer, clock, (0.0, [[1, 2]]), (1.0, [5]), (0.1, [6]), (0.1, [7]))
    timer.end()
    assert timer.summary().tpot_s == pytest.approx(0.1)
    assert slow.got == [[[1, 2]], [5], [6], [7]]
    assert slow.ended


def test_leaves_no_time_out_beside_which_the_next_token_is_made():
    clock = Clock()
    slow = Slow(clock)
    timer = TokenTimer(slow, clock=clock)
    feed(timer, clock, (0.0, [[1, 2]]))
    timer.runs_ahead()
    assert not timer.waits
    feed(timer, clock, (1.0, [5]), (0.1, [6]), (0.1, [7]))
    timer.end()
    assert timer.summary().tpot_s == pytest.approx(0.6)
    feed(timer, clock, (0.0, [[1]]), (1.0, [2]), (1.0, [3]))
    assert timer.summary().tpot_s == pytest.approx(1.0), "another call, which waits"


def test_start_forgets():
    clock = Clock()
    timer = TokenTimer(clock=clock)
    feed(timer, clock, (0.0, [[1]]), (1.0, [2]), (1.0, [3]))
    timer.start()
    assert timer.summary().tokens == 0
    assert str(timer.summary()) == "no token"
    feed(timer, clock, (0.0, [[1]]), (3.0, [2]))
    t = timer.summary()
    assert (t.tokens, t.ttft_s, t.tpot_s) == (1, 3.0, None)


def test_another_call_begins_anew():
    clock = Clock()
    timer = TokenTimer(clock=clock)
    feed(timer, clock, (0.0, [[1]]), (1.0, [2]), (1.0, [3]))
    timer.end()
    assert timer.summary().tokens == 2
    feed(timer, clock, (7.0, [[1, 2, 3, 4]]), (3.0, [5]))
    assert (timer.summary().tokens, timer.summary().ttft_s) == (1, 3.0)


@pytest.mark.quick
def test_generate_feeds_it():
    timer = TokenTimer()
    inputs = prompt(2, 9)
    out = model("llama").generate(**inputs, max_new_tokens=6, do_sample=False, streamer=timer)
    t = timer.summary()
    assert t.tokens == out.shape[1] - 9 == 6
    assert 0 < t.low_s <= t.tpot_s <= t.high_s
