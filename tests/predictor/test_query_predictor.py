"""Predictors by name, and those that users bring."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.ops.selection.query_predict.reference import query_predict
from hf_sparsekv.predictor.query import CustomPredictor, QueryPredictor, make_predictor
from hf_sparsekv_config.predictive import PREDICTORS

FORMS = {  # windows averaged, softmax
    "ridge": (False, False),
    "ridge_softmax": (False, True),
    "assembled": (True, True),
    "assembled_ridge": (True, False),
}


def ring(batch=2, heads=3, slots=9, dim=16):
    """Of two rows whose newest queries lie at different places, in slots 3 and 6."""
    torch.manual_seed(0)
    return torch.randn(batch, heads, slots, dim), torch.tensor([4, 7]).int(), torch.tensor([9, 3]).int()


def newest(queries: torch.Tensor, back: int = 1) -> torch.Tensor:
    """The last query of each row of ``ring()``, or that of ``back`` - 1 steps earlier."""
    return torch.stack((queries[0, :, 4 - back], queries[1, :, 7 - back]))


def test_default():
    """What docs/studies/predicted-queries.md says."""
    assert make_predictor() == QueryPredictor("assembled_ridge", 16, 0.1)


@pytest.mark.parametrize("name", PREDICTORS)
def test_by_name(name):
    predictor = make_predictor(name, window=8, epsilon=0.05)
    assert isinstance(predictor, QueryPredictor)
    assert predictor.slots == (1 if name == "last" else 9)
    queries, position, count = ring()
    want = newest(queries)
    if name != "last":
        want = query_predict(queries, position, count, 8, 0.05, *FORMS[name])
    assert torch.equal(predictor.predict(queries, position, count), want)
    out = torch.empty(2, 3, 16)
    assert predictor.predict(queries, position, count, out) is out
    assert torch.equal(out, want)
    assert make_predictor(predictor) is predictor


def test_shorter_window_than_the_ring():
    """A ring may hold more than the predictor looks at."""
    queries, position, count = ring(slots=9)
    short = torch.stack([newest(queries, back) for back in (4, 3, 2, 1)], dim=2)
    got = make_predictor("ridge", window=3).predict(queries, position, count)
    want = make_predictor("ridge", window=3).predict(short, torch.zeros(2).int(), count.clamp(max=4))
    assert torch.allclose(got, want, atol=1e-6)


def test_users_function():
    def before_last(queries, position, count):
        slot = ((position.long() - 2) % queries.shape[2]).view(-1, 1, 1, 1)
        return queries.take_along_dim(slot, dim=2)[:, :, 0]

    predictor = make_predictor(before_last, window=8)
    assert isinstance(predictor, CustomPredictor)
    assert (predictor.name, predictor.slots) == ("before_last", 9)
    queries, position, count = ring()
    assert torch.equal(predictor.predict(queries, position, count), newest(queries, 2))
    out = torch.empty(2, 3, 16)
    assert predictor.predict(queries, position, count, out) is out
    assert torch.equal(out, newest(queries, 2))


WRONG = {
    "must return a tensor, got NoneType": lambda queries, position, count: None,
    r"got \[2, 3, 9, 16\]": lambda queries, position, count: queries,
    "must return torch.float32": lambda queries, position, count: queries[:, :, 0].double(),
}


@pytest.mark.parametrize("message", WRONG)
def test_users_function_with_a_wrong_result(message):
    with pytest.raises(ValueError, match=message):
        make_predictor(WRONG[message], window=8).predict(*ring())


@pytest.mark.parametrize(
    "given, message",
    [
        (("newest",), "name must be 'last', 'ridge'"),
        (("ridge", 0), "window must be an integer in"),
        (("ridge", 33), "window must be an integer in"),
        (("ridge", True), "window must be an integer in"),
        (("ridge", 16, 0.0), "epsilon must be a number"),
        (("ridge", 16, True), "epsilon must be a number"),
        (("ridge", 16, float("nan")), "epsilon must be a number"),
        (("ridge", 16, "1e-2"), "epsilon must be a number"),
        ((3,), "must be callable, got int"),
        ((len, 0), "window must be an integer in"),
    ],
)
def test_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        make_predictor(*given)


def test_refuses_a_short_ring():
    with pytest.raises(ValueError, match="needs a ring of 17 slots"):
        make_predictor("assembled", window=16).predict(*ring())
