"""The caches on the small real model: the same text with a budget for everything, and the fact found without."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig
from hf_sparsekv_eval.prefix import attention, forced_steps, greedy_rows, prefill
from hf_sparsekv_eval.text import needle_prompt, python_reference

pytestmark = pytest.mark.small_model


@pytest.fixture(scope="module")
def small(small_model_dir):
    model = AutoModelForCausalLM.from_pretrained(small_model_dir, attn_implementation="sparsekv").eval()
    return model, AutoTokenizer.from_pretrained(small_model_dir)


def everything(offload: bool = True) -> OffloadedSparseCache:
    config = TokenConfig(token_budget=8192)
    return OffloadedSparseCache(config, offload=OffloadConfig() if offload else None)


def test_greedy_text_equals_dense(small):
    model, tokenizer = small
    inputs = tokenizer(python_reference()[40_000:41_800], return_tensors="pt")
    go = {"do_sample": False, "max_new_tokens": 14, "pad_token_id": 0}
    with attention(model, "sdpa"):
        expected = model.generate(**inputs, **go)
    for offload in (True, False):
        cache = everything(offload)
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **go), expected)
        assert cache.stats().attended_share == 1


def test_padded_batch_equals_dense(small):
    model, tokenizer = small
    text = python_reference()
    parts = [text[100:1500], text[9000:9400], text[70_000:70_800]]
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(parts, return_tensors="pt", padding=True)
    go = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}
    with attention(model, "sdpa"):
        expected = model.generate(**inputs, **go)
    assert torch.equal(model.generate(**inputs, past_key_values=everything(), **go), expected)


def forced_logits(model, cache, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[n, vocab]`` of feeding ``ids [1, n]`` one at a time, float32."""
    return torch.cat(list(forced_steps(model, cache, ids)))


def test_bf16_is_as_close_to_float32_as_sdpa(small):
    """Teacher-forced: RMS error of the logits below 1.3 times sdpa's own in bf16; top-1 agreement with it >= 0.9."""
    model, tokenizer = small
    ids = tokenizer(python_reference()[:4500], return_tensors="pt")["input_ids"][:, :440]
    start, rest = ids[:, :400], ids[:, 400:]
    exact = forced_logits(model, prefill(model, start).full(), rest)
    try:
        model.bfloat16()
        prefix = prefill(model, start)
        stock = forced_logits(model, prefix.full(), rest)
        ours = forced_logits(model, prefix.fill(everything(), model), rest)
    finally:
        model.float()  # the shared weights have lost bits: later tests load their own
    error, own = ((x - exact).norm() / exact.norm() for x in (ours, stock))
    agree = (ours.argmax(-1) == stock.argmax(-1)).float().mean()
    print(f"bf16: RMS error {error:.4f}, sdpa's own {own:.4f}, top-1 agreement {agree:.3f}")
    assert error < 1.3 * own
    assert agree >= 0.9


@pytest.mark.parametrize("depth", [0.1, 0.6])
def test_needle_is_found_without_reading_everything(small_model_dir, depth):
    model = AutoModelForCausalLM.from_pretrained(small_model_dir, attn_implementation="sparsekv").eval()
    tokenizer = AutoTokenizer.from_pretrained(small_model_dir)
    prompt = needle_prompt(tokenizer, 1400, depth)
    prefix = prefill(model, prompt.ids)
    cache = OffloadedSparseCache(TokenConfig(token_budget=160, num_blocks=12))
    filled, end = prefix.fill(cache, model), {model.config.eos_token_id}
    (answer,) = greedy_rows(model, prefix, filled, prefix.logits, 12, end)
    assert prompt.answer in tokenizer.decode(answer)
    assert cache.stats().attended_share < 0.3
