"""Masks by their rule: the same values as transformers' own, for any window, chunk, padding and piece of a prompt."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from hf_sparsekv.attention.compact_mask import CompactMask, Rule, rule_of
from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.masks import sparsekv_mask
from hf_sparsekv.types import AttentionParams

PACKED = torch.tensor([[0] * 9 + [1] * 3])


def sliding_layer(dice: random.Random, padding: str) -> dict:
    """What transformers asks for a piece of a prompt, over a layer that keeps a window or chunks."""
    batch, q, past, kept = 3, dice.randrange(2, 30), dice.choice((0, dice.randrange(40))), dice.randrange(1, 25)
    offset = max(0, past - kept + 1)
    mask = None
    if padding != "none":
        mask = torch.ones(batch, past + q, dtype=torch.bool)
        for row in mask:
            row[: dice.randrange(past + q)] = False
        if padding == "anywhere":
            mask &= torch.tensor([[dice.random() < 0.8 for _ in range(past + q)] for _ in range(batch)])
    left = torch.zeros(batch, dtype=torch.int64) if mask is None else (mask.cumsum(1) == 0).sum(1)
    chunks = chunked_causal_mask_function(kept, left)
    function = dice.choice((sliding_window_causal_mask_function(kept), chunks))
    sizes = {"batch_size": batch, "q_length": q, "kv_length": past + q - offset, "q_offset": past, "kv_offset": offset}
    return {**sizes, "mask_function": function, "attention_mask": mask, "local_size": kept, "device": "cpu"}


@pytest.mark.parametrize("function", ["plain", "window", "chunks"])
def test_one_mask_for_all_rows(function):
    """The definition broadcasts it, but kernels read the columns and the beginning of each row."""
    mask = torch.tensor([[False] * 3 + [True] * 7])
    functions = {
        "plain": causal_mask_function,
        "window": sliding_window_causal_mask_function(4),
        "chunks": chunked_causal_mask_function(4, torch.tensor([3])),
    }
    given = {"batch_size": 2, "q_length": 10, "kv_length": 10, "mask_function": functions[function], "device": "cpu"}
    found = sparsekv_mask(**given, attention_mask=mask, local_size=None if function == "plain" else 4)
    columns = found if function == "plain" else found.rule.columns
    assert columns.equal(mask.expand(2, -1)) and columns.is_contiguous()
    if function == "chunks":
        assert found.rule.origin.tolist() == [3, 3] and found.rule.origin.is_contiguous()


@pytest.mark.parametrize("padding", ["none", "left", "anywhere"])
@pytest.mark.parametrize("skip", [True, False])
def test_values(padding, skip):
    dice, forms = random.Random(padding), set()
    for _ in range(150):
        given = {**sliding_layer(dice, padding), "allow_is_causal_skip": skip}
        ours, theirs = sparsekv_mask(**given), sdpa_mask(**given)
        forms.add(type(ours))
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
            assert torch.equal(ours, theirs)
    assert forms - {type(None)} == {CompactMask}


def test_attention_under_a_mask_is_that_under_its_rule():
    dice = random.Random(0)
    for padding in ("none", "left", "anywhere") * 15:
        given = {**sliding_layer(dice, padding), "allow_is_causal_skip": False}
        q, n = given["q_length"], given["kv_length"]
        torch.manual_seed(q)
        query, key, value = torch.randn(3, 4, q, 8), torch.randn(3, 2, n, 8), torch.randn(3, 2, n, 6)
        params = AttentionParams(0.7, dice.choice((None, 1.5)), dice.choice((None, torch.randn(4))))
        theirs = sdpa_mask(**given)
        found = exact_attention(query, key, value, params, mask=sparsekv_mask(**given))
        expected = exact_attention(query, key, value, params, mask=theirs)
        some = theirs.any(-1).squeeze(1)[:, None].expand(-1, 4, -1)  # a query that is padding may see nothing
        torch.testing.assert_close(found[some], expected[some], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        or_masks(sliding_window_causal_mask_function(4), lambda b, h, q, k: k == 0),
        and_masks(sliding_window_causal_mask_function(4), packed_sequence_mask_function(PACKED)),
        sliding_window_bidirectional_mask_function(4),
        sliding_window_overlay(4),
        lambda b, h, q, k: k <= q,
        causal_mask_function.__get__(object()),
    ],
    ids=["or", "packed", "both sides", "window alone", "other", "bound"],
)
def test_other_masks_are_made(function):
    assert rule_of(function, 0, None) is None


def test_two_windows_are_the_shorter():
    function = and_masks(sliding_window_causal_mask_function(7), sliding_window_overlay(4))
    rule = rule_of(function, 0, None)
    assert rule == Rule(window=4) and rule.within(3, 100) == Rule(window=3)
    assert rule.within(9, 4).is_causal and not rule.within(9, 5).is_causal


@pytest.mark.parametrize(("q", "offset", "columns"), [(1, 30, 31), (5, 30, 40), (5, torch.tensor(30), 35)])
def test_steps_and_static_caches_get_whole_masks(q, offset, columns):
    """They are small, or compiled."""
    given = {"batch_size": 1, "q_length": q, "kv_length": columns, "q_offset": offset, "device": "cpu"}
    mask = sparsekv_mask(**given, mask_function=sliding_window_causal_mask_function(8), local_size=8)
    assert type(mask) is torch.Tensor and mask.shape == (1, 1, q, columns)


def test_what_others_do_with_one():
    given = {"batch_size": 2, "q_length": 6, "kv_length": 9, "q_offset": 3, "device": "cpu"}
    mask = sparsekv_mask(**given, mask_function=sliding_window_causal_mask_function(4), local_size=4)
    real = mask.materialise()
    assert type(real) is torch.Tensor and repr(mask).startswith("CompactMask(")
    assert torch.equal(mask[:, :, 2:, :5], real[:, :, 2:, :5]) and torch.equal(~mask, ~real)
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(real, 0.0, -1.0))
    assert type(mask.to("cpu")) is CompactMask and type(mask.detach()) is CompactMask
    assert type(mask.float()) is torch.Tensor and torch.equal(mask.float(), real.float())
    q, k = torch.randn(2, 1, 6, 8), torch.randn(2, 1, 9, 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(attend(q, k, k, attn_mask=mask), attend(q, k, k, attn_mask=real))


def test_on_another_device():
    """The mask itself is nowhere; its columns move with it."""
    columns = torch.ones(2, 9, dtype=torch.bool)
    mask = CompactMask(Rule(columns, 4, origin=torch.zeros(2, dtype=torch.int32)), 2, 6, 9, "cpu").to("meta")
    assert mask.device.type == mask.rule.columns.device.type == mask.rule.origin.device.type == "meta"


def test_pieces(monkeypatch):
    """However many queries at a time."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 57, 8), torch.randn(2, 2, 57, 8)
    columns = torch.rand(2, 57) < 0.8
    columns[:, 0] = True
    for window, cap, size in product((None, 9), (None, 2.0), (1, 3000, 1 << 28)):
        params = AttentionParams(0.5, cap, sliding_window=window)
        monkeypatch.setattr("hf_sparsekv.attention.exact.PIECE_BYTES", size)
        monkeypatch.setattr("hf_sparsekv.attention.exact.LEAST_AT_ONCE", 5)
        found = exact_attention(query, key, value, params, columns=columns)
        seen = Rule(columns, window).mask(17, 57, 0, query.device)
        expected = exact_attention(query, key, value, AttentionParams(0.5, cap), mask=seen)
        some = seen.any(-1).squeeze(1)[:, None].expand(-1, 4, -1)
        torch.testing.assert_close(found[some], expected[some], atol=1e-5, rtol=1e-5)
