"""A later mask hides cached tokens: the last ones of a row are dropped, as in a batch of conversations."""

from __future__ import annotations

import copy

import pytest
import torch
from caches import CACHES, CODED, FULL, ONE_EACH, TIGHT, two_level
from captured import imitated
from models import PAD, build, model, prompt, reference
from transformers import DynamicCache

NEAR = 2e-3  # of logits whose spread is about 10


def turns(net, cache, new: int = 24, pads=(0, 7), count: int = 3, ends=(5, 24), **options) -> list[torch.Tensor]:
    """Conversations of two rows, of which one answers in fewer tokens each time: answers of each turn.

    What is behind an answer's end is filled up and masked in the next turn, as in any loop around ``generate()``.
    """
    inputs, found = prompt(2, 70, pads), []
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for turn in range(count):
        out = net.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=PAD,
            **options,
        )
        answer = out[:, ids.shape[1] :].clone()
        live = torch.ones_like(answer)
        for row in range(2):
            end = ends[(row + turn) % 2]
            live[row, end:] = 0
        found.append(answer)
        asked = prompt(2, 9, (0, turn), seed=10 + turn)
        ids = torch.cat((out, asked["input_ids"]), 1)
        mask = torch.cat((mask, live, asked["attention_mask"]), 1)
    return found


FEW = {"new": 10, "ends": (3, 10)}  # what is masked is in the ring still
MANY = {"new": 40, "ends": (5, 40)}  # has filled blocks
SEALING = ("device-default", "host-default", "host", "progressive-host", "predictive-host", "device-dense1")


@pytest.fixture(scope="module")
def expected():
    return {which["new"]: turns(reference("llama"), DynamicCache(), **which) for which in (FEW, MANY)}


@pytest.mark.few(name=ONE_EACH)
@pytest.mark.parametrize(("name", "which"), [*((name, FEW) for name in CACHES), *((name, MANY) for name in SEALING)])
def test_three_turns_of_two_conversations(name, which, expected):
    cache = CACHES[name](**FULL)
    found = turns(model("llama"), cache, **which)
    assert all(map(torch.equal, found, expected[which["new"]]))
    assert len({layer.store.held.lengths for layer in cache.sparse_layers}) == 1


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replayed"])
def test_conversations_whose_answers_end_by_a_token(captured):
    """``generate()`` itself fills up: the rows and their masks as a chat makes them."""
    net = imitated()[0] if captured else build("llama", "sparsekv")
    plain, answers = reference("llama"), []
    first = prompt(2, 70)["input_ids"]
    eos = int(plain.generate(first, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, 72])
    for model_, cache in ((plain, DynamicCache()), (net, two_level(level="auto", lag=False, **FULL))):
        ids, mask, found = first, torch.ones_like(first), []
        for turn in range(3):
            out = model_.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=24, do_sample=False, eos_token_id=eos
            )
            new = out[:, ids.shape[1] :]
            live = (new == eos).cumsum(1) - (new == eos).long() == 0
            found.append(new)
            more = prompt(2, 5, seed=turn)["input_ids"]
            ids = torch.cat((out, more), 1)
            mask = torch.cat((mask, live.long(), torch.ones_like(more)), 1)
        answers.append(found)
    assert all(map(torch.equal, *answers))
    assert not bool(mask.all()), "one conversation's answer was shorter"


@pytest.mark.few(name=("host-default", "host-nolag", "progressive-host", "streaming"))
@pytest.mark.parametrize(
    "name", ["device-default", "host-default", "device-token", "host-nolag", "progressive-host", "streaming"]
)
def test_what_is_chosen_later_is_as_if_they_had_never_been(name):
    """Against a cache that got no tokens there from the beginning."""
    net, inputs = model("llama"), prompt(2, 100, (0, 21))
    steps, mask = prompt(2, 30, seed=1)["input_ids"], torch.cat((inputs["attention_mask"], torch.ones(2, 80).long()), 1)
    hidden = mask.clone()
    hidden[0, 104:130] = 0
    late, never = (CACHES[name](**TIGHT) for _ in range(2))

    def step(cache, ids, seen):
        n = cache.get_seq_length() + ids.shape[1]
        positions = (seen.cumsum(1) - 1).clamp_min(0)[:, n - ids.shape[1] : n]
        return net(ids, attention_mask=seen[:, :n], position_ids=positions, past_key_values=cache).logits[:, -1]

    with torch.no_grad():
        for cache, seen in ((late, mask), (never, hidden)):
            step(cache, inputs["input_ids"], seen)
            for one in steps.split(1, dim=1):
                step(cache, one, seen)
        again = prompt(2, 12, seed=2)["input_ids"]
        for part in (again, *prompt(2, 25, seed=3)["input_ids"].split(1, dim=1)):
            assert (step(late, part, hidden) - step(never, part, hidden)).abs().max() < NEAR
    assert late.sparse_layers[0].store.held.same(never.sparse_layers[0].store.held)


@pytest.mark.parametrize("name", ["device-default", "host-default"])
def test_blocks_of_hidden_tokens_are_free(name):
    """At once: a block that stayed named could be a copy's when it is sealed again."""
    net, cache, mask = model("llama"), CACHES[name](**TIGHT), torch.ones(2, 161, dtype=torch.long)
    ids = prompt(2, 161)["input_ids"]
    with torch.no_grad():
        net(ids[:, :160], attention_mask=mask[:, :160], past_key_values=cache)
        mask[0, 104:160] = 0
        positions = (mask.cumsum(1) - 1)[:, 160:]
        net(ids[:, 160:], attention_mask=mask, position_ids=positions, past_key_values=cache)
    sealed = cache.sparse_layers[0].store.held.sealed
    assert sealed[0] < sealed[1]
    assert tuple((cache.row_table.blocks.host >= 0).sum(1)) == sealed


CROWDED = (
    "host-lag-tail",
    "host-default-smallpool",
    "device-block",
    "predictive",
    "predictive-second",
)


@pytest.mark.few(name=ONE_EACH)
@pytest.mark.parametrize("name", [*SEALING, *CROWDED, "streaming", "host-int8", "progressive-host-int8"])
def test_small_budgets_copies_and_rows_in_another_order(name, tmp_path):
    """Nothing is chosen that is gone; a copy made before keeps it."""
    cache, net = (CACHES | CODED)[name](**TIGHT), model("llama")
    turns(net, cache, count=1)
    kept, mask = copy.deepcopy(cache), torch.ones(2, 200, dtype=torch.long)
    mask[1, :7] = 0
    mask[0, 75:93] = 0
    cache.reorder_cache(torch.tensor([1, 0]))
    mask = mask[[1, 0]]
    ids = prompt(2, 9, seed=4)["input_ids"]
    with torch.no_grad():
        assert torch.isfinite(net(ids, attention_mask=mask[:, :102], past_key_values=cache).logits).all()
        for i in range(8):
            out = net(ids[:, :1], attention_mask=mask[:, : 103 + i], past_key_values=cache)
            assert torch.isfinite(out.logits).all()
        assert cache.sparse_layers[0].store.held.lengths == (110 - 7, 110 - 18)
        assert kept.sparse_layers[0].store.held.lengths == (93, 86)
        mask = torch.ones(2, 94, dtype=torch.long)
        mask[1, :7] = 0
        assert torch.isfinite(net(ids[:, :1], attention_mask=mask, past_key_values=kept).logits).all()
    cache.crop(-18)
    assert cache.sparse_layers[0].store.held.lengths == (92 - 7, 92 - 17)


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next", "deepseek-v3"])
def test_sliding_linear_and_latent_layers(family):
    net = model(family)
    make = {"model_config": net.config}
    expected = turns(reference(family), DynamicCache(config=net.config), count=2)
    found = turns(net, two_level(False, level="auto", lag=False, **make, **FULL), count=2)
    assert all(map(torch.equal, found, expected))


def test_a_row_may_lose_everything():
    """Then its new tokens see each other alone."""
    cache, stock, ids = two_level(level="auto", lag=False, **FULL), DynamicCache(), prompt(2, 90)["input_ids"]
    mask = torch.ones(2, 100, dtype=torch.long)
    with torch.no_grad():
        for net, held in ((model("llama"), cache), (reference("llama"), stock)):
            net(ids[:, :80], past_key_values=held)
        mask[1, :80] = 0
        found, expected = (
            net(ids[:, 80:], attention_mask=mask[:, :90], past_key_values=held).logits
            for net, held in ((model("llama"), cache), (reference("llama"), stock))
        )
    assert (found - expected).abs().max() < NEAR
    assert cache.sparse_layers[0].store.held.lengths == (90, 10)


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_refused_changes_nothing(offload):
    cache, net, inputs = two_level(offload, level="auto", lag=False, **FULL), model("llama"), prompt(2, 90, (0, 9))
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 5, dtype=torch.long)), 1)
    middle, shown = mask.clone(), mask.clone()
    middle[0, 40:50] = 0
    shown[1, 8] = 1
    more = prompt(2, 5, seed=1)["input_ids"]
    with torch.no_grad():
        net(**inputs, past_key_values=cache)
        for wrong, message in ((middle, "hides tokens before others that it shows"), (shown, "shows padding again")):
            with pytest.raises(ValueError, match=f"attention_mask differs .* it {message}.*start a new cache"):
                net(more, attention_mask=wrong, past_key_values=cache)
        hidden = mask.clone()
        hidden[0, 80:90] = 0
        net(more, attention_mask=hidden, past_key_values=cache)
        with pytest.raises(ValueError, match="shows padding again"):
            net(more, attention_mask=torch.cat((mask, mask[:, -5:]), 1), past_key_values=cache)
        assert cache.sparse_layers[0].store.held.lengths == (85, 86)
        net(more, attention_mask=torch.cat((hidden, mask[:, -5:]), 1), past_key_values=cache)
