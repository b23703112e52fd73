"""Exact mode draws as ``generate()``'s own loop does: where the generator is left, and what cannot be drawn from."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from itertools import count, product
from types import SimpleNamespace

import interrupts
import pytest
import torch
from caches import SMALL
from captured import Event, imitated
from models import PAD, model, prompt, reference
from tokenizers_made import byte_level
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, stopping_criteria
from transformers.generation.streamers import BaseStreamer

from hf_sparsekv import SparseCache, TokenConfig, sparse
from hf_sparsekv.checking.pace import Next, Pace
from hf_sparsekv.cuda_graph import late_stop

CONFIG = TokenConfig(**{**SMALL, "token_budget": 8})
LONG, AT = 100, 7  # tokens of a prompt, and of a text when something happens
MANY_ENDS = list(range(2, 97, 9))


class Stop(Exception):
    """Errors of a caller's own code."""


class Streamer(BaseStreamer):
    """Raises at a token, if it is to; the prompt comes first."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        self.error, self.heard = error, []

    def put(self, value) -> None:
        self.heard.append(value.tolist())
        if self.error is not None and len(self.heard) > AT:
            raise self.error

    def end(self) -> None:
        self.heard.append([])


class Criterion(StoppingCriteria):
    """Ends rows at a length, or raises there."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        self.error = error

    def __call__(self, input_ids, scores, **kwargs):
        there = input_ids.shape[1] >= LONG + AT
        if there and self.error is not None:
            raise self.error
        return torch.full((len(input_ids),), there)


class Processor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= LONG + AT:
            raise Stop
        return scores


def criteria(one: StoppingCriteria) -> dict:
    return {"stopping_criteria": StoppingCriteriaList([one])}


# How a text ends: what is given to generate().
ENDS: dict[str, Callable[[], dict]] = {
    "length": dict,
    "one token": lambda: {"max_new_tokens": 1},
    "end tokens": lambda: {"eos_token_id": [12, 33, 43]},
    "stop strings": lambda: {"stop_strings": ["a", "e", "1", "!", " "], "tokenizer": byte_level()},
    "a criterion": lambda: criteria(Criterion()),
    "time": lambda: {"max_time": 1e-9},
    "an exception in a criterion": lambda: criteria(Criterion(Stop)),
    "an interrupt in a criterion": lambda: criteria(Criterion(KeyboardInterrupt)),
    "an exception in a processor": lambda: {"logits_processor": LogitsProcessorList([Processor()])},
    "an exception in a streamer": lambda: {"streamer": Streamer(Stop)},
    "an interrupt in a streamer": lambda: {"streamer": Streamer(KeyboardInterrupt)},
}
SEVERAL = prompt(3, LONG, (0, 5, 30))
ROWS = {"one": prompt(1, LONG), "several": SEVERAL, "kept": SEVERAL}


def called(exactly: bool, how: dict, inputs: dict, drafts: int | None = 3, net=None):
    """The text, or the error; what a streamer heard; and where the generator is left."""
    net = net or (model if exactly else reference)("llama")
    go = {"max_new_tokens": 40, "pad_token_id": PAD, "do_sample": True, **how}
    torch.manual_seed(7)
    with sparse(net, CONFIG, exact=True, drafts=drafts) if exactly else nullcontext():
        try:
            out = net.generate(**inputs, **go)
            said = (out if isinstance(out, torch.Tensor) else out.sequences).tolist()
        except (Stop, KeyboardInterrupt, RuntimeError) as error:
            said = repr(error)
    return said, getattr(how.get("streamer"), "heard", None), torch.get_rng_state().tolist()


def drafting(monkeypatch, drafts: int | None) -> None:
    """Without a number of drafts as times of this machine may have it."""
    if drafts is None:
        draw = random.Random(3)
        monkeypatch.setattr(Pace, "next", lambda *_, **__: Next(draw.choice((0, 1, 4)), draw.randint(1, 3)))


@pytest.mark.pairwise
@pytest.mark.parametrize("drafts", [3, None])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("end", ENDS)
def test_the_generator_is_left_where_a_dense_loop_leaves_it(monkeypatch, end, rows, drafts):
    """Any end of the text, and any number of drafted tokens at that time."""
    if "streamer" in end and rows != "one":
        pytest.skip("transformers' streamers are for one row")
    drafting(monkeypatch, drafts)
    found = [
        called(exactly, {**ENDS[end](), "return_dict_in_generate": rows == "kept"}, ROWS[rows], drafts)
        for exactly in (False, True)
    ]
    assert found[0] == found[1]
    assert isinstance(found[0][0], str) == ("in a" in end)


@pytest.mark.few
@pytest.mark.parametrize("drafts", [3, None])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_seed_gives_all_texts_of_a_script(monkeypatch, rows, drafts):
    drafting(monkeypatch, drafts)
    found = []
    for exactly in (False, True):
        net = (model if exactly else reference)("llama")
        with sparse(net, CONFIG, exact=True, drafts=drafts) if exactly else nullcontext():
            torch.manual_seed(7)
            found.append([])
            for seed in range(4):
                inputs = prompt(rows, LONG, (0, 5, 30)[:rows], seed)
                go = {"eos_token_id": MANY_ENDS, "pad_token_id": PAD, "do_sample": True, "max_new_tokens": 20}
                found[-1].append(net.generate(**inputs, **go).tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", ["one", "several"])
def test_time_ends_all_rows_with_one_token(monkeypatch, rows):
    """They are as long as each other, though each may have got its own number of tokens by then."""
    ticks = count()
    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=lambda: float(next(ticks))))
    found, _, left = called(True, {"max_time": 15.0, "eos_token_id": 1}, ROWS[rows])
    tokens = len(found[0]) - LONG
    assert 1 < tokens < 40
    expected, _, then = called(False, {"max_new_tokens": tokens, "eos_token_id": 1}, ROWS[rows])
    assert (found, left) == (expected, then)


@pytest.mark.parametrize("end", ["length", "end tokens", "an exception in a streamer"])
@pytest.mark.parametrize("exactly", [False, True], ids=["sparse", "exact"])
def test_a_loop_that_runs_ahead_gives_back_what_it_drew(monkeypatch, end, exactly):
    """On a GPU the loop of an optimised model learns one step later that a text has ended."""
    monkeypatch.setattr(late_stop, "_runs_ahead", lambda device: True)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(Pace, "next", lambda *_, **__: Next(0, 9))
    net, _ = imitated("llama")
    expected, how = called(False, ENDS[end](), ROWS["one"]), ENDS[end]()
    if not exactly:
        how["past_key_values"] = SparseCache(TokenConfig(**{**SMALL, "token_budget": 4096}), None)
    assert called(exactly, how, ROWS["one"], None, net) == expected


@pytest.mark.parametrize("rows", ["one", "several"])
def test_an_interrupt_leaves_the_generator_after_some_token(rows):
    """Wherever in the loop of exact mode it comes."""
    torch.manual_seed(7)
    shares, states = torch.ones(len(ROWS[rows]["input_ids"]), 97), []
    for _ in range(10):
        states.append(torch.get_rng_state().tolist())
        shares.multinomial(1)
    how = {"max_new_tokens": 9}
    here = tuple(f"{interrupts.HOME}/checking/{name}.py" for name in ("loop", "choice", "text", "ragged"))
    for _ in range(2):  # the first call makes what later ones find
        with interrupts.Points(code=here) as points:
            called(True, how, ROWS[rows])
    for at in random.Random(5).sample(range(1, points.seen), 8):
        with interrupts.Points(at, code=here):
            said, _, left = called(True, how, ROWS[rows])
        assert said == "KeyboardInterrupt()"
        assert left in states


# ---------------------------------------------------------------------- logits that are no distribution


@contextmanager
def spoilt(net, layer: str, value: float, at: int, row: int | None):
    """Inside, the model's logits, or a layer's output, are ``value`` from position ``at`` on; of one row or all."""
    places: list[torch.Tensor] = []

    def begins(module, args, kwargs) -> None:
        places[:] = [kwargs["position_ids"]]

    def ends(module, args, out) -> None:
        given = out[0] if isinstance(out, tuple) else getattr(out, "logits", out)
        late = places[0][:, -given.shape[1] :] >= at
        if row is not None:
            late = late & (torch.arange(len(late)) == row)[:, None]
        given[late] = value

    before = net.register_forward_pre_hook(begins, with_kwargs=True)
    after = net.get_submodule(layer).register_forward_hook(ends)
    try:
        yield
    finally:
        before.remove()
        after.remove()


# What the model gives: layer, value, from which position on, row. None: all.
SPOILT = {
    "NaN logits": ("", torch.nan, LONG + 6, None),
    "of one row": ("", torch.nan, LONG + 6, 1),
    "of the last row": ("", torch.nan, LONG - 30 + 6, 2),
    "infinite logits": ("", torch.inf, LONG + 6, None),
    "no logits": ("", -torch.inf, LONG + 6, None),
    "NaN in a layer": ("model.layers.0", torch.nan, LONG + 6, None),
    "from the first token on": ("", torch.nan, LONG - 1, None),
}
HOW = {
    "drawn": {},
    "greedy": {"do_sample": False},
    "removed": {"remove_invalid_values": True},
    "greedy, removed": {"do_sample": False, "remove_invalid_values": True},
}


TELLING = [
    *(("NaN logits", how, "one", drafts) for how, drafts in (("drawn", 3), ("greedy", None))),
    *(("NaN in a layer", how, rows, 3) for how, rows in (("drawn", "several"), ("greedy", "kept"), ("removed", "one"))),
    *((what, "drawn", "several", 3) for what in ("of one row", "of the last row", "infinite logits", "no logits")),
]


@pytest.mark.parametrize(
    ("what", "how", "rows", "drafts"),
    [
        pytest.param(*case, marks=() if case in TELLING else pytest.mark.slow)
        for case in product(SPOILT, HOW, ROWS, (1, 3, None))
    ],
)
def test_logits_that_are_no_distribution(monkeypatch, what, how, rows, drafts):
    """Drawing from them is an error; taking the likeliest token is none."""
    layer, value, at, row = SPOILT[what]
    found = []
    for exactly in (False, True):
        drafting(monkeypatch, drafts)
        streamer = {"streamer": Streamer()} if rows == "one" else {}
        go = {**HOW[how], **streamer, "max_new_tokens": 12, "return_dict_in_generate": rows == "kept"}
        net = (model if exactly else reference)("llama")
        with spoilt(net, layer, value, at, row if rows != "one" else None):
            found.append(called(exactly, go, ROWS[rows], drafts))
    assert found[0] == found[1]


@pytest.mark.parametrize("drafts", [1, 3, None])
def test_all_tokens_are_banned(monkeypatch, drafts):
    """After five tokens, each of which may come once, drawing is an error."""
    drafting(monkeypatch, drafts)
    ids = prompt(1, LONG)["input_ids"].clamp_max(89)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    how = {"no_repeat_ngram_size": 1, "suppress_tokens": [*range(90), 95, 96]}
    found = [called(exactly, how, inputs, drafts) for exactly in (False, True)]
    assert found[0] == found[1]
    assert "inf" in found[0][0]
