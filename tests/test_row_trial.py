"""check_rows(): models whose rows would change each other are found out; others are not, in low precision either."""

from __future__ import annotations

import types

import model_list
import pytest
import torch
import transformers as tf
from captured import imitated
from models import COMMON, build, prompt
from rotary_models import phi3, phimoe, rotary_llama, wide

from hf_sparsekv import SparseCache, TokenConfig, check_rows, fixed_rotary, row_trial

LENGTH = 400


def changed(forward):
    """A model with another forward, which gets the arguments of its own."""
    net = build("llama", "sparsekv")
    plain = net.forward
    net.forward = types.MethodType(lambda self, **given: forward(plain, **given), net)
    return net


def ignores_positions(plain, position_ids, **given):
    return plain(**given)


def counts_steps_from_two(plain, input_ids, position_ids, **given):
    """As RoBERTa, where positions are given in some passes only."""
    offset = 2 * (input_ids.shape[1] == 1)
    return plain(input_ids=input_ids, position_ids=position_ids + offset, **given)


def counts_from_the_last(plain, position_ids, **given):
    """The longest row's position counts for all."""
    return plain(position_ids=position_ids + position_ids.max() // 8, **given)


def counts_passes():
    passes = iter(range(0, 10**6, 3))

    def forward(plain, position_ids, **given):
        return plain(position_ids=position_ids * (1 + next(passes)), **given)

    return forward


def counts_backwards(plain, position_ids, **given):
    return plain(position_ids=position_ids.amax(-1, keepdim=True) - position_ids, **given)


def bert_generation():
    config = tf.BertGenerationConfig(**{**COMMON, "is_decoder": False, "attn_implementation": "sparsekv"})
    return wide(tf.BertGenerationDecoder(config))


BROKEN = {
    "ignores positions": (lambda: changed(ignores_positions), "decodes beside one of another length"),
    "offset steps": (lambda: changed(counts_steps_from_two), "decodes beside one of another length"),
    "of the longest row": (lambda: changed(counts_from_the_last), "positions of other rows"),
    "of the pass before": (lambda: changed(counts_passes()), "positions of other rows|earlier forward passes"),
    "from the end": (lambda: changed(counts_backwards), "in chunks"),
    "sees later tokens": (bert_generation, "in chunks"),
    "longrope": (lambda: rotary_llama("longrope"), "positions of other rows"),
    "dynamic": (lambda: rotary_llama("dynamic", max_position_embeddings=64), "positions of other rows"),
    "phimoe": (phimoe, "positions of other rows"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_hold_is_found(name, monkeypatch):
    """By the trial alone: what is known of rotary kinds is not asked."""
    make, says = BROKEN[name]
    net = make()
    net.set_attn_implementation("sparsekv")
    monkeypatch.setattr(row_trial, "unfixed", lambda *_: None)
    with pytest.raises(ValueError, match=rf"tried on made-up input, .*({says}).*use generate\(\)"):
        check_rows(net, LENGTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mixtral", "granitemoe", "deepseek_v3", "smollm3"])
def test_rounding_and_other_experts_are_no_reason(kind, dtype):
    """Mixtures of experts, latents, layers without positions; random weights, in which roundings grow."""
    net = model_list.build(kind).to(dtype)
    net.set_attn_implementation("sparsekv")
    check_rows(net, LENGTH)


@pytest.mark.parametrize("length", [1, 2, 5, 30, 1024])
def test_lengths(length):
    check_rows(build("llama", "sparsekv"), length)


@pytest.mark.parametrize("make", [lambda: rotary_llama("longrope"), phi3, phimoe])
def test_rotary_factors_that_are_known(make):
    """Refused, with what to do, and served inside it; so by rows themselves."""
    net = make()
    net.set_attn_implementation("sparsekv")
    rows = SparseCache(TokenConfig()).rows(2, LENGTH)
    for refused in (lambda: check_rows(net, LENGTH), lambda: rows.prefill(net, prompt(1, 20)["input_ids"])):
        with pytest.raises(ValueError, match=r"rope_type='longrope'.*`with hf_sparsekv.fixed_rotary\(model, 400\):`"):
            refused()
    check_rows(net, 64)
    with fixed_rotary(net, LENGTH):
        check_rows(net, LENGTH)
        assert rows.join(rows.prefill(net, prompt(1, 20)["input_ids"])) == 0


def test_rows_of_a_model_that_counts_positions():
    net = model_list.build("bart")
    net.set_attn_implementation("sparsekv")
    rows = SparseCache(TokenConfig()).rows(2, LENGTH)
    for refused in (lambda: check_rows(net, LENGTH), lambda: rows.prefill(net, prompt(1, 20)["input_ids"])):
        with pytest.raises(ValueError, match="takes no position_ids"):
            refused()


def test_it_leaves_no_trace():
    """Neither in the model, nor in random numbers, nor in captured steps."""
    net, runner = imitated()
    before, random = dict(net.__dict__), torch.get_rng_state()
    check_rows(net, LENGTH)
    assert torch.equal(torch.get_rng_state(), random)
    assert net.__dict__ == before and not net.training
    assert (runner.captures, runner.replays, len(runner.graphs)) == (0, 0, 0)
