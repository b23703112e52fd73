"""The demo without a browser: documents, languages, turns, the race and what it leaves behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

pytest.importorskip("gradio", reason="the demo needs gradio: pip install -e '.[demo]'")

from demos import a_task, prefix_of, probe_model, run, talks_of

from demo.caches import DENSE, METHODS
from demo.race import Busy, Ended, Reading, Session, Started, Stepped, Task
from demo.turns import Lane, Stopped, Turns


@pytest.fixture(scope="module")
def probe():
    return probe_model()


# ---------------------------------------------------------------------- turns


def test_who_waits_can_be_stopped():
    turns = Turns()
    first, second = (Lane(name, threading.Event()) for name in "ab")
    turns.join(first)
    turns.take(first)
    turns.join(second)
    second.stop.set()
    with pytest.raises(Stopped):
        turns.take(second)
    assert turns.runs == 2
    turns.leave(second)
    turns.leave(first)
    assert turns.runs == 0


# ---------------------------------------------------------------------- the race


@pytest.mark.few(method=("two_level", DENSE))
@pytest.mark.parametrize("method", METHODS)
def test_both_panes_say_what_generate_says(probe, method):
    task = a_task(probe, method)
    view, events = run(Session(Turns()), probe, task)
    ids = torch.tensor([[*task.context, *task.question]])
    never = probe.model.config.vocab_size
    cache = DynamicCache(config=probe.model.config)
    expected = probe.model.generate(
        ids, past_key_values=cache, max_new_tokens=12, do_sample=False, eos_token_id=never, pad_token_id=0
    )[0, ids.shape[1] :].tolist()
    assert view.lanes[0].ids == expected
    needle = probe.language.needle(5)
    for lane in view.lanes:
        assert needle.answer in probe.language.tokenizer.decode(lane.ids)
        assert lane.ended == Ended(lane.ended.lane, lane.ended.totals, lane.ended.blocks)
        assert len(lane.seconds) == 12
    if method == DENSE:
        assert view.lanes[1].ids == expected
    else:
        assert view.lanes[1].stats.decode_steps == 11
        assert view.lanes[1].blocks.length == view.lanes[1].stats.cached_tokens + 1, "of a step after the answer"
        assert view.lanes[1].memory["device"] > 0
    read = [event for event in events if isinstance(event, Reading)]
    assert read[0].done == 0
    assert read[-1].done == read[-1].total == len(task.context)
    assert len(read) > 2, "reading shows progress"


def test_offload(probe):
    view, _ = run(Session(Turns()), probe, a_task(probe, offload=True))
    assert view.lanes[1].memory["host"] > 0
    assert "host memory" in view.lanes[1].name


def test_a_follow_up_reads_neither_the_document_nor_the_talk_again(probe):
    session, task = Session(Turns()), a_task(probe)
    run(session, probe, task)
    lengths = [len(talks_of(session)["race", i].ids) for i in range(2)]
    view, events = run(session, probe, task)
    assert view.reused
    assert [event.follows for event in events if isinstance(event, Started)] == [True, True]
    needle = probe.language.needle(5)
    for number, lane in enumerate(view.lanes):
        assert needle.answer in probe.language.tokenizer.decode(lane.ids[:2])
        talk = talks_of(session)["race", number]
        assert len(talk.ids) == lengths[number] + len(task.follow_up) + 2, "cut where the answer ended"
        assert talk.cache.get_seq_length() <= len(talk.ids)
    with session.running():
        session.new_talk()
    _, events = run(session, probe, task)
    assert [event.follows for event in events if isinstance(event, Started)] == [False, False]


def test_the_chat_answers_alone_from_what_the_race_has_read(probe):
    session, task = Session(Turns()), a_task(probe)
    run(session, probe, task)
    chat = replace(task, talk="chat", lanes=(1,), go_on=False)
    for follows in (False, True):
        view, events = run(session, probe, chat)
        assert view.reused
        assert [(e.lane, e.follows) for e in events if isinstance(e, Started)] == [(1, follows)]
        assert probe.language.needle(5).answer in probe.language.tokenizer.decode(view.lanes[1].ids)
        assert not view.lanes[0].ids
    with session.running():
        session.new_talk("chat")
    _, events = run(session, probe, chat)
    assert [e.follows for e in events if isinstance(e, Started)] == [False]
    _, events = run(session, probe, task)
    assert [e.follows for e in events if isinstance(e, Started)] == [True, True], "the race's own conversation is there"


def test_several_rows_decode_one_lane_after_the_other(probe):
    task = a_task(probe, new_tokens=6)
    alone, _ = run(Session(Turns()), probe, task)
    session = Session(Turns())
    view, events = run(session, probe, replace(task, rows=3))
    assert [lane.ids for lane in view.lanes] == [lane.ids for lane in alone.lanes], "every row says the same"
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [event.lane for event in steps] == [0] * 6 + [1] * 6
    assert {len(event.report.tokens) for event in steps} == {3}
    stats, one = view.lanes[1].stats, alone.lanes[1].stats
    assert stats.kv_bytes_read == 3 * one.kv_bytes_read
    assert not talks_of(session), "their memory is given back"


def test_stop_comes_at_once_and_frees_the_memory(probe):
    session, task = Session(Turns()), a_task(probe, new_tokens=5000)
    kept, stopped_at = [], None
    with session.running():
        for event in session.race(probe, task):
            if isinstance(event, Stepped) and event.report.index == 3 and event.lane == 1:
                held = [*(talk.cache for talk in talks_of(session).values()), prefix_of(session)]
                kept = [weakref.ref(one) for one in held]
                del held
                session.stop.set()
                stopped_at = time.monotonic()
            if isinstance(event, Ended):
                assert event.stopped
    assert time.monotonic() - stopped_at < 5
    gc.collect()
    assert len(kept) == 3
    assert all(ref() is None for ref in kept), "caches of both panes and of the document"
    assert not [t for t in threading.enumerate() if t.name.startswith("race-")]
    view, _ = run(session, probe, a_task(probe))
    assert view.ended
    assert not view.reused


def test_stop_while_reading(probe):
    session = Session(Turns())
    with session.running():
        for event in session.race(probe, a_task(probe)):
            if isinstance(event, Reading):
                session.stop.set()
            else:
                assert event == Ended(event.lane, stopped=True)
    assert session.memory_bytes() == {"device": 0, "host": 0}


def test_a_listener_that_goes_away_ends_the_threads(probe):
    session = Session(Turns())
    with session.running():
        race = session.race(probe, a_task(probe, new_tokens=5000))
        for event in race:
            if isinstance(event, Stepped):
                break
        race.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("race-")]
    assert session.turns.runs == 0


def test_one_run_at_a_time_in_a_session(probe):
    session = Session(Turns())
    with session.running(), pytest.raises(Busy, match="running already"), session.running():
        raise AssertionError("the second run has begun")
    with session.running():
        pass


def test_an_error_in_one_pane_leaves_the_other(probe, monkeypatch):
    session, task = Session(Turns()), a_task(probe)
    run(session, probe, task)

    def fails(*args):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(prefix_of(session), "start", fails)
    with session.running():
        session.new_talk()
    view, _ = run(session, probe, task)
    assert view.lanes[1].ended.error == "RuntimeError: no such luck"
    assert view.lanes[0].ended.error is None
    assert len(view.lanes[0].ids) == 12
    monkeypatch.undo()
    view, _ = run(session, probe, task)
    assert view.lanes[1].ended.error is None


def test_controls_that_do_not_fit_are_told_before_anything_runs(probe):
    task = a_task(probe, "progressive")
    task = Task(**{**task.__dict__, "values": {**task.values, "mass": 1.5}})
    session = Session(Turns())
    with session.running(), pytest.raises(ValueError, match="mass"):
        list(session.race(probe, task))


def test_two_sessions_at_once(probe):
    turns, found = Turns(), {}

    def one(number: int) -> None:
        found[number], _ = run(Session(turns), probe, a_task(probe, new_tokens=20))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0].lanes[0].ids == found[1].lanes[0].ids
    assert found[0].lanes[1].ids == found[1].lanes[1].ids
