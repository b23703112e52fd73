"""The demo's times are those of a user's ``generate()``: a lane adds nothing to a token, and its loop does not wait."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from inside import runs_ahead
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("gradio", reason="the demo needs gradio: pip install -e '.[demo]'")

from captured import Event, imitated
from demos import a_task, makers_of, probe_model, read_document, run
from transformers import AutoModelForCausalLM

from demo import race
from demo.models import PROBE, PROBE_PATH, Loaded, Models
from demo.race import Session, Stepped
from demo.stopwatch import Stopwatch
from demo.turns import Turns
from hf_sparsekv import SparseCache
from hf_sparsekv.cache_name import generate_over
from hf_sparsekv.cuda_graph.late_stop import LateStop

TOKENS = 24


@pytest.fixture(scope="module")
def probe():
    return probe_model()


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def counted(probe, monkeypatch) -> dict[str, Counter[str]]:
    """From here on, by thread: the operators of each ``generate()``."""
    found: dict[str, Counter[str]] = {}
    generate = type(probe.model).generate

    def watched(self, *args, **kwargs):
        with Operators() as operators:
            out = generate(self, *args, **kwargs)
        found[threading.current_thread().name] = operators.counts
        return out

    monkeypatch.setattr(type(probe.model), "generate", watched)
    return found


def test_a_lane_runs_no_operator_that_generate_does_not(probe, monkeypatch):
    """Between two looks at the counters; these come with a turn's end, whatever the number of its tokens."""
    monkeypatch.setattr(race, "TURN", 1e9)
    task, session, looks = a_task(probe, new_tokens=TOKENS), Session(Turns()), []
    with session.running():
        list(read_document(session, probe, task))  # the document, without an answer
        caches = [make() for _, make in makers_of(session, probe, task)]
    found, stats = counted(probe, monkeypatch), SparseCache.stats
    ids = torch.tensor([[*task.context, *task.question]])
    go = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": probe.model.config.vocab_size}
    plain = []
    for cache in caches:
        probe.model.generate(ids, attention_mask=torch.ones_like(ids), **generate_over(cache), **go, pad_token_id=0)
        plain.append(found.pop(threading.current_thread().name))
    monkeypatch.setattr(SparseCache, "stats", lambda self: looks.append(threading.current_thread()) or stats(self))
    view, _ = run(session, probe, task)
    assert len(view.lanes[1].ids) == TOKENS and view.lanes[1].stats.sparse_calls > 0
    assert found["race-0"] == plain[0]
    more, layers = found["race-1"] - plain[1], view.lanes[1].stats.layers
    read = more.total() / layers  # some 15 a layer, of two looks; operators choose their ways by the numbers they see
    assert read < TOKENS - 1, f"an operator more in each layer's step, where looks alone should read: {more}"
    assert len(looks) == 3, "at first, after the last token, and in all"


def test_an_optimised_model_does_not_wait_for_its_tokens(probe, monkeypatch):
    """Its loop runs ahead in the race, and tokens, statistics and conversation are as if it did not."""
    loops, begin = [], LateStop.__init__
    monkeypatch.setattr(LateStop, "__init__", lambda self, *given: loops.append(self) or begin(self, *given))
    runs_ahead(monkeypatch)
    monkeypatch.setattr(torch, "Event", Event)
    task = a_task(probe, new_tokens=TOKENS, lanes=(1,))
    expected, _ = run(Session(Turns()), probe, task)
    kind = {"attn_implementation": "sparsekv", "dtype": torch.float32}
    net, runner = imitated(make=lambda: AutoModelForCausalLM.from_pretrained(PROBE_PATH, **kind).eval())
    session, fast = Session(Turns()), Loaded(probe.name, net, probe.language)
    for turn in (0.0, 1e9):
        monkeypatch.setattr(race, "TURN", turn)
        for follows in (False, True):
            view, events = run(session, fast, replace(task, go_on=not follows))
            lane = view.lanes[1]
            assert lane.ended.error is None and lane.blocks is not None
            assert follows or lane.ids == expected.lanes[1].ids
            looks = [event for event in events if isinstance(event, Stepped) and event.memory]
            assert len(looks) == (2 if turn else len(lane.ids))
        with session.running():
            session.new_talk()
    assert len(loops) == 4 and runner.replays > 2 * TOKENS - 10


@pytest.mark.gpu
def test_on_a_gpu_the_host_waits_for_no_token_of_a_lane(monkeypatch):
    """Nor does a look at the counters: there is one after the last token."""
    from benchmarks.decoding import synchronisations

    monkeypatch.setattr(race, "TURN", 1e9)
    fast, totals = Models(torch.device("cuda")).load(PROBE), ([], [])

    class Counted(Session):
        def stepped(self, number: int) -> None:
            totals[number].append(so_far().total())

    with synchronisations() as so_far:
        view, _ = run(Counted(Turns()), fast, a_task(fast, new_tokens=90))
    assert not any(lane.ended.error for lane in view.lanes) and view.lanes[1].blocks is not None
    for counts in totals:
        assert len(counts) == 90
        quiet = sum(a == b for a, b in pairwise(counts[30:]))
        assert quiet >= 40, counts  # of 59; but for captures, where there are more blocks


def test_the_clock_stands_between_turns_and_counts_everything_else():
    now, told = [0.0], []

    def between(took) -> None:
        told.append([(report.index, report.seconds) for report in took])
        now[0] += 100.0

    def each() -> None:
        now[0] += 0.25

    watch = Stopwatch(torch.device("cpu"), 3.0, between, each, clock=lambda: now[0])
    now[0] = 5.0
    watch.put(torch.zeros(1, 7))
    for token in range(6):
        now[0] += 1.0
        watch.put(torch.tensor([token]))
    watch.end()
    assert told == [[(0, 6.0)], [(1, 1.25), (2, 1.25), (3, 1.25)], [(4, 1.25), (5, 1.25)]]


def test_a_slow_listener_costs_no_token_time(probe):
    session, seconds = Session(Turns()), []
    with session.running():
        for event in session.race(probe, a_task(probe, new_tokens=6, lanes=(1,))):
            if isinstance(event, Stepped):
                seconds.append(event.report.seconds)
                time.sleep(0.3)
    assert len(seconds) == 6 and sum(seconds[1:]) < 1.2
