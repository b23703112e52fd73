"""generate()'s loop one step ahead of what it knows: the same texts, streams and caches as if it waited."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from caches import ALL, FULL, ONE_EACH, TIGHT, two_level
from captured import Event, Told, imitated, on_gpu
from inside import runs_ahead
from models import PAD, VOCAB, build, prompt
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, LogitsProcessorList

from hf_sparsekv import StepMonitor, optimize, unoptimize
from hf_sparsekv.cuda_graph.late_stop import LateStop, LateStopping, defer, wait
from hf_sparsekv.cuda_graph.optimize import runner_of
from hf_sparsekv.telemetry.timing import TokenTimer


@pytest.fixture
def late(monkeypatch):
    """The host may run ahead of a CPU, too; gives what was asked of how many loops."""
    loops = []
    begin = LateStop.__init__

    def begun(self, *given) -> None:
        loops.append(self)
        begin(self, *given)

    monkeypatch.setattr(LateStop, "__init__", begun)
    runs_ahead(monkeypatch)
    monkeypatch.setattr(torch, "Event", Event)
    return loops


def pair(name: str, **changes):
    """A model that is replayed and waits, and one that does not."""
    waiting, _ = imitated(name, **changes)
    wait(waiting)
    return waiting, imitated(name, **changes)[0]


def ended(net, inputs: dict, tokens: int, rows: int) -> list[int]:
    """Tokens that end these rows' texts, some before others."""
    text = net.generate(**inputs, past_key_values=two_level(**TIGHT), do_sample=False, max_new_tokens=tokens)
    new = text[:, inputs["input_ids"].shape[1] :]
    return [int(new[row, tokens * (row + 1) // (rows + 1)]) for row in range(rows)]


@pytest.mark.few
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_texts_that_end_early(late, name, sample, padded, kept):
    """Rows that end one after the other: text, scores, stream, and the cache behind it with a second turn."""
    waiting, running = pair(name)
    inputs = prompt(2, 90, (0, 20) if padded else None)
    eos = list(range(0, VOCAB, 5)) if sample else ended(waiting, inputs, 24, 2)
    found = []
    for net in (waiting, running):
        cache, told = two_level(**TIGHT), Told()
        go = {"do_sample": sample, "eos_token_id": eos, "pad_token_id": PAD}
        torch.manual_seed(4)
        first = net.generate(
            **inputs, past_key_values=cache, max_new_tokens=40, output_scores=True, return_dict_in_generate=True, **go
        )
        length, scores = cache.get_seq_length(), torch.stack(first.scores)
        text = first.sequences
        assert text.shape[1] < 130, "the text was to end early"
        one = {key: value[:1] for key, value in inputs.items()}
        torch.manual_seed(5)
        alone = net.generate(**one, past_key_values=two_level(**TIGHT), max_new_tokens=40, streamer=told, **go)
        again = None
        if kept:
            more = torch.cat((text, prompt(2, 12, seed=9)["input_ids"]), dim=1)
            mask = torch.cat((inputs["attention_mask"], torch.ones_like(more[:, 90:])), dim=1)
            again = net.generate(
                more, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=12, eos_token_id=VOCAB
            )
        found.append((text, scores, length, told.heard, alone, again))
    for mine, theirs in zip(*found):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs
    assert len(late) == 2 + kept, "the second model's loops, and no others, ran ahead"


@pytest.fixture(scope="module")
def its_end() -> list[int]:
    """The token that ends the text of the next test's prompt half-way."""
    return ended(imitated("llama")[0], prompt(1, 90), 24, 1)


@pytest.mark.few(cache=ONE_EACH[::2])
@pytest.mark.parametrize("cache", sorted(ALL))
def test_every_cache_gives_the_token_back(its_end, late, cache):
    """Tokens that a text's end has taken back are not there in what follows."""
    waiting, running = pair("llama")
    inputs, eos = prompt(1, 90), its_end
    found = []
    for net in (waiting, running):
        mine = ALL[cache](**FULL)  # exact: what was chosen for that token may be noticed otherwise
        text = net.generate(**inputs, past_key_values=mine, do_sample=False, max_new_tokens=40, eos_token_id=eos)
        more = torch.cat((text, prompt(1, 12, seed=9)["input_ids"]), dim=1)
        shown = torch.ones_like(more)  # the text may have tokens that generate() takes for padding
        again = net.generate(more, attention_mask=shown, past_key_values=mine, max_new_tokens=12)
        found.append((text, mine.get_seq_length(), again))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert torch.equal(found[0][2], found[1][2])
    assert len(late) == 2


def test_one_step_more_where_a_text_ends_by_itself(late):
    net, _ = imitated("llama")
    inputs = prompt(1, 90)
    for eos, more in (([VOCAB], 0), (ended(net, inputs, 24, 1), 1)):
        cache = two_level(**TIGHT)
        text = net.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=40, eos_token_id=eos)
        assert cache.stats().decode_steps == text.shape[1] - 91 + more
        assert cache.get_seq_length() == text.shape[1] - 1


def test_when_a_streamer_hears(late):
    """The first token is sent at once, each other one while the next is made."""
    net, runner = imitated("llama")
    heard: list[int] = []

    class Counts(Told):
        def put(self, value) -> None:
            super().put(value)
            heard.append(runner.replays)

    net.generate(
        **prompt(1, 90), past_key_values=two_level(**TIGHT, dense_below=0), max_new_tokens=12, streamer=Counts()
    )
    prompt_seen, first, *rest, last = heard
    assert prompt_seen == first == 0
    assert rest == list(range(rest[0], rest[0] + len(rest))) and rest[0] > 0
    assert last == rest[-1], "nothing is made beside the last"


def test_a_monitor_waits(late):
    net, _ = imitated("llama")
    seen, cache = [], two_level(**TIGHT)
    monitor = StepMonitor(cache, seen.append)
    for streamer in (monitor, TokenTimer(monitor)):
        net.generate(**prompt(1, 90), past_key_values=cache, max_new_tokens=6, streamer=streamer)
        assert not late
        cache.reset()
    assert [report.stats.decode_steps for report in seen if report.stats is not None] == [1] * 10
    timer = TokenTimer(Told())
    net.generate(**prompt(1, 90), past_key_values=cache, max_new_tokens=6, streamer=timer)
    assert late and timer.summary().tokens == 6


class Own(StoppingCriteria):
    def __call__(self, input_ids, scores, **given):
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class OwnProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_the_callers_own_functions_see_no_token_too_many(late):
    net, _ = imitated("llama")
    inputs = prompt(1, 40)
    for given in (
        {"stopping_criteria": StoppingCriteriaList([Own()])},
        {"logits_processor": LogitsProcessorList([OwnProcessor()])},
        {"prefix_allowed_tokens_fn": lambda row, ids: [1, 2]},
        {"past_key_values": DynamicCache()},
        {"num_beams": 2},
    ):
        net.generate(**{**inputs, "past_key_values": two_level(**TIGHT), **given}, max_new_tokens=3)
        assert not late, given
    net.generate(**inputs, past_key_values=two_level(**TIGHT), max_new_tokens=3, repetition_penalty=1.2, max_time=60.0)
    assert late


def test_the_class_is_as_it_was():
    net = build("llama", "sparsekv")
    kind = type(net)
    optimize(net)
    assert type(net) is not kind and isinstance(net, kind) and isinstance(net, LateStopping)
    assert (type(net).__name__, type(net).__module__, type(net).__doc__) == (
        kind.__name__,
        kind.__module__,
        kind.__doc__,
    )
    unoptimize(net)
    assert type(net) is kind
    wait(net)
    assert type(net) is kind


def test_a_loop_of_the_models_own_stays():
    net = build("llama", "sparsekv")

    class Own(type(net)):
        def _sample(self, *args, **kwargs):
            return "mine"

    net.__class__ = Own
    defer(net)
    assert type(net) is Own


def test_an_error_in_the_loop_is_no_promise_for_later(late):
    net, _ = imitated("llama")
    cache = two_level(**TIGHT)

    class Fails(Told):
        def put(self, value) -> None:
            super().put(value)
            if len(self.heard) == 5:
                raise RuntimeError("the reader has gone")

    with pytest.raises(RuntimeError, match="has gone"):
        net.generate(**prompt(1, 90), past_key_values=cache, max_new_tokens=40, streamer=Fails())
    assert not cache.going_on
    cache.reset()
    text = net.generate(**prompt(1, 90), past_key_values=cache, max_new_tokens=8, do_sample=False)
    fresh = net.generate(**prompt(1, 90), past_key_values=two_level(**TIGHT), max_new_tokens=8, do_sample=False)
    assert torch.equal(text, fresh)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_the_host_waits_for_no_token(padded):
    from benchmarks.decoding import synchronisations

    net = optimize(build("llama", "sparsekv").cuda(), fused=False)
    inputs = on_gpu(2, 90, (0, 20) if padded else None)
    cache, totals = two_level(**TIGHT), []
    with synchronisations() as so_far:
        net.register_forward_hook(lambda *given: totals.append(so_far()))
        net.generate(
            **inputs, past_key_values=cache, do_sample=False, max_new_tokens=60, eos_token_id=VOCAB, pad_token_id=0
        )
    assert runner_of(net).replays > 40
    quiet = sum(a == b for a, b in pairwise(totals[20:]))
    assert quiet >= 30, totals[-1] - totals[20]  # but for captures, where there are more blocks


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_on_a_gpu(name):
    """Texts that end early, as without deferral."""
    inputs = on_gpu(2, 90, (0, 20))
    waiting, running = (optimize(build(name, "sparsekv").cuda(), fused=False) for _ in range(2))
    wait(waiting)
    eos = ended(waiting, inputs, 24, 2)
    found = []
    for net in (waiting, running):
        cache = two_level(**TIGHT)
        text = net.generate(
            **inputs, past_key_values=cache, do_sample=False, max_new_tokens=40, eos_token_id=eos, pad_token_id=PAD
        )
        found.append((text, cache.get_seq_length()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
