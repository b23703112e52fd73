"""Exact mode on a real GPU: kernels, and captured drafts and verifications."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from caches import FULL, SMALL, two_level
from inside import attention_of
from models import PAD, build, prompt
from test_dense_drafts import PADS, compare
from test_exact_mode import DEVICE, TIGHT, written

from hf_sparsekv import TokenConfig, sparse
from hf_sparsekv.checking import loop, pace

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new", [1, 4, 8, 17])
@pytest.mark.parametrize("how", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("name", ["llama", "llama-mqa", "glm4-moe-lite"])
def test_against_the_definition(name, how, new, dtype):
    compare(build(name, "sparsekv").to("cuda", dtype), how, new)


@pytest.mark.pairwise
@pytest.mark.parametrize("pads", [None, (0, 0), PADS], ids=["one", "two", "padded"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4-moe-lite"])
@pytest.mark.parametrize("cache", DEVICE)
def test_the_text_of_full_attention(cache, name, pads):
    """In float32, where sums in another order change no token."""
    inputs = {key: value.cuda() for key, value in prompt(len(pads or (0,)), 165, pads).items()}
    plain = build(name, "sdpa").cuda()
    expected = plain.generate(**inputs, do_sample=False, max_new_tokens=40, pad_token_id=PAD)
    net = build(name, "sparsekv").cuda()
    found, kv = written(net, inputs, cache, max_new_tokens=40, pad_token_id=PAD)
    assert torch.equal(found, expected)
    stats = kv.stats()
    assert stats.drafted > 0
    if name != "gemma3":
        assert stats.exact_calls == 0, "verifications were not captured"


@pytest.mark.parametrize("rows", [1, 3])
def test_a_seed_gives_the_text_that_it_gives_without_drafts(rows):
    inputs = {key: value.cuda() for key, value in prompt(rows, 165).items()}
    found, left, go = [], [], {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "max_new_tokens": 40}
    for net in (build("llama", "sdpa").cuda(), build("llama", "sparsekv").cuda()):
        torch.manual_seed(3)
        if attention_of(net) == "sdpa":
            found.append(net.generate(**inputs, **go))
            left.append(torch.cuda.get_rng_state())
            continue
        kv = two_level(False, **TIGHT, level="token")
        with sparse(net, kv.config, exact=True, drafts=4):
            found.append(net.generate(**inputs, **go, past_key_values=kv))
        left.append(torch.cuda.get_rng_state())
        assert kv.stats().drafted > 0
    assert torch.equal(*found)
    assert torch.equal(*left)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize("exact", [{"exact": True, "drafts": 3}, {"exact": True}, {}], ids=["rounds", "any", "sparse"])
def test_rows_of_their_own(sample, exact):
    """Nobody keeps the cache; rows end one after the other. The generator is left as without drafts."""
    inputs = {key: value.cuda() for key, value in prompt(4, 165, (0, 5, 61, 3)).items()}
    go = {"do_sample": sample, "max_new_tokens": 60, "eos_token_id": [5, 17, 40], "pad_token_id": PAD}
    found, left = [], []
    config = two_level(False, **TIGHT, level="token").config if exact else TokenConfig(**{**SMALL, **FULL})
    for net in (build("llama", "sdpa").cuda(), build("llama", "sparsekv").cuda()):
        plain = attention_of(net) == "sdpa"
        torch.manual_seed(3)
        with nullcontext() if plain else sparse(net, config, **exact):
            found.append(net.generate(**inputs, **go))
        left.append(torch.cuda.get_rng_state())
    assert torch.equal(*found)
    assert torch.equal(*left)


def test_replayed_steps_are_no_full_attention():
    """A cache that they have filled is refused."""
    inputs = {key: value.cuda() for key, value in prompt(1, 165).items()}
    net, go = build("llama", "sparsekv").cuda(), {"do_sample": False, "max_new_tokens": 30, "pad_token_id": PAD}
    kv = two_level(False, **TIGHT, level="token")
    with sparse(net):
        ids = net.generate(**inputs, **go, past_key_values=kv)
    with sparse(net, exact=True), pytest.raises(ValueError, match="only the first 165 are known"):
        net.generate(ids, **go, past_key_values=kv)
    kv.crop(-29)
    with sparse(net, exact=True, drafts=3):
        found = net.generate(ids, attention_mask=torch.ones_like(ids), **go, past_key_values=kv)
    plain = build("llama", "sdpa").cuda()
    assert torch.equal(found, plain.generate(ids, attention_mask=torch.ones_like(ids), **go))


def test_the_number_of_drafts_follows_the_times(monkeypatch):
    """The text is the same in any case."""
    inputs = {key: value.cuda() for key, value in prompt(1, 165).items()}
    monkeypatch.setattr(loop, "CAPTURES", 0.0)  # which so small a model would take minutes to make up for
    monkeypatch.setattr(pace, "_LOSES", 10.0)  # so that they are tried soon, however long rounds take on a busy machine
    expected = build("llama", "sdpa").cuda().generate(**inputs, do_sample=False, max_new_tokens=800)
    found, kv = written(build("llama", "sparsekv").cuda(), inputs, drafts=None, max_new_tokens=800)
    assert torch.equal(found, expected)
    assert kv.stats().drafted > 0
