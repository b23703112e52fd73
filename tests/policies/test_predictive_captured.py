"""Predicting beside a captured step: when, of which queries, and what a failure leaves behind."""

from __future__ import annotations

import pytest
import torch
from caches import predictive
from captured import Imitation
from models import build, prompt
from oracle import TOLERANCE
from test_predictive import TIGHT, PredictiveRace

from hf_sparsekv.layers.replay import Replay
from hf_sparsekv.policies.ahead.earlier_queries import EarlierQueriesPolicy
from hf_sparsekv.policies.ahead.query_ring import QueryRing


def test_a_captured_step_predicts_before_it_attends(monkeypatch):
    """Beside it; and chooses afterwards, since its attention reads the ids that are chosen anew."""
    race, order = PredictiveRace(captured=True), []

    def tell(owner, name: str) -> None:
        does = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args: (order.append(name), does(self, *args))[1])

    race.feed(prompt(1, 130)["input_ids"])
    tell(Replay, "on_side_stream")
    for name in ("attend", "choose_for"):
        tell(EarlierQueriesPolicy, name)
    tell(QueryRing, "predict")
    race.run(1)
    assert order[:10] == ["on_side_stream", "predict", "attend", "on_side_stream", "choose_for"] * 2


@pytest.mark.parametrize("place", ["stream", "cpu"])
def test_a_captured_step_of_padding_has_no_query(place):
    race = PredictiveRace(captured=True, cache_rank=place)
    race.read(130, (0, 9))
    assert race.run(5) < TOLERANCE
    for pads in ([1, 0], [0, 1], [1, 0]):
        assert race.feed(torch.full((2, 1), 7), torch.tensor(pads)[:, None]) < TOLERANCE
        assert race.run(4) < TOLERANCE
    assert race.runner.replays == 5 + 3 * 5


@pytest.mark.parametrize("place", ["stream", "host"])
def test_a_capture_that_runs_out_of_memory_leaves_no_prediction(place, monkeypatch):
    """What comes next is chosen for its own query: here a second turn, which begins where the prompt had ended."""
    ids, found = prompt(2, 180, seed=5)["input_ids"], []
    for fails in (False, True):
        net = build("llama", "sparsekv")
        runner = Imitation(net)
        runner.install()
        cache = predictive(place == "host", **TIGHT, cache_rank=place)
        with torch.no_grad():
            net(ids[:, :150], past_key_values=cache)
            if fails:
                with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                    patch.setattr(EarlierQueriesPolicy, "choose_for", full)
                    net(ids[:, :1], past_key_values=cache)
                assert runner.captures == 0
            found.append(net(ids[:, 150:179], past_key_values=cache).logits)
            found.append(net(ids[:, 179:], past_key_values=cache).logits.clone())
    for expected, got in zip(found[:2], found[2:]):
        assert torch.equal(got, expected)


def full(*args) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")
