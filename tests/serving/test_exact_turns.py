"""An exact engine that does not draft does what a dense one does: in steps, and in pieces of prompts beside them."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

from captured import imitated
from engines import BUDGET, SERVING, WHOLE, greedy, ids_of, inside
from torch.utils._python_dispatch import TorchDispatchMode

from hf_sparsekv import Engine, TokenConfig
from hf_sparsekv.checking.pace import Next, Pace
from hf_sparsekv.cuda_graph.prompts import Prompts

SELECTS = TokenConfig(**BUDGET)
WAITS = {"item", "tolist", "cpu", "numpy", "synchronize"}  # for a GPU, if the tensor is there
MORE = 24  # calls of Python, whatever the model: the pace hears how long the step took, and it is said to be exact
LOOKS = 150  # in every eighth turn the engine looks whether to draft


class Counts(NamedTuple):
    """Counts of one turn: torch's operators, those of its replayed step included; waits for a GPU; calls of Python."""

    operators: int
    waits: int
    calls: int


class Counting(TorchDispatchMode):
    """Counts what is done inside. What replays call is left out: on a GPU that is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.waits = self.calls = 0
        self._replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        super().__enter__()
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error) -> None:
        sys.setprofile(None)
        super().__exit__(*error)

    def _called(self, frame, event: str, what) -> None:
        code = frame.f_code
        if code.co_name == "replay" and code.co_filename.endswith("helpers/captured.py"):
            self._replays += {"call": 1, "return": -1}.get(event, 0)
        if not self._replays and code.co_name != "__torch_dispatch__":
            self.calls += event == "call"
            self.waits += event == "c_call" and what.__name__ in WAITS


def turns(config: TokenConfig, exact: bool) -> list[tuple[int, Counts]]:
    """Tokens of prompts read, and counts, of each turn: a row decodes, and after some steps a second prompt comes."""
    net, runner = imitated()
    found: list[tuple[int, Counts]] = []
    serving = replace(SERVING, exact=exact, prefill_ms=float("inf"), layer_segments=False)
    with Engine(net, None, config, None, serving) as engine:
        loop = inside(engine).loop
        plain, read, handles = loop._once, loop.work.read, []

        def once() -> bool:
            if loop.counts.steps < 10:
                return plain()
            if not handles:
                handles.append(engine.submit(ids_of(330, 5), greedy(30)))
            tokens: list[int] = []
            loop.work.read = lambda n: tokens.append(n) or read(n)
            with Counting() as counted:
                goes_on = plain()
            found.append((sum(tokens), Counts(counted.operators, counted.waits, counted.calls)))
            return goes_on

        loop._once = once
        assert len(engine.submit(ids_of(150, 0), greedy(60)).result(100).token_ids) == 60
        assert len(handles[0].result(100).token_ids) == 30
        assert engine.stats().drafted == 0
    runner.remove()
    return [turn for turn in found if turn[1].operators]  # others have found nothing to do


def test_a_turn_without_drafts_does_what_a_dense_engine_does(monkeypatch):
    monkeypatch.setattr(Pace, "next", lambda *_, **__: Next(0, 16))
    monkeypatch.setattr(Prompts, "_kind", lambda *_: None)  # pieces run eagerly, as long ones do
    dense, exact = turns(TokenConfig(**WHOLE), False), turns(SELECTS, True)
    assert [tokens for tokens, _ in exact] == [tokens for tokens, _ in dense]
    assert [tokens for tokens, _ in exact][:6] == [64, 64, 64, 64, 64, 10]
    assert [(one.operators, one.waits) for _, one in exact] == [(one.operators, one.waits) for _, one in dense]
    more = [mine.calls - theirs.calls for (_, mine), (_, theirs) in zip(exact, dense)]
    assert max(more) < LOOKS and sum(n > MORE for n in more) <= len(more) // 4
