"""Misuse in the middle of things, errors half-way, memory that runs out."""

from __future__ import annotations

import copy

import pytest
import torch
from caches import FULL, SMALL, TIGHT, two_level
from captured import Imitation
from models import build, model, prompt
from test_errors import IDS, feed, works

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig

# ---------------------------------------------------------------------- calls


def test_output_attentions():
    with pytest.raises(ValueError, match="never computes attention weights: drop output_attentions=True"):
        model("llama")(IDS, output_attentions=True)
    with pytest.raises(ValueError, match="never computes attention weights"):
        model("llama").generate(
            IDS, past_key_values=two_level(), max_new_tokens=2, output_attentions=True, return_dict_in_generate=True
        )


def test_mask_of_other_columns():
    """Too short, or not the one that these tokens were cached with; the refusals change nothing."""
    cache, inputs = two_level(**FULL), prompt(2, 90, (0, 9))
    feed("llama", cache, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    right = torch.cat((inputs["attention_mask"], torch.ones(2, 3, dtype=torch.long)), dim=1)
    more, changed = IDS[:, :3].repeat(2, 1), right.clone()
    changed[0, 4] = 0
    for n in (1, 3):
        with pytest.raises(ValueError, match=rf"mask has {n} columns, .* this cache holds 90 tokens.*reset\(\)"):
            feed("llama", cache, more[:, :n], attention_mask=torch.ones(2, n))
        with pytest.raises(ValueError, match="attention_mask differs from the one these tokens were cached with"):
            feed("llama", cache, more[:, :n], attention_mask=changed[:, : 90 + n])
    with pytest.raises(ValueError, match="attention_mask differs"):
        feed("llama", cache, more)  # no mask: nothing would be padding
    feed("llama", cache, more, attention_mask=right)


@pytest.mark.parametrize("n", [1, 5])
def test_backward_through_cached_tokens(n):
    cache = two_level(**FULL)
    feed("llama", cache, IDS)
    loss = build("llama", "sparsekv")(IDS[:, :n], past_key_values=cache).logits.sum()
    with pytest.raises(RuntimeError, match="attention over a sparse cache has no gradient: train without past_key_val"):
        loss.backward()


def test_backward_through_prefill():
    """The first forward is plain attention, gradient included; the cache keeps no graph."""
    grads = []
    for attn in ("sparsekv", "sdpa"):
        net = build("llama", attn)
        cache = two_level(**FULL) if attn == "sparsekv" else None
        net(IDS, past_key_values=cache, use_cache=cache is not None).logits.square().mean().backward()
        grads.append([p.grad for p in net.parameters()])
    for mine, theirs in zip(*grads):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_dropout_in_training_mode():
    net = build("llama", "sparsekv", attention_dropout=0.5).train()
    cache = two_level(**FULL)
    net(IDS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"dropout is not supported over a sparse cache: call model\.eval\(\)"):
        net(IDS[:, :1], past_key_values=cache)


# ---------------------------------------------------------------------- errors half-way


class Stop(BaseException):
    """Like KeyboardInterrupt: not an Exception."""


def interrupted(net, layer, cache, ids):
    """A forward that stops before ``layer``."""

    def stop(*args, **kwargs):
        raise Stop

    hook = net.model.layers[layer].register_forward_pre_hook(stop)
    try:
        with torch.no_grad():
            net(ids, past_key_values=cache)
    except Stop:
        return
    finally:
        hook.remove()


@pytest.mark.quick
@pytest.mark.pairwise
@pytest.mark.parametrize("past", [0, 60])
@pytest.mark.parametrize(("name", "layer"), [("llama", 1), ("gemma3", 1), ("gemma3", 2)])
@pytest.mark.parametrize("n", [1, 30])
def test_a_forward_that_stopped_is_noticed(name, layer, past, n):
    net, cache = build(name, "sparsekv"), two_level(**FULL)
    if past:
        feed(name, cache, IDS[:, :past])
    interrupted(net, layer, cache, IDS[:, past : past + n])
    for size in (1, 20):
        with pytest.raises(RuntimeError, match=r"this cache is incomplete.*[Cc]all reset\(\) and prefill again"):
            feed(name, cache, IDS[:, :size])
    cache.reset()
    assert works(cache, name)


def test_an_error_before_anything_is_stored_changes_nothing():
    net, cache = build("llama", "sparsekv"), two_level(**FULL)
    feed("llama", cache, IDS[:, :60])
    interrupted(net, 0, cache, IDS[:, 60:61])
    found = feed("llama", cache, IDS[:, 60:])
    with torch.no_grad():
        torch.testing.assert_close(found, net(IDS).logits[:, 60:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("ids", [IDS[:, :1], IDS[:, :20]], ids=["step", "chunk"])
def test_an_error_inside_attention(monkeypatch, ids):
    cache = two_level(**TIGHT)
    feed("llama", cache, IDS)
    layer = cache.sparse_layers[1]
    with monkeypatch.context() as patch:

        def fail(*args):
            raise Stop

        patch.setattr(layer.policy, "look_ahead", fail)
        with pytest.raises(Stop):
            feed("llama", cache, ids)
    with pytest.raises(RuntimeError, match=r"incomplete after an error \(Stop in layer 1\): call reset\(\)"):
        feed("llama", cache, IDS[:, :1])
    cache.reset()
    assert works(two_level(**FULL))
    feed("llama", cache, IDS)
    assert cache.get_seq_length() == 90


def test_tokens_that_nobody_attended_to():
    cache = two_level(**FULL)
    feed("llama", cache, IDS)
    keys = torch.zeros(1, 2, 1, 16)
    cache.update(keys, keys, 0)
    assert cache.get_seq_length() == 91  # at once, as transformers' own caches
    with pytest.raises(RuntimeError, match="tokens given to layer 0 were never attended to"):
        feed("llama", cache, IDS[:, :1])


# ---------------------------------------------------------------------- host memory


def limited(size):
    return OffloadedSparseCache(TokenConfig(**SMALL, **FULL), OffloadConfig(max_host_bytes=size))


MESSAGE = r"of host memory, the limit is .*raise OffloadConfig\(max_host_bytes=\.\.\.\)"
BLOCK = 16 * 2 * 32 * 4  # bytes: 16 tokens, two KV heads, key and value of 16 numbers each
POOL = 16 * BLOCK
SMALLEST = 6 * BLOCK  # of a layer, one row of 90 tokens


PREFILLS = [
    (3 * POOL, 900, r"after an error \(MemoryError in layer 0\)"),
    (SMALLEST * 3 // 2, 90, r"hold \[0, 90\] tok"),
]


@pytest.mark.parametrize(("size", "length", "message"), PREFILLS, ids=["first layer", "second layer"])
def test_prefill_beyond_the_limit(size, length, message):
    cache = limited(size)
    with pytest.raises(MemoryError, match=MESSAGE):
        feed("llama", cache, prompt(1, length)["input_ids"])
    with pytest.raises(RuntimeError, match=message):
        feed("llama", cache, IDS[:, :1])
    cache.reset()
    assert size < 3 * POOL or works(cache)


def test_decode_beyond_the_limit():
    cache = limited(3 * POOL)
    with pytest.raises(MemoryError, match=MESSAGE):
        model("llama").generate(prompt(1, 150)["input_ids"], max_new_tokens=400, past_key_values=cache)
    assert cache.get_seq_length() > 250
    with pytest.raises(RuntimeError, match="this cache is incomplete after an error"):
        feed("llama", cache, IDS[:, :1])
    cache.reset()
    assert works(cache)


def test_reset_with_another_batch_size_needs_no_memory_twice():
    cache = limited(5 * SMALLEST)
    feed("llama", cache, IDS)
    cache.reset()
    feed("llama", cache, IDS.repeat(2, 1))
    assert cache.memory_bytes()["host"] == 4 * SMALLEST == cache.budget.used


@pytest.mark.parametrize("how", ["step", "captured", "chunk", "second layer"])
def test_memory_that_one_cache_lacks_is_not_missed_by_its_copy(how):
    """Both share the pools. What the one has no room for is none that the other has to make."""
    full = 16 * 16 + 20  # the row's 16 blocks, which fill the smallest pool; window and drafts
    ids = prompt(1, full + 120)["input_ids"]
    cache = limited(2 * POOL + (4 * BLOCK if how == "second layer" else 0))
    net = build("llama", "sparsekv")
    if how == "captured":
        Imitation(net).install()
    with torch.no_grad():
        for part in ids[:, :full].split(256, dim=1):
            net(part, past_key_values=cache)
        copied = copy.deepcopy(cache)
        with pytest.raises(MemoryError, match=MESSAGE):
            for part in ids[:, full:].split(1 if how in ("step", "captured") else 60, dim=1):
                net(part, past_key_values=cache)
        assert cache.sparse_layers[0].store.pool.capacity == (20 if how == "second layer" else 16)
        steps = ids[:, full : full + 10].split(1, dim=1)
        found = torch.cat([net(step, past_key_values=copied).logits.clone() for step in steps], 1)
        want = model("llama")(ids[:, : full + 10]).logits[:, full:]
    torch.testing.assert_close(found, want, atol=2e-4, rtol=1e-4)
    # A captured step had not begun.
    refused = (MemoryError, MESSAGE) if how == "captured" else (RuntimeError, "this cache is incomplete")
    with torch.no_grad(), pytest.raises(refused[0], match=refused[1]):
        net(ids[:, :1], past_key_values=cache)
