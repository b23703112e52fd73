"""The mask function in all its forms, and the attention function over everything that is not a cache of ours."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from caches import FULL, two_level
from inside import attention_of
from models import build, model, prompt, reference
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.masking_utils import (
    causal_mask_function,
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from hf_sparsekv.attention.masks import new_columns, sparsekv_mask

CLOSE = {"atol": 3e-4, "rtol": 1e-4}


def causal(q, n):
    return torch.ones(q, n, dtype=torch.bool).tril(n - q)[None, None]


def call(q, n, mask=None, **kwargs):
    batch = 2 if mask is None else mask.shape[0]
    return sparsekv_mask(
        batch_size=batch, q_length=q, kv_length=n, q_offset=n - q, attention_mask=mask, device="cpu", **kwargs
    )


# ---------------------------------------------------------------------- the function


def test_forms():
    ones, padded = torch.ones(2, 9), torch.ones(2, 9)
    padded[1, :4] = 0
    for mask in (None, ones, ones.bool()):
        assert call(9, 9, mask) is None  # prefill
        assert call(1, 9, mask) is None  # decode
        later = call(3, 9, mask)  # None would be causal from the first column
        assert later.dtype == torch.bool and later.shape == (2, 9) and later.all()
    for mask in (padded, padded.bool(), padded.long(), torch.cat((padded, torch.zeros(2, 5)), 1)):
        for q in (1, 3, 9):
            assert torch.equal(call(q, 9, mask), padded.bool())


def test_idempotence():
    """generate() may pass a mask through the mask function twice."""
    padded = prompt(2, 9, (0, 4))["attention_mask"]
    for q in (1, 3, 9):
        once = call(q, 9, padded)
        assert torch.equal(call(q, 9, once), once)


class Waits(TorchDispatchMode):
    """Counts what the host would wait for a GPU for."""

    waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.waits += func in (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("given", [False, True])
def test_a_piece_without_padding_waits_for_nothing(given):
    """But for the caller's mask, which is looked at once."""
    cache, net, ids = two_level(False, **FULL), model("llama"), prompt(2, 90)["input_ids"]
    with torch.no_grad():
        net(ids[:, :60], past_key_values=cache)
        with Waits() as counted:
            net(ids[:, 60:], past_key_values=cache, attention_mask=torch.ones(2, 90) if given else None)
    assert counted.waits == int(given)


def test_a_piece_that_forgets_the_padding():
    cache, net, inputs = two_level(False, **FULL), model("llama"), prompt(2, 60, (0, 20))
    with torch.no_grad():
        net(**inputs, past_key_values=cache)
        with pytest.raises(ValueError, match="differs from the one these tokens were cached with"):
            net(prompt(2, 5)["input_ids"], past_key_values=cache)


@pytest.mark.parametrize("way", ["rows", "columns"])
def test_a_piece_behind_padding_that_is_gone(way):
    """Rows or columns that had it were left out: a mask that hides nothing is right again."""
    cache, net, ids = two_level(False, **FULL), model("llama"), prompt(2, 65)["input_ids"]
    mask = torch.ones(2, 60)
    with torch.no_grad():
        if way == "rows":
            mask[1, :20] = 0
            net(ids[:, :60], attention_mask=mask, past_key_values=cache)
            cache.batch_select_indices(torch.tensor([0]))
            ids = ids[:1]
        else:
            mask[1, 50:] = 0
            net(ids[:, :60], attention_mask=mask, past_key_values=cache)
            cache.crop(-10)
            ids = torch.cat((ids[:, :50], ids[:, 60:]), dim=1)
        out = net(ids[:, -5:], past_key_values=cache).logits
        assert torch.allclose(out, net(ids).logits[:, -5:], atol=1e-4)


def test_too_short():
    with pytest.raises(ValueError, match="attention_mask has 8 columns, but 6 cached and 3 new tokens make 9"):
        call(3, 9, torch.ones(2, 8))
    with pytest.raises(ValueError, match="has 4 columns, as for a text of 4 tokens, but this cache holds 8 tokens"):
        call(1, 9, torch.ones(2, 4))


def test_what_is_not_plainly_causal_gets_the_mask_of_sdpa():
    padded = prompt(2, 9, (0, 4))["attention_mask"].bool()
    window = sliding_window_causal_mask_function(4)
    for kwargs in (
        {"mask_function": window, "local_size": 4},
        {"mask_function": lambda b, h, q, k: k <= q},
        {"allow_is_causal_skip": False},
    ):
        common = {"batch_size": 2, "q_length": 3, "kv_length": 9, "q_offset": 6, "kv_offset": 0}
        common.update({"mask_function": causal_mask_function, "attention_mask": padded, "device": "cpu", **kwargs})
        assert torch.equal(sparsekv_mask(**common), sdpa_mask(**common))


def test_through_transformers():
    """Masks of transformers' own builders, as models get them."""
    padded = prompt(2, 20, (0, 7))["attention_mask"]
    embeds = torch.zeros(2, 20, 64)
    for name, build_mask in (("llama", create_causal_mask), ("llama", create_bidirectional_mask)):
        kwargs = {} if build_mask is create_bidirectional_mask else {"past_key_values": None}
        for mask in (None, padded):
            ours = build_mask(config=model(name).config, inputs_embeds=embeds, attention_mask=mask, **kwargs)
            theirs = build_mask(config=reference(name).config, inputs_embeds=embeds, attention_mask=mask, **kwargs)
            if ours is not None and ours.ndim == 2:
                ours = ours[:, None, None] & causal(20, 20)
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    for mask in (None, padded):
        kwargs = {"inputs_embeds": embeds, "attention_mask": mask, "past_key_values": None}
        ours = create_sliding_window_causal_mask(config=model("gemma3").config, **kwargs)
        theirs = create_sliding_window_causal_mask(config=reference("gemma3").config, **kwargs)
        assert ours.ndim == 4 and torch.equal(ours, theirs)


def test_new_columns():
    mask = prompt(2, 9, (0, 4))["attention_mask"].bool()
    assert new_columns(None, 0, 9) is None
    assert torch.equal(new_columns(mask, 2, 6), mask[:, 2:6])
    square = mask[:, None, None] & causal(9, 9)
    additive = torch.where(square, 0.0, torch.finfo(torch.float32).min)
    for form in (square, additive, torch.where(square, 0.0, -torch.inf)):
        assert torch.equal(new_columns(form, 0, 9), mask)
        assert torch.equal(new_columns(form[:, :, 6:], 6, 9), mask[:, 6:])


# ---------------------------------------------------------------------- forwards without a cache of ours


@torch.no_grad()
def both(name, ids, ours=None, theirs=None, rows=None, **kwargs):
    found = model(name)(ids, past_key_values=ours, use_cache=ours is not None, **kwargs).logits
    expected = reference(name)(ids, past_key_values=theirs, use_cache=theirs is not None, **kwargs).logits
    if rows is not None:
        found, expected = found[rows], expected[rows]
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt-oss", "mistral-window", "phi3"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_without_a_cache(name, side):
    inputs = prompt(2, 50, (0, 17) if side != "none" else None)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    both(name, ids, rows=mask.bool(), attention_mask=mask if side != "none" else None)


@pytest.mark.few
@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_stock_caches(name, kind):
    inputs = prompt(3, 50, (0, 5, 31))
    generate = {"do_sample": False, "max_new_tokens": 25, "disable_compile": True}
    if kind == "static":
        generate["cache_implementation"] = "static"
    texts = [net.generate(**inputs, **generate) for net in (model(name), reference(name))]
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_training(name, side):
    inputs = prompt(2, 40, (0, 11))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if side == "right":
        ids, mask = ids.flip(1), mask.flip(1)
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    labels = ids.masked_fill((mask == 0) | (before == 0), -100)  # nothing is predicted from padding
    losses, grads = [], []
    for attn in ("sparsekv", attention_of(reference(name))):
        net = build(name, attn).train()
        loss = net(ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        grads.append([p.grad for p in net.parameters() if p.grad is not None])
    torch.testing.assert_close(*losses)
    for mine, theirs in zip(*grads):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=2e-3)


# ---------------------------------------------------------------------- 4-D masks over a cache of ours


@pytest.mark.pairwise
@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("batch_of_mask", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_that_the_user_makes(form, batch_of_mask, padded):
    if padded and batch_of_mask == 1:
        pads = (7, 7)
    else:
        pads = (0, 7) if padded else (0, 0)
    inputs = prompt(2, 130, pads)
    ids, valid = inputs["input_ids"], inputs["attention_mask"].bool()
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    ours, theirs = two_level(**FULL), DynamicCache()
    ends = [0, 90, 110, 117, *range(118, 131)]
    for lo, hi in pairwise(ends):
        mask = valid[:, None, None, :hi] & causal(hi - lo, hi)
        mask = mask | torch.eye(hi, dtype=torch.bool)[lo:hi]  # padding sees itself: no empty rows
        mask = mask[:batch_of_mask]
        if form == "additive":
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        rows = valid[:, lo:hi]
        both("llama", ids[:, lo:hi], ours, theirs, rows, attention_mask=mask, position_ids=positions[:, lo:hi])
    assert torch.equal(ours.sparse_layers[0].store.held.valid_columns("cpu"), valid)


def test_a_mask_that_hides_more_than_padding_is_used_as_it_is():
    """A block-diagonal prefill, say; what it hides from the last query is not cached as valid."""
    ids = prompt(1, 60)["input_ids"]
    mask = causal(60, 60).clone()
    mask[:, :, 30:, :30] = False
    ours, theirs = two_level(**FULL), DynamicCache()
    both("llama", ids, ours, theirs, attention_mask=mask)
    later = torch.ones(1, 1, 1, 61, dtype=torch.bool)
    later[..., :30] = False
    both("llama", ids[:, :1], ours, theirs, attention_mask=later)


def test_right_padding_then_decode():
    """Right padding leaves holes; the mask that goes on says so."""
    inputs = prompt(2, 60, (0, 13))
    ids, mask = inputs["input_ids"].flip(1), inputs["attention_mask"].flip(1)
    ours, theirs = two_level(**FULL), DynamicCache()
    both("llama", ids, ours, theirs, mask.bool(), attention_mask=mask)
    positions = mask.sum(1, keepdim=True)
    for token in prompt(2, 30, seed=1)["input_ids"].split(1, dim=1):
        mask = torch.cat((mask, torch.ones_like(token)), 1)
        both("llama", token, ours, theirs, attention_mask=mask, position_ids=positions)
        positions = positions + 1
