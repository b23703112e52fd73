"""The serving benchmark without a system: traces, the client's clocks, and figures of times that are known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.serving import client
from benchmarks.serving.client import (
    Figures,
    NotTogether,
    Played,
    RanDry,
    closed_loop,
    figures,
    goodput,
    play,
    saturate,
    together,
    within,
)
from benchmarks.serving.trace import Request, TraceConfig, make_trace
from hf_sparsekv.serving.request import Busy, Output

VOCABULARY = 97


# ---------------------------------------------------------------------- traces


def test_a_trace_has_the_lengths_and_gaps_that_it_says():
    config = TraceConfig(rate=2.0, seconds=20000, clip=32768, seed=3)
    made = make_trace(config)
    gaps = np.diff([0.0] + [r.arrival for r in made])
    assert len(made) == pytest.approx(40000, rel=0.02)
    assert gaps.mean() == pytest.approx(0.5, rel=0.02)
    assert gaps.std() == pytest.approx(0.5, rel=0.03)  # exponential
    prompts = np.array([r.prompt_tokens for r in made])
    outputs = np.log([r.output_tokens for r in made])
    assert np.median(prompts) == pytest.approx(8192, rel=0.03)
    assert (prompts == 32768).mean() == pytest.approx(0.083, abs=0.005)  # beyond two octaves: 1.386 deviations
    assert prompts.max() == 32768 and prompts.min() >= 64
    assert math.exp(np.median(outputs)) == pytest.approx(256, rel=0.03)
    assert outputs.std() == pytest.approx(0.7, rel=0.03)
    assert len({r.seed for r in made}) == len(made)


# ---------------------------------------------------------------------- a system of known times


class Time:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class Known:
    """One request after the other: ``first`` seconds to a first token, ``step`` to each other."""

    def __init__(self, clock: Time, first: float, step: float, refuses: tuple[int, ...] = ()) -> None:
        self.clock, self.first, self.step, self.refuses = clock, first, step, refuses
        self.free, self.seen = clock.now(), []

    def submit(self, ids, sampling):
        assert sampling.temperature == 0 and sampling.ignore_eos
        self.seen.append(ids)
        if len(self.seen) in self.refuses:
            raise Busy("too many wait")
        now = self.clock.now()
        begin = max(now, self.free)
        times = tuple(begin + self.first + self.step * i for i in range(sampling.max_tokens))
        self.free = times[-1]
        output = Output("", tuple(range(len(times))), "length", len(ids), queued_s=begin - now, token_times=times)
        return Done(output)


class Done:
    def __init__(self, output: Output) -> None:
        self.output = output

    def result(self, timeout=None) -> Output:
        return self.output


def test_times_count_from_the_arrival_in_the_trace():
    clock = Time()
    system = Known(clock, first=1.0, step=0.5)
    # The second arrives while the first is served, the third when all is over.
    requests = [Request(0.0, 5, 3, 1), Request(1.0, 6, 2, 2), Request(10.0, 7, 1, 3)]
    played = play(system, requests, VOCABULARY, clock=clock)
    assert [one.token_times for one in played] == [(1.0, 1.5, 2.0), (3.0, 3.5), (11.0,)]
    assert [one.queued_s for one in played] == [0.0, 1.0, 0.0]
    assert [one.ttft_s for one in played] == [1.0, 2.0, 1.0]
    assert [one.total_s for one in played] == [2.0, 2.5, 1.0]
    assert system.seen == [r.ids(VOCABULARY) for r in requests]
    found = figures(played)
    assert (found.requests, found.failed) == (3, 0)
    assert found.tokens_per_s == pytest.approx(6 / 11)
    assert found.requests_per_s == pytest.approx(3 / 11)
    # 1, 1, 2: the 99th percentile is 98 % of the way from the second to the third.
    assert found.ttft == pytest.approx((4 / 3, 1.0, 1.98))
    assert found.between == pytest.approx((0.5, 0.5, 0.5))
    assert found.queued == pytest.approx((1 / 3, 0.0, 0.98))


def test_what_fails_is_counted_and_told():
    clock = Time()
    requests = [Request(float(i), 5, 2, i) for i in range(4)]

    class Short(Known):
        def submit(self, ids, sampling):
            done = super().submit(ids, sampling)
            if len(self.seen) == 3:
                done.output = Output("", (1,), "stop", 5, token_times=(self.clock.now(),))
            return done

    played = play(Short(clock, 0.1, 0.1, refuses=(2,)), requests, VOCABULARY, clock=clock)
    assert [one.error for one in played] == [None, "Busy: too many wait", "1 tokens instead of 2", None]
    found = figures(played)
    assert (found.requests, found.failed) == (4, 2)
    assert not found.meets(10.0)
    none = figures([Played(requests[0], error="x")])
    assert none.tokens_per_s == 0 and not none.meets(10.0)


def served(tbt: float, delay: float, failed: int = 0) -> Figures:
    return Figures(10, failed, 1.0, 1.0, (1.0, 1.0, 1.0), (0.1, 0.1, tbt), (delay, 0.0, 9.0))


def test_goodput_is_the_highest_rate_that_keeps_both_limits():
    iteration = 0.02
    assert served(0.5, 2.0).meets(iteration)
    assert not served(0.501, 2.0).meets(iteration)
    assert not served(0.5, 2.01).meets(iteration)
    assert not served(0.1, 0.1, failed=1).meets(iteration)
    swept = {0.1: served(0.1, 0.1), 0.4: served(0.6, 0.1), 0.2: served(0.4, 1.9), 0.8: served(0.1, 0.1)}
    assert goodput(swept, iteration) == 0.2  # what is better behind a failure does not count
    assert goodput({0.1: served(9.0, 0.0)}, iteration) == 0.0


def test_rows_count_while_all_of_them_decode():
    rows = [[0.0, 1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5], [2.0, 2.5, 3.5]]
    found = together(rows, 1)
    assert found.seconds == 1.5  # from 2.0, the latest first token, to 3.5
    assert found.tokens == 1 + 2 + 2
    assert sorted(found.between_s) == [0.5, 1.0, 1.0, 1.0]
    assert found.answered == [3, 2, 2]  # by 2.75
    with pytest.raises(NotTogether, match="all 3 rows decoded together for 1 tokens only, 2 are needed"):
        together(rows, 2)
    assert together(rows, 2, held=True).tokens == 5
    held = [[0.0, 1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5], [2.0, 9.0]]  # the last one waits for the others
    assert together(held, 2, held=True).seconds == 2.0
    with pytest.raises(NotTogether):
        together(held, 1)
    clock = Time()
    with pytest.raises(NotTogether):  # one after the other
        closed_loop(Known(clock, 1.0, 0.1), client.fixed_rows(2, 5, 20, 0), VOCABULARY, 4)
    assert [r.output_tokens for r in client.fixed_rows(3, 5, 20, 7)] == [34, 27, 20]


def test_a_full_system_is_counted_for_a_time():
    rows = [[0.0, 1.0, 2.0], [1.5, 2.5, 3.5, 4.5], [4.0, 5.0]]
    found = within(rows, [3, 9, 2], 1.0, 4.0)
    assert (found.seconds, found.tokens, found.finished) == (3.0, 1 + 3 + 1, 1)
    assert found.rows == (1.0 + 2.5 + 0.0) / 3  # the second has not ended, the third begins at the end
    assert found.between_s == [1.0, 1.0, 1.0]

    class Cancelled(Done):
        def __init__(self, output, clock) -> None:
            super().__init__(output)
            self.clock, self.at = clock, None

        def cancel(self):
            self.at = self.clock.now()

        def result(self, timeout=None):
            return SimpleNamespace(token_times=tuple(t for t in self.output.token_times if t <= self.at))

    class OneByOne(Known):
        def submit(self, ids, sampling):
            return Cancelled(super().submit(ids, sampling).output, self.clock)

    clock = Time()
    requests = [Request(0.0, 5, 4, seed) for seed in range(4)]
    looks = []
    given = {"clock": clock, "look": lambda: looks.append(clock.now())}
    found = saturate(OneByOne(clock, 1.0, 0.5), requests, VOCABULARY, 1.0, 6.0, **given)
    assert looks == [1001.0, 1007.0]
    assert clock.now() == 1007.0
    assert (found.seconds, found.tokens, found.finished) == (6.0, 3 + 4 + 3, 2)  # the first one came at the beginning
    with pytest.raises(RanDry, match="all 4 requests had begun to answer within 12 s: give a trace of more"):
        saturate(OneByOne(clock, 1.0, 0.5), requests, VOCABULARY, 1.0, 11.0, clock=clock)
