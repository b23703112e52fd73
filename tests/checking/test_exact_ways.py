"""Exact mode in every way to call ``generate()``: what comes out, is told and is kept is what full attention gives."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from caches import FULL, SMALL, two_level
from captured import Event, Told, imitated
from models import MODELS, PAD, build, model, prompt, reference
from test_exact_mode import DEVICE, LINEAR, TIGHT, same_text, written
from tokenizers_made import byte_level
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

import hf_sparsekv
from hf_sparsekv import OffloadConfig, PredictiveConfig, SparseCache, StreamingConfig, TokenConfig, sparse
from hf_sparsekv.checking import lookup
from hf_sparsekv.checking.choice import Choice
from hf_sparsekv.checking.install import CheckedSampling
from hf_sparsekv.checking.lookup import found_before
from hf_sparsekv.checking.pace import Next, Pace
from hf_sparsekv.cuda_graph import late_stop

DTYPES = torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float16, torch.bfloat16
CONFIG = TokenConfig(**{**SMALL, "token_budget": 8})


def exact(net, drafts: int | None = 3):
    return sparse(net, CONFIG, exact=True, drafts=drafts)


WAYS = {
    "-".join(how): how
    for how in (
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"prefill_chunk_size": 50},
        {"max_new_tokens": 1},
        {"max_new_tokens": 3},
        {"max_new_tokens": 20},
        {"eos_token_id": [5, 17, 40]},
    )
}


@pytest.mark.pairwise
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("cache", DEVICE)
@pytest.mark.parametrize("name", MODELS)
def test_every_family_cache_and_way(name, cache, how):
    """In float32 the tokens are full attention's."""
    if "lookup" in how and name in LINEAR:
        pytest.skip("transformers refuses it: these models cannot take tokens back")
    batch = 1 if "lookup" in how else 2
    same_text(name, prompt(batch, 130, None if batch == 1 else (0, 40)), cache, **{"max_new_tokens": 14, **WAYS[how]})


@pytest.mark.quick
@pytest.mark.parametrize("how", WAYS)
def test_ways(how):
    """Beams and prompt lookup decode densely."""
    how = WAYS[how]
    batch = 1 if "prompt_lookup_num_tokens" in how else 2
    kv = same_text("llama", prompt(batch, 150, None if batch == 1 else (0, 40)), **how)
    drafts = not {"num_beams", "prompt_lookup_num_tokens"} & set(how) and how.get("max_new_tokens", 9) > 1
    assert (kv.stats().drafted > 0) == drafts


# ---------------------------------------------------------------------- drawing


@pytest.mark.quick
def test_drawn_tokens_have_full_attentions_probabilities():
    """Over many draws, of which drafts that differ have seen the same noise; and they are those of multinomial()."""
    generator = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, 8, generator=generator).mul(1.5).unbind(0)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(6)])
    rows, ids = 40_000, torch.zeros(40_000, 1, dtype=torch.long)
    choice = Choice(processors, sample=True)
    torch.manual_seed(5)
    drafted = [choice(ids, other.repeat(rows, 1), ahead)[0] for ahead in range(2)]
    chosen = [choice(ids, logits.repeat(rows, 1), ahead)[0] for ahead in range(3)]
    torch.manual_seed(5)
    shares = processors(ids[:1], logits.repeat(1, 1)).softmax(-1)
    for tokens in chosen:
        assert torch.equal(tokens, shares.repeat(rows, 1).multinomial(1)[:, 0])
        counts = torch.bincount(tokens, minlength=8).float()
        expected = rows * shares[0]
        assert not counts[expected == 0].any()
        kept = expected > 0
        assert float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) < 25.7  # chi-square, 5 degrees: p = 1e-4
    agreed = (drafted[0] == chosen[0]).float().mean()
    theirs = processors(ids[:1], other.repeat(1, 1)).softmax(-1)
    apart = 0.5 * float((shares - theirs).abs().sum())
    assert (1 - apart) / (1 + apart) - 0.02 < agreed <= 1 - apart + 0.02  # the most that any way to draft can agree
    choice.keep(2)
    choice.rewind()
    left = torch.get_rng_state()
    torch.manual_seed(5)
    for _ in range(2):
        shares.repeat(rows, 1).multinomial(1)
    assert torch.equal(left, torch.get_rng_state())


@pytest.mark.few
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafts", [1, 4])
def test_a_seed_gives_the_text_that_it_gives_without_drafts(seed, drafts):
    found = []
    for net, kv in ((reference("llama"), DynamicCache()), (model("llama"), two_level(False, **TIGHT, level="token"))):
        torch.manual_seed(seed)
        with exact(net, drafts) if net is model("llama") else nullcontext():
            found.append(
                net.generate(
                    **prompt(2, 120, (0, 9)), past_key_values=kv, do_sample=True, top_p=0.95, max_new_tokens=20
                )
            )
    assert torch.equal(*found)


# ---------------------------------------------------------------------- ends, streams, criteria, processors


def texts(inputs: dict, **go) -> tuple:
    """Text, scores and logits of full attention and of exact mode, with what both tell a streamer (one row)."""
    found = []
    for exactly in (False, True):
        told = Told() if len(inputs["input_ids"]) == 1 else None
        net, kv = (model("llama"), two_level(False, **TIGHT, level="token")) if exactly else (reference("llama"), None)
        with exact(net) if exactly else nullcontext():
            given = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **go}
            out = net.generate(**inputs, past_key_values=kv, do_sample=False, pad_token_id=PAD, streamer=told, **given)
        found.append((out, told))
    (plain, first), (ours, second) = found
    assert torch.equal(plain.sequences, ours.sequences)
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(plain[name])
        torch.testing.assert_close(torch.stack(ours[name]), torch.stack(plain[name]), atol=1e-3, rtol=1e-3)
    if first is not None:
        assert first.heard == second.heard
    assert ours.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
    return plain, ours


def ending(rows: int, at: int) -> tuple[dict, list[int]]:
    """A prompt, and tokens that end its rows: the first one's text has one of them ``at`` tokens after it."""
    inputs = prompt(rows, 120, (0, 30)[:rows])
    text = reference("llama").generate(**inputs, do_sample=False, max_new_tokens=40)[:, 120:]
    return inputs, sorted({int(row[min(at + 7 * i, 39)]) for i, row in enumerate(text)})


@pytest.mark.few
@pytest.mark.parametrize("at", [0, 1, 9, 10, 11, 30])
@pytest.mark.parametrize("rows", [1, 2])
def test_texts_end_by_a_token(rows, at):
    inputs, eos = ending(rows, at)
    texts(inputs, max_new_tokens=40, eos_token_id=eos)


@pytest.mark.parametrize("at", [8, 13])
def test_texts_end_by_a_string(at):
    inputs = prompt(1, 120)
    text = reference("llama").generate(**inputs, do_sample=False, max_new_tokens=40)[0, 120:].tolist()
    tokenizer = byte_level()
    stops = [tokenizer.decode(text[at : at + 2])]
    plain, _ = texts(inputs, max_new_tokens=40, stop_strings=stops, tokenizer=tokenizer)
    assert plain.sequences.shape[1] < 160


class Counting(StoppingCriteria):
    """Ends a text at some length, and remembers the texts that it was shown."""

    def __init__(self) -> None:
        self.shown: list[int] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= 138)


def test_criteria_of_the_callers_own():
    """They see each text once, token by token, and no draft."""
    counting = Counting()
    plain, _ = texts(prompt(1, 120), max_new_tokens=40, stopping_criteria=StoppingCriteriaList([counting]))
    assert plain.sequences.shape[1] == 138
    assert counting.shown == [*range(121, 139)] * 2


class Odd(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, ::2] = -torch.inf
        return scores


def test_processors_of_the_callers_own_see_no_drafts():
    kv = same_text("llama", prompt(1, 120), logits_processor=LogitsProcessorList([Odd()]))
    assert kv.stats().drafted == 0
    assert kv.stats().dense_calls > 0 == kv.stats().sparse_calls


def test_hidden_states_of_each_step():
    out, kv = written(
        model("llama"), prompt(1, 120), max_new_tokens=5, output_hidden_states=True, return_dict_in_generate=True
    )
    assert len(out.hidden_states) == 5
    assert kv.stats().drafted == 0


# ---------------------------------------------------------------------- masks


MASKS = {
    **{str(dtype)[6:]: lambda mask, dtype=dtype: mask.to(dtype) for dtype in DTYPES},
    "twos": lambda mask: 2 * mask,
    "halves": lambda mask: 0.5 * mask,
    "padding inside": lambda mask: mask.index_fill(1, torch.arange(70, 75), 0),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    """Any dtype, with what transformers makes of their values."""
    inputs, found = prompt(3, 300, (0, 5, 180)), []  # more tokens than bfloat16 can count
    inputs["attention_mask"] = MASKS[mask](inputs["attention_mask"])
    for net in (reference("llama"), model("llama")):
        with exact(net) if net is model("llama") else nullcontext():
            found.append(net.generate(**inputs, do_sample=False, max_new_tokens=12))
    assert torch.equal(*found)


# ---------------------------------------------------------------------- drafts of the text itself


@pytest.mark.few
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_drafts_of_the_text_itself(monkeypatch, kept, sample, captured):
    """Right ones and wrong ones, of a text that repeats itself; none takes a step."""
    draw, found = random.Random(3), []
    monkeypatch.setattr(lookup, "TOKENS", 1)
    monkeypatch.setattr(Pace, "next", lambda *_, **__: Next(draw.choice((0, 2, 3)), 2))
    monkeypatch.setattr(Pace, "looks_up", lambda *_: True)
    monkeypatch.setattr(Pace, "best_of", lambda self, most, drafts: found.append(most) or draw.randint(1, most))
    ids = prompt(1, 40)["input_ids"].repeat(1, 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    go = {"max_new_tokens": 60, "do_sample": sample, "temperature": 0.3 if sample else None, "pad_token_id": PAD}
    torch.manual_seed(2)
    expected = reference("llama").generate(**inputs, **go)
    net = imitated("llama")[0] if captured else model("llama")
    torch.manual_seed(2)
    with exact(net, None):
        out = net.generate(**inputs, **go, return_dict_in_generate=kept)
    assert torch.equal(out.sequences if kept else out, expected)
    assert found, "the text never repeated itself"


def test_what_came_after_the_same_tokens():
    text = torch.tensor([[5, 1, 2, 3, 7, 8, 1, 2, 3, 9, 4, 1, 2, 3]])
    assert found_before(text, 4).tolist() == [[9, 4, 1, 2]]
    assert found_before(text, 2).tolist() == [[9, 4]]
    assert found_before(text[:, :-1], 4) is None
    assert found_before(text, 0) is None
    assert found_before(text[:, :3], 4) is None
    assert found_before(torch.tensor([[1, 1, 1, 1]]), 4).tolist() == [[1]]


@pytest.mark.parametrize("exactly", [False, True], ids=["within the budget", "exact"])
def test_scores_of_prompt_lookup_outlive_replays(exactly):
    """transformers' loop keeps the logits of a float32 model as they are."""
    ids = prompt(1, 30)["input_ids"].repeat(1, 2)
    go = {"prompt_lookup_num_tokens": 3, "do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **go, "output_scores": True}
    expected, (net, runner) = reference("llama").generate(**given), imitated("llama")
    with exact(net) if exactly else sparse(net, TokenConfig(**{**SMALL, **FULL})):
        found = net.generate(**given)
    assert runner.replays > 3
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.cat(found.scores), torch.cat(expected.scores), atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------------- caches that are kept


@pytest.mark.parametrize("drafts", [3, None])
def test_a_second_turn(drafts):
    """Over the cache of the first, of one row and of several; and then a sparse one again."""
    for rows in (1, 2):
        found, held = [], None
        for net in (reference("llama"), model("llama")):
            with exact(net, drafts) if net is model("llama") else nullcontext():
                inputs = prompt(rows, 120)
                first = net.generate(**inputs, do_sample=False, max_new_tokens=20, return_dict_in_generate=True)
                more = torch.cat((first.sequences, prompt(rows, 2, seed=9)["input_ids"]), dim=1)
                held, go = first.past_key_values, {"attention_mask": torch.ones_like(more)}
                found.append(net.generate(more, past_key_values=held, do_sample=False, max_new_tokens=20, **go))
        assert torch.equal(*found)
    assert held is not None
    drafted, calls = held.stats().drafted, held.stats().sparse_calls
    if drafts is not None:  # else it depends on the first turns' times
        assert drafted > 0
    with sparse(model("llama"), CONFIG):
        go = {"attention_mask": torch.ones_like(found[1])}
        model("llama").generate(found[1], past_key_values=held, do_sample=False, max_new_tokens=9, **go)
    assert held.stats().drafted == drafted
    assert held.stats().sparse_calls >= calls + 8
    held.reset()
    assert held.stats().drafted == 0


def test_an_interrupt_leaves_no_drafts_behind():
    kv = two_level(False, **TIGHT, level="token")
    net, calls = build("llama", "sparsekv"), []
    original = net.prepare_inputs_for_generation

    def prepare(*args, **kwargs):
        calls.append(kv.get_seq_length())
        if len(calls) == 4:  # in the middle of a round
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    net.prepare_inputs_for_generation = prepare
    with exact(net), pytest.raises(KeyboardInterrupt):
        net.generate(**prompt(1, 120), past_key_values=kv, do_sample=False, max_new_tokens=20)
    assert calls == [0, 120, 121, 122]
    assert kv.get_seq_length() == 120
    assert not kv.row_table.exactness.everything
    net.prepare_inputs_for_generation = original
    expected = reference("llama").generate(**prompt(1, 120), do_sample=False, max_new_tokens=20)
    ids = torch.cat((prompt(1, 120)["input_ids"], expected[:, 120:121]), dim=1)
    with exact(net):
        again = net.generate(ids, past_key_values=kv, do_sample=False, max_new_tokens=19)
    assert torch.equal(again, expected)


# ---------------------------------------------------------------------- refused, and put back


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offload": True}, "host memory"),
        ({"offload": OffloadConfig(kv_dtype="int8")}, "host memory"),
        ({"config": TokenConfig(level="two_level", lag=True)}, "in the step before"),
        ({"config": PredictiveConfig(predictor="assembled")}, "in the step before"),
        ({"drafts": 0}, "not between 1 and max_draft=16"),
        ({"drafts": 17}, "not between 1 and max_draft=16"),
        ({"exact": False, "drafts": 3}, "give both, or none"),
    ],
)
def test_refused(given, message):
    net = model("llama")
    with pytest.raises(ValueError, match=message), sparse(net, **{"exact": True, **given}):
        pass
    assert not isinstance(net, CheckedSampling)


@pytest.mark.quick
def test_exact_is_a_bool():
    with pytest.raises(TypeError, match="exact must be True or False"), sparse(model("llama"), exact=4):
        pass


def test_a_cache_in_host_memory_is_refused():
    with exact(model("llama")), pytest.raises(ValueError, match="host memory"):
        model("llama").generate(**prompt(1, 40), past_key_values=two_level(True), max_new_tokens=2)


@pytest.mark.quick
def test_the_model_is_put_back():
    """Inside an inner context its settings hold, and so they do for a cache of transformers' own."""
    net = build("llama", "sdpa")
    kind = type(net)
    with sparse(net, CONFIG, exact=True):
        assert isinstance(net, CheckedSampling) and type(net).__name__ == kind.__name__
        with sparse(net, CONFIG):
            assert type(net) is kind
            out = net.generate(**prompt(1, 120), do_sample=False, max_new_tokens=9, return_dict_in_generate=True)
            assert out.past_key_values.stats().sparse_calls == 16
        assert isinstance(net, CheckedSampling)
        with pytest.warns(UserWarning, match="it was given a DynamicCache"):
            net.generate(**prompt(1, 40), past_key_values=DynamicCache(), max_new_tokens=3)
    assert type(net) is kind
    plain, runner = imitated("llama")
    before = type(plain)
    with sparse(plain, CONFIG, exact=True):
        assert issubclass(type(plain), before)
    assert type(plain) is before
    runner.remove()
    assert type(plain) is kind


@pytest.mark.quick
def test_streaming_selects_too():
    net = model("llama")
    with sparse(net, StreamingConfig(window=32), exact=True, drafts=2):
        out = net.generate(**prompt(1, 120), do_sample=False, max_new_tokens=20)
    assert torch.equal(out, reference("llama").generate(**prompt(1, 120), do_sample=False, max_new_tokens=20))


def test_as_custom_generate():
    net, go = build("llama", "sdpa"), {"do_sample": False, "max_new_tokens": 20}
    expected = net.generate(**prompt(2, 120), **go)
    how = {"custom_generate": hf_sparsekv.generate, "sparse_config": CONFIG, "exact": True, "drafts": 3}
    out = net.generate(**prompt(2, 120), **go, **how, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert out.past_key_values.stats().drafted > 0
    mine = SparseCache(CONFIG, None, net.config)
    assert torch.equal(net.generate(**prompt(2, 120), **go, **how, past_key_values=mine), expected)
    assert mine.stats().drafted > 0
    sparse_steps = SparseCache(CONFIG, None, net.config)
    with sparse(net):
        net.generate(**prompt(2, 120), **go, past_key_values=sparse_steps)
    again = torch.cat((prompt(2, 120)["input_ids"], expected[:, 120:], expected[:, :1]), 1)
    with pytest.raises(ValueError, match="goes on from the keys and values of full attention"):
        net.generate(again, **go, **how, past_key_values=sparse_steps)


def test_a_model_that_drops_out():
    """Each pass draws numbers, so that drafts would change the text."""
    net = build("phi3", "sdpa", resid_pdrop=0.2).train()
    texts = []
    for exactly in (False, True):
        torch.manual_seed(3)
        with sparse(net, CONFIG, exact=True, drafts=3) if exactly else nullcontext():
            texts.append(net.generate(**prompt(1, 120), do_sample=False, max_new_tokens=20))
    assert torch.equal(*texts)


@pytest.mark.few
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_dense_steps_that_run_ahead(monkeypatch, kept, seed):
    """On a GPU the loop of an optimised model learns one step later that a text has ended."""
    monkeypatch.setattr(late_stop, "_runs_ahead", lambda device: True)
    monkeypatch.setattr(torch, "Event", Event)
    draw = random.Random(seed)
    monkeypatch.setattr(Pace, "next", lambda *_, **__: Next(draw.choice((0, 0, 2)), draw.randint(2, 9)))
    inputs, told = prompt(1, 120), [Told(), Told()]
    text = reference("llama").generate(**inputs, do_sample=False, max_new_tokens=40)[0, 120:].tolist()
    go = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": text[11 + seed], "pad_token_id": PAD}
    expected = reference("llama").generate(**inputs, **go, streamer=told[0])
    net, _ = imitated("llama")
    with exact(net, None):
        out = net.generate(**inputs, **go, streamer=told[1], return_dict_in_generate=kept)
    assert torch.equal(out.sequences if kept else out, expected)
    assert told[0].heard == told[1].heard
    if kept:
        assert out.past_key_values.get_seq_length() == expected.shape[1] - 1
