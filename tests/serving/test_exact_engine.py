"""Exact requests of an engine: their tokens are those of full attention, whatever sparse ones do beside them."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch
from caches import SMALL
from captured import imitated
from engines import SERVING, WHOLE, before_steps, greedy, ids_of, inside, once, quiet
from models import MODELS, NOTHING_SPARSE, TELLING_MODELS, build
from test_engine import alone
from test_grammar import PERSON, is_person, needs_llguidance
from tokenizers_made import byte_level

from hf_sparsekv import (
    Engine,
    OffloadConfig,
    PredictiveConfig,
    ProgressiveConfig,
    Sampling,
    ServingConfig,
    SparseCache,
    StreamingConfig,
    TokenConfig,
)
from hf_sparsekv.checking.pace import Next, Pace
from hf_sparsekv.row_batch.verifying import selects
from hf_sparsekv.serving.rounds import Rounds

pytestmark = [
    pytest.mark.filterwarnings("error:decode steps run eagerly"),
    pytest.mark.filterwarnings("ignore:.*by that layer's own query"),
]
CHOOSE = {**SMALL, "dense_below": 0}
TIGHT = TokenConfig(**CHOOSE, token_budget=16)  # so few that some drafts are wrong
EXACT = replace(SERVING, exact=True)
SIZES = [(150, 25), (20, 9), (301, 40), (65, 1), (90, 20), (7, 50), (64, 2), (120, 15)]


@pytest.fixture
def drafting(monkeypatch):
    """As many drafts as ever, or a dense step, at random."""
    draw = random.Random(5)
    monkeypatch.setattr(Pace, "next", lambda *_, **__: Next(draw.choice((0, 1, 3, 4)), draw.randint(1, 3)))
    monkeypatch.setattr(Pace, "beside", lambda *_: draw.randint(1, 4))


def answers(net, config, serving, asked, tokenizer=None):
    """Requests that are there together; and the counts."""
    with Engine(net, tokenizer, config, None, serving) as engine:
        outputs = [handle.result(100) for handle in [engine.submit(ids, sampling) for ids, sampling in asked]]
        quiet(engine)
        return outputs, engine.stats()


@functools.cache
def dense(asked: tuple, name: str) -> list:
    """Answers of a dense engine."""
    return answers(build(name, "sdpa"), TokenConfig(**WHOLE), SERVING, asked)[0]


def same(asked, name: str = "llama", config=TIGHT, serving=EXACT, net=None, **how):
    """The exact engine's tokens are a dense engine's; its counts."""
    if how:
        expected, _ = answers(build(name, "sdpa"), TokenConfig(**WHOLE), SERVING, asked, **how)
    else:
        expected = dense(tuple((tuple(ids), sampling) for ids, sampling in asked), name)
    found, stats = answers(build(name, "sdpa") if net is None else net, config, serving, asked, **how)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    assert [one.text for one in found] == [one.text for one in expected]
    return stats


def asked_for(**settings) -> list:
    return [(ids_of(n, seed), Sampling(max_tokens=t, **settings)) for seed, (n, t) in enumerate(SIZES)]


GREEDY = {"temperature": 0}


# ---------------------------------------------------------------------- every model, every method


@pytest.mark.few(name=TELLING_MODELS)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOTHING_SPARSE])
def test_models(name, drafting):
    try:
        with Engine(build(name, "sdpa"), None, TokenConfig(**WHOLE), None, SERVING):
            pass
    except ValueError as why:
        with pytest.raises(ValueError) as other, Engine(build(name, "sdpa"), None, TIGHT, None, EXACT):
            pass
        assert str(other.value) == str(why)
        return
    if has_others(name):
        with pytest.raises(ValueError, match="all attend to their whole past"):
            Engine(build(name, "sdpa"), None, TIGHT, None, EXACT)
        return
    stats = same(asked_for(**GREEDY)[:4], name)
    assert 0 < stats.accepted < stats.drafted


def has_others(name: str) -> bool:
    """Whether a model has layers that keep a window or a state, in which drafts cannot be taken back."""
    cache = SparseCache(TIGHT, model_config=build(name, "sdpa").config)
    return len(cache.sparse_layers) < len(cache.layers)


@pytest.mark.few
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize(
    "config",
    [
        TIGHT,
        TokenConfig(**CHOOSE, token_budget=16, level="two_level", num_blocks=3, tail=None),
        TokenConfig(**CHOOSE, mass=0.7),
        ProgressiveConfig(**CHOOSE, mass=0.7, min_tokens=16),
        StreamingConfig(block_size=16, sinks=4, window=32, dense_layers=0, max_draft=4),
    ],
    ids=["tokens", "blocks", "by-need", "progressive", "streaming"],
)
def test_methods(config, captured, drafting):
    net, runner = imitated() if captured else (build("llama", "sdpa"), None)
    stats = same(asked_for(**GREEDY), config=config, net=net)
    assert 0 < stats.accepted <= stats.drafted
    if runner is not None:
        runner.remove()


def test_the_number_of_drafts_follows_the_times():
    assert same(asked_for(**GREEDY)).drafted > 0


# ---------------------------------------------------------------------- settings of requests


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": 7},
        {"temperature": 1.2, "min_p": 0.02, "seed": 3, "repetition_penalty": 1.3},
        {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.3},
        {"temperature": 0, "logit_bias": {5: 3.0, 17: -2.0}},
    ],
    ids=["drawn", "drawn-penalty", "penalties", "bias"],
)
def test_settings(settings, drafting):
    """A seed gives the text that it gives without drafts."""
    assert same(asked_for(**settings)).accepted > 0


def test_log_probabilities(drafting):
    asked = asked_for(**GREEDY, logprobs=3)
    expected, _ = answers(build("llama", "sdpa"), TokenConfig(**WHOLE), SERVING, asked)
    found, _ = answers(build("llama", "sdpa"), TIGHT, EXACT, asked)
    for one, other in zip(found, expected):
        assert one.token_ids == other.token_ids == tuple(each.token_id for each in one.logprobs)
        for mine, theirs in zip(one.logprobs, other.logprobs):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
            assert [logprob for _, logprob in mine.top] == pytest.approx([p for _, p in theirs.top], abs=1e-3)


def test_ends_and_stop_strings(drafting):
    tokenizer = byte_level()
    asked = asked_for(**GREEDY)
    texts, _ = answers(build("llama", "sdpa"), TokenConfig(**WHOLE), SERVING, asked, tokenizer)
    stops = [one.text[5:8] for one in texts]
    asked = [(ids, replace(how, stop=(stop,) if stop else ())) for (ids, how), stop in zip(asked, stops)]
    same(asked, tokenizer=tokenizer)
    net = build("llama", "sdpa")
    net.generation_config.eos_token_id = [texts[0].token_ids[11], texts[2].token_ids[9], texts[5].token_ids[10]]
    plain = build("llama", "sdpa")
    plain.generation_config.eos_token_id = net.generation_config.eos_token_id
    expected, _ = answers(plain, TokenConfig(**WHOLE), SERVING, asked_for(**GREEDY))
    found, _ = answers(net, TIGHT, EXACT, asked_for(**GREEDY))
    assert [(one.token_ids, one.finish_reason) for one in found] == [
        (one.token_ids, one.finish_reason) for one in expected
    ]
    assert sum(one.finish_reason == "stop" for one in found) >= 3


@needs_llguidance
@pytest.mark.parametrize("others", [False, True], ids=["alone", "mixed"])
def test_grammars(others, drafting):
    """Beside requests that draft, such an answer gets one token a round."""
    tokenizer = byte_level()

    def net():
        return build("llama", "sdpa", vocab_size=len(tokenizer) + 5)

    like = Sampling(max_tokens=200, temperature=1.5, seed=3, json_schema=PERSON)
    asked = [(ids_of(120, 1), like), (ids_of(150, 2), greedy(40))]
    serving = replace(SERVING, max_length=600)
    expected, _ = answers(net(), TokenConfig(**WHOLE), serving, asked, tokenizer)
    if others:
        asked.append((ids_of(140, 3), greedy(60, exact=False)))
    found, _ = answers(net(), TIGHT, replace(serving, exact=True), asked, tokenizer)
    assert [one.token_ids for one in found[:2]] == [one.token_ids for one in expected]
    assert is_person(found[0].text)


# ---------------------------------------------------------------------- beside sparse requests


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
def test_sparse_requests_beside_them(captured, drafting):
    """They get the tokens that they get without exact ones."""
    net, config = build("llama", "sparsekv"), TokenConfig(**CHOOSE, token_budget=32)
    full = TokenConfig(**WHOLE)
    asked = [(ids_of(n, seed), greedy(tokens, exact=seed % 2 == 0)) for seed, (n, tokens) in enumerate(SIZES)]
    expected = [alone(net, full if how.exact else config, ids, how.max_tokens) for ids, how in asked]
    served, runner = imitated() if captured else (build("llama", "sdpa"), None)
    found, stats = answers(served, config, EXACT, asked)
    assert [list(one.token_ids) for one in found] == expected
    assert stats.drafted > 0
    if runner is not None:
        assert runner.replays > 60
        runner.remove()


def test_no_step_attends_to_everything_for_a_request_that_would_select(monkeypatch):
    """Not one, when a row that is no exact one outgrows what it attends to."""
    served, runner = imitated()
    seen, dense_step = [], Rounds.dense_step

    def noted(self, active) -> None:
        seen.append(selects(self.rows.cache) and not all(request.exact for request in active.values()))
        dense_step(self, active)

    monkeypatch.setattr(Rounds, "dense_step", noted)
    config = TokenConfig(**CHOOSE, token_budget=48)
    for n in (40, 60):  # at two places among the steps in which nothing is asked
        answers(
            served, config, EXACT, [(ids_of(20, 1), greedy(50, exact=True)), (ids_of(n, 2), greedy(50, exact=False))]
        )
    assert len(seen) > 40 and not any(seen)
    runner.remove()


def test_requests_that_come_and_go_and_are_cancelled(drafting):
    draw = random.Random(1)
    net, config = build("llama", "sparsekv"), TokenConfig(**CHOOSE, token_budget=32)
    with Engine(build("llama", "sdpa"), None, config, None, EXACT) as engine:
        handles = []
        for seed in range(14):
            n, tokens, exact = draw.randint(5, 300), draw.randint(1, 50), draw.random() < 0.6
            handle = engine.submit(ids_of(n, seed), greedy(tokens, exact=exact))
            if draw.random() < 0.3:
                handle.cancel()
            elif draw.random() < 0.3:
                next(iter(handle))
                handle.cancel()
            handles.append((handle, n, seed, tokens, exact))
        for handle, n, seed, tokens, exact in handles:
            output = handle.result(60)
            like = alone(net, TokenConfig(**WHOLE) if exact else config, ids_of(n, seed), tokens)
            assert list(output.token_ids) == like[: len(output.token_ids)]
            assert output.finish_reason == "cancelled" or len(output.token_ids) == tokens
        quiet(engine)


def test_answers_of_sparse_requests_are_no_prefix_of_exact_ones(drafting):
    """Their keys are those of sparse steps; prompts are shared, and so are exact answers."""
    net, cached = build("llama", "sparsekv"), []
    for exact in (False, True):
        with Engine(build("llama", "sdpa"), None, TIGHT, None, EXACT) as engine:
            answer = engine.submit(ids_of(150, 2), greedy(100, exact=exact)).result(60).token_ids
            turn = [*ids_of(150, 2), *answer, *ids_of(60, 3)]
            output = engine.submit(turn, greedy(20)).result(60)
            cached.append(output.cached_tokens)
            assert list(output.token_ids) == alone(net, TokenConfig(**WHOLE), turn, 20)
            quiet(engine)
    assert 100 < cached[0] <= 150 < 200 < cached[1]


# ---------------------------------------------------------------------- failures


def test_logits_that_are_no_distribution_fail_one_request(monkeypatch, drafting):
    with Engine(build("llama", "sdpa"), None, TIGHT, None, EXACT) as engine:
        work = inside(engine).loop.work
        plain, spoilt = work.verify, []

        def verify(ids, counts):
            logits = plain(ids, counts)
            if not spoilt and sum(map(bool, counts)) == 2:
                spoilt.append(1)
                logits = logits.clone()
                logits[0] = torch.nan
            return logits

        monkeypatch.setattr(work, "verify", verify)
        handles = [engine.submit(ids_of(120, seed), greedy(40)) for seed in range(2)]
        with pytest.raises(RuntimeError, match="NaN or infinite"):
            handles[0].result(60)
        net = build("llama", "sparsekv")
        assert list(handles[1].result(60).token_ids) == alone(net, TokenConfig(**WHOLE), ids_of(120, 1), 40)
        assert spoilt and engine.ready
        quiet(engine)


def test_a_failing_verification_fails_all_and_says_so(monkeypatch, drafting):
    with Engine(build("llama", "sdpa"), None, TIGHT, None, EXACT) as engine:
        work = inside(engine).loop.work
        monkeypatch.setattr(work, "verify", once(work.verify, RuntimeError("a kernel has failed")))
        handles = [engine.submit(ids_of(120, seed), greedy(40)) for seed in range(2)]
        for handle in handles:
            with pytest.raises(RuntimeError, match="a kernel has failed"):
                handle.result(60)
        assert not engine.ready


def test_all_passes_are_captured_at_the_start(drafting):
    net, runner = imitated()
    with Engine(net, None, TIGHT, None, EXACT) as engine:
        captures = engine.stats().captures
        for exact in (True, False, True):
            for handle in [engine.submit(ids_of(n, n), greedy(t, exact=exact)) for n, t in SIZES]:
                handle.result(60)
        assert engine.stats().captures == captures
        assert engine.stats().drafted > 0
    runner.remove()


@pytest.mark.parametrize("max_length", [6, 162, 163, 164])
def test_passes_are_captured_whatever_the_longest_row(max_length):
    net, runner = imitated()
    with Engine(net, None, TIGHT, None, replace(EXACT, max_length=max_length)) as engine:
        output = engine.submit(ids_of(max_length - 3, 1), greedy(3)).result(60)
        assert len(output.token_ids) == 3
    runner.remove()


def test_rounds_end_with_the_longest_row(drafting):
    """Drafts are written to no place behind it."""
    serving, longest = replace(EXACT, max_length=190), []
    with Engine(build("llama", "sdpa"), None, TIGHT, None, serving) as engine:
        rows = inside(engine).rows
        before_steps(engine, lambda: longest.append(max(rows.lengths)))
        found = engine.submit(ids_of(150, 1), greedy(40)).result(60).token_ids
    assert list(found) == alone(build("llama", "sparsekv"), TokenConfig(**WHOLE), ids_of(150, 1), 40)
    assert max(longest) < 190


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("config", "offload", "message"),
    [
        (TIGHT, True, "host memory"),
        (TIGHT, OffloadConfig(kv_dtype="int8"), "host memory"),
        (PredictiveConfig(**CHOOSE), None, "expect queries of the layer before"),
        (replace(TIGHT, max_draft=0), None, "max_draft=1 or more"),
    ],
)
def test_refused(config, offload, message):
    net = build("llama", "sdpa")
    with pytest.raises(ValueError, match=message), Engine(net, None, config, offload, EXACT):
        pass


def test_a_request_asks_an_engine_that_has_no_exact_mode():
    with Engine(build("llama", "sdpa"), None, TIGHT, None, SERVING) as engine:
        with pytest.raises(ValueError, match="ServingConfig\\(exact=True\\)"):
            engine.submit([1, 2, 3], greedy(2, exact=True))
        assert engine.submit([1, 2, 3], greedy(2, exact=False)).result(60).finish_reason == "length"
        quiet(engine)
    with pytest.raises(ValueError, match="exact must be"):
        Sampling(exact=1)
    with pytest.raises(ValueError, match="exact must be"):
        ServingConfig(exact=1)
