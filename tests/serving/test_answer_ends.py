"""Further ends of answers, answers that may not end yet, log probabilities of prompts, and how long the queue waits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engines import BUDGET, SERVING, WHOLE, greedy, ids_of, inside, quiet
from models import VOCAB, build
from tokenizers_made import whole_words

from hf_sparsekv import Engine, Sampling, TokenConfig
from hf_sparsekv.serving.intake import Intake
from hf_sparsekv.serving.prompt_logprobs import MOST
from hf_sparsekv.serving.request import TooLong
from hf_sparsekv.serving.stats import Counts

pytestmark = pytest.mark.filterwarnings("error:decode steps run eagerly")


@pytest.fixture(scope="module", params=["greedy", "exact"])
def engine(request):
    serving = replace(SERVING, exact=request.param == "exact")
    settings = {**BUDGET, "token_budget": 64} if request.param == "exact" else WHOLE
    net = build("llama", "sparsekv")
    with Engine(net, whole_words(), TokenConfig(**settings), None, serving) as engine:
        yield engine


def test_further_tokens_end_an_answer(engine):
    whole = engine.submit(ids_of(60, 1), greedy(20)).result(60)
    end = whole.token_ids[6]
    at = whole.token_ids.index(end)
    found = engine.submit(ids_of(60, 1), greedy(20, stop_token_ids=(end, 96))).result(60)
    assert (found.token_ids, found.finish_reason) == (whole.token_ids[: at + 1], "stop")
    assert found.text == whole.text[: len(found.text)] and len(found.text.split()) == at
    ignoring = engine.submit(ids_of(60, 1), greedy(20, stop_token_ids=(end,), ignore_eos=True)).result(60)
    assert ignoring.token_ids == found.token_ids
    quiet(engine)


@pytest.mark.parametrize("least", [1, 7, 12, 20])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_no_answer_ends_too_early(engine, least, settings):
    """Each of the tokens that would come may end it: none of them comes before ``min_tokens``."""
    plain = Sampling(max_tokens=20, **settings)
    ends = tuple(set(engine.submit(ids_of(60, 2), plain).result(60).token_ids[:4]))
    asked = replace(plain, stop_token_ids=ends, min_tokens=least)
    found, beside = [engine.submit(ids_of(60, 2), one) for one in (asked, plain)]
    tokens = found.result(60).token_ids
    assert len(tokens) >= min(least + 1, 20) or tokens[-1] in ends
    assert not set(tokens[:least]) & {*ends} and len(tokens) >= least
    assert beside.result(60).token_ids == engine.submit(ids_of(60, 2), plain).result(60).token_ids
    quiet(engine)


def test_ends_of_the_model_wait_too(engine):
    like = engine.submit(ids_of(60, 4), greedy(12)).result(60).token_ids
    ends = inside(engine).loop.ends
    ends.eos, eos = frozenset({like[0]}), ends.eos
    try:
        found = engine.submit(ids_of(60, 4), greedy(12, min_tokens=3)).result(60).token_ids
        assert like[0] not in found[:3]
    finally:
        ends.eos = eos


def test_ends_outside_of_the_vocabulary_are_refused(engine):
    with pytest.raises(ValueError, match=f"stop_token_ids has token {VOCAB}, which is outside"):
        engine.submit(ids_of(5, 1), greedy(4, stop_token_ids=(VOCAB,)))


# ---------------------------------------------------------------------- prompts


@torch.no_grad()
def expected(ids: list[int], likeliest: int):
    logits = build("llama", "sdpa")(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    best = logits.topk(likeliest)
    return logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], best


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 150, 301])
@pytest.mark.parametrize("likeliest", [0, 3])
def test_log_probabilities_of_a_prompt(engine, length, likeliest):
    """Those of one pass of the model, whatever the engine's pieces are, and whatever it has in its prefix cache."""
    ids = ids_of(length, 7)
    engine.submit(ids, greedy(2)).result(60)
    beside = engine.submit(ids_of(40, 8), greedy(30))
    found = engine.submit(ids, greedy(4, prompt_logprobs=likeliest)).result(60)
    told = found.prompt_logprobs
    assert [one.token_id for one in told] == ids[1:] and found.cached_tokens == 0
    drawn, best = expected(ids, likeliest)
    torch.testing.assert_close(torch.tensor([one.logprob for one in told]), drawn, atol=2e-4, rtol=1e-4)
    tops = torch.tensor([[value for _, value in one.top] for one in told]).view(len(told), likeliest)
    torch.testing.assert_close(tops, best.values, atol=2e-4, rtol=1e-4)
    if length > 1:
        assert found.token_ids == engine.submit(ids, greedy(4)).result(60).token_ids
    beside.result(60)
    quiet(engine)


def test_passes_are_short_enough_for_their_logits(monkeypatch):
    monkeypatch.setattr("hf_sparsekv.serving.prompt_logprobs.LOGITS", 20 * VOCAB)
    monkeypatch.setattr("hf_sparsekv.serving.prompt_logprobs.AT_ONCE", 7)
    seen = []
    net = build("llama", "sparsekv")
    for layers in (True, False):
        with Engine(net, None, TokenConfig(**WHOLE), None, replace(SERVING, layer_segments=layers)) as engine:
            handle = net.lm_head.register_forward_hook(lambda _, given, out: seen.append(out.shape[1]))
            found = engine.submit(ids_of(130, 9), greedy(2, prompt_logprobs=1)).result(60)
            handle.remove()
        drawn, _ = expected(ids_of(130, 9), 1)
        got = torch.tensor([one.logprob for one in found.prompt_logprobs])
        torch.testing.assert_close(got, drawn, atol=2e-4, rtol=1e-4)
    assert max(seen) <= 20 and sum(seen) >= 260


def test_too_many_log_probabilities_are_refused(engine):
    inner = inside(engine)
    most = engine.max_length
    engine.max_length = MOST
    try:
        with pytest.raises(ValueError, match=r"prompt_logprobs must be at most 3 for a prompt of 30000 tokens, got 20"):
            engine.submit([5] * 30_000, greedy(1, prompt_logprobs=20))
    finally:
        engine.max_length = most
    assert inner.loop.idle


def test_a_prompt_that_is_too_long_says_how_long(engine):
    with pytest.raises(TooLong) as error:
        engine.submit(ids_of(390, 1), greedy(30))
    assert (error.value.tokens, error.value.answer, error.value.most) == (390, 30, engine.max_length)


def test_each_row_has_its_share_of_memory(engine):
    """As many requests as there are rows run together, if each takes its share."""
    share, rows = engine.tokens_per_row, engine.serving.max_rows
    prompt = ids_of(40, 5)
    answer = min(share, engine.max_length) - len(prompt)
    handles = [engine.submit([*prompt[:-1], i], greedy(answer, ignore_eos=True)) for i in range(rows)]
    waited = [handle.result(120).queued_s for handle in handles]
    assert answer > 0 and max(waited) < 60
    quiet(engine)


# ---------------------------------------------------------------------- the queue


@pytest.mark.parametrize("at_once", [1, 4, 16])
def test_the_expected_wait_is_that_of_a_queue_that_drains(at_once):
    """Rows that end together let requests start together: the estimate is right before, within and after."""
    intake = Intake(Counts(), 1000)
    intake.waiting.extend(range(64))  # type: ignore[arg-type]
    now, waits = 100.0, []
    for i in range(256):
        now += 0.0 if i % at_once else at_once * 0.1
        intake.begun(SimpleNamespace(begun=now, arrived=0.0 if i else now))  # type: ignore[arg-type]
        waits.append(intake.wait_s)
    for wait in waits[64:]:
        assert 0.7 * 6.4 <= wait <= 1.3 * 6.4
