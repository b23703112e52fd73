"""Measurements of exact mode: steps by the device's clock, and nothing that was captured."""

from __future__ import annotations

from itertools import pairwise

from caches import CACHES, TIGHT
from captured import imitated
from models import model, prompt

from hf_sparsekv import sparse
from hf_sparsekv.checking import text
from hf_sparsekv.checking.pace import Pace
from hf_sparsekv.layers import replays as replayed
from hf_sparsekv.layers.replays import Replays

GO = {"max_new_tokens": 40, "do_sample": False}
SETTING = CACHES["device-default"](**{**TIGHT, "token_budget": 16}).config


class Ticks:
    """A clock of a device that takes a second for each step."""

    def __init__(self, device) -> None:
        self._now = 0.0

    def mark(self) -> float:
        self._now += 1
        return self._now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_dense_steps_by_the_clock_of_the_device(monkeypatch):
    """The host runs ahead of a GPU, so that its own clock would see short steps."""
    taken, stepped = [], Pace.stepped
    monkeypatch.setattr(text, "Clock", Ticks)
    monkeypatch.setattr(Pace, "stepped", lambda self, *a, **k: taken.append((a, k)) or stepped(self, *a, **k))
    with sparse(model("llama"), SETTING, exact=True):
        model("llama").generate(**prompt(1, 120), **GO)
    alone = [seconds for (seconds, _), more in taken if more["alone"]]
    assert alone and set(alone) == {1.0}


def test_rounds_that_capture_are_not_measured(monkeypatch):
    """Rounds in which a draft or a verification was captured give no time for that part."""
    net, runner = imitated("llama")
    seen, before, drafted = [], [0], Pace.drafted

    def noted(self, drafts, added, draft_seconds, verify_seconds):
        seen.append((runner.captures - before[0], draft_seconds is None, verify_seconds is None))
        before[0] = runner.captures
        drafted(self, drafts, added, draft_seconds, verify_seconds)

    monkeypatch.setattr(Pace, "drafted", noted)
    with sparse(net, SETTING, exact=True, drafts=3):
        net.generate(**prompt(1, 165), **GO)
    rounds = [(drafts, verification) for _, drafts, verification in seen]
    assert rounds[0] == (True, True)
    assert all((captured > 0) == (drafts or verification) for captured, drafts, verification in seen)
    assert rounds.count((False, False)) > len(rounds) / 2


def test_rounds_leave_the_account_of_steps_alone(monkeypatch):
    """All layers would have to make it while the GPU waits for the next draft."""
    net, settled, rounds = imitated("llama")[0], [], []
    settle, drafted = Replays.settle, Pace.drafted
    monkeypatch.setattr(Replays, "settle", lambda self, layers: settled.append(len(layers)) or settle(self, layers))
    monkeypatch.setattr(Pace, "drafted", lambda self, *a: rounds.append(len(settled)) or drafted(self, *a))
    with sparse(net, SETTING, exact=True, drafts=3):
        net.generate(**prompt(3, 165, (0, 5, 61)), **GO, pad_token_id=0)
    between = [after - before for before, after in pairwise(rounds)]
    assert between.count(0) > len(between) / 2


def test_all_kinds_of_steps_are_accounted_for(monkeypatch):
    """Whether each is when another one comes, or all are when somebody asks."""
    net, found = imitated("llama")[0], []
    for kinds in (1, replayed._KINDS):
        monkeypatch.setattr(replayed, "_KINDS", kinds)
        with sparse(net, SETTING, exact=True, drafts=3):
            out = net.generate(**prompt(1, 165), **GO, return_dict_in_generate=True)
        stats = out.past_key_values.stats()
        assert stats.drafted and stats.sparse_calls and stats.dense_calls
        found.append((out.sequences.tolist(), stats))
    assert found[0] == found[1]
