"""Audits on a real GPU: captured steps, bf16, offloaded blocks."""

from __future__ import annotations

import pytest
import torch
from caches import CACHES, TIGHT
from models import PAD, build, prompt

from hf_sparsekv import AuditConfig, optimize, sparse

pytestmark = pytest.mark.gpu

METHODS = [name for name, make in CACHES.items() if "second" not in make(**TIGHT).shared.places]


def texts(net, method: str, inputs: dict, audits, **go):
    """The text of each audit, its cache, and the generator's state."""
    for audit in audits:
        kv = CACHES[method](model_config=net.config, **{**TIGHT, "dense_below": 0})
        torch.manual_seed(3)
        with sparse(net, audit=audit):
            out = net.generate(**inputs, max_new_tokens=60, pad_token_id=PAD, past_key_values=kv, **go)
        yield out, kv, torch.cuda.get_rng_state()


def check_truth(name: str, text, mask, kv, dtype, atol: float) -> None:
    """Probabilities are those of full attention over the whole text."""
    whole = torch.cat((mask, torch.ones(len(text), text.shape[1] - mask.shape[1]).to(mask)), dim=1)
    with torch.no_grad():
        plain = build(name, "sdpa").to("cuda", dtype)
        full = plain(text, attention_mask=whole, position_ids=(whole.cumsum(1) - 1).clamp_min(0)).logits
    full = full.float().softmax(-1)
    for one in kv.stats().audit.tokens:
        assert text[one.row, one.column] == one.token
        assert abs(full[one.row, one.column - 1, one.token].item() - one.probability) < atol, one


@pytest.mark.parametrize("rows, pads", [(1, (0,)), (3, (0, 5, 61))])
@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4-moe-lite"])
@pytest.mark.parametrize("method", METHODS)
def test_an_audit_changes_no_token(method, name, rows, pads):
    """Captured steps, drawn tokens, rows that end: the same text, and the generator is left the same."""
    net = build(name, "sparsekv").cuda()
    optimize(net)
    inputs = {key: value.cuda() for key, value in prompt(rows, 165, pads).items()}
    go = {"do_sample": True, "eos_token_id": [5, 17]}
    (plain, _, left), (ours, kv, state) = texts(net, method, inputs, (False, AuditConfig(interval=16)), **go)
    assert torch.equal(plain, ours)
    assert torch.equal(left, state)
    check_truth(name, ours, inputs["attention_mask"], kv, torch.float32, 2e-3)


@pytest.mark.parametrize("limit", [0.05, "top"])
@pytest.mark.parametrize("method", ["device-default", "host-default", "progressive-device"])
def test_no_token_is_beyond_the_limit(method, limit):
    net = build("llama", "sparsekv").cuda()
    inputs = {key: value.cuda() for key, value in prompt(2, 165, (0, 61)).items()}
    ((text, kv, _),) = texts(net, method, inputs, [AuditConfig(interval=16, max_loss=limit)], do_sample=True)
    found = kv.stats().audit
    assert len(found.tokens) + found.by_full == 120
    assert all(one.same_top if limit == "top" else one.variation <= limit for one in found.tokens)
    check_truth("llama", text, inputs["attention_mask"], kv, torch.float32, 2e-3)


def test_no_loss_is_the_text_of_full_attention():
    inputs = {key: value.cuda() for key, value in prompt(2, 165, (0, 61)).items()}
    expected = build("llama", "sdpa").cuda().generate(**inputs, do_sample=False, max_new_tokens=60, pad_token_id=PAD)
    net = build("llama", "sparsekv").cuda()
    audits = [AuditConfig(interval=20, max_loss=0.0)]
    ((text, *_),) = texts(net, "device-default", inputs, audits, do_sample=False)
    assert torch.equal(text, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_in_bf16_within_what_two_ways_of_full_attention_differ(name):
    net = build(name, "sparsekv").to("cuda", torch.bfloat16)
    inputs = {key: value.cuda() for key, value in prompt(2, 165, (0, 61)).items()}
    ((text, kv, _),) = texts(net, "device-default", inputs, [AuditConfig(interval=16)], do_sample=True)
    check_truth(name, text, inputs["attention_mask"], kv, torch.bfloat16, 2e-2)
