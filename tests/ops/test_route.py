"""The kernels of the router against their definition, and that against transformers' own."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from hf_sparsekv.ops.route import MAX_TOKENS
from hf_sparsekv.ops.route import route as public
from hf_sparsekv.ops.route.reference import route as reference
from hf_sparsekv.ops.route.triton import route

# tokens, D, experts, of a token, groups, of a token
SHAPES = [(1, 256, 64, 4, 1, 1), (3, 100, 48, 6, 8, 4), (2, 64, 32, 8, 8, 3), (4, 33, 7, 7, 1, 1), (2, 16, 4, 2, 4, 3)]


def made(place, shape):
    tokens, d, count, *_ = shape
    return place.randn(tokens, d), place.randn(count, d) / d**0.5, (place.rand(count) - 0.5).float()


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_reference(place32, shape, normalise):
    k, groups, top_groups = shape[3:]
    args = made(place32, shape)
    named = {"groups": groups, "top_groups": top_groups, "normalise": normalise, "scale": 1.8}
    want = reference(*(t.cpu() for t in args), k, **named)
    for run in (route, public):
        logits, weights, index = run(*args, k, **named)
        place32.close(logits, want[0])
        place32.close(weights, want[1])
        assert torch.equal(index.cpu(), want[2])


def test_half_precision(place):
    """Products of rounded inputs are the same, in float32."""
    args = made(place, SHAPES[0])
    logits, weights, index = route(*args, 4, groups=1, top_groups=1, normalise=True, scale=2.5)
    want = reference(*(t.cpu() for t in args), 4, groups=1, top_groups=1, normalise=True, scale=2.5)
    torch.testing.assert_close(logits.cpu(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.cpu(), want[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(index.cpu(), want[2])


def test_equal_scores_go_to_the_lower_expert(place32):
    x, weight = torch.ones(1, 16, device=place32.device), torch.ones(8, 16, device=place32.device)
    bias = torch.zeros(8, device=place32.device)
    for run in (route, reference):
        index = run(x, weight, bias, 3, groups=4, top_groups=2, normalise=True, scale=1.0)[2]
        assert index.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
def test_reference_is_transformers_own(groups, top_groups):
    config = tf.DeepseekV3Config(
        hidden_size=32, n_routed_experts=16, num_experts_per_tok=3, n_group=groups, topk_group=top_groups
    )
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    torch.manual_seed(0)
    router = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        router.weight.normal_()
        router.e_score_correction_bias.normal_(std=0.1)
        x = torch.randn(9, 32)
        logits, weights, index = router(x)
        found = reference(
            x, router.weight, router.e_score_correction_bias, 3, groups=groups, top_groups=top_groups,
            normalise=config.norm_topk_prob, scale=config.routed_scaling_factor,
        )  # fmt: skip
    order = index.sort(-1)
    mine = found[2].sort(-1)
    assert torch.equal(order.values, mine.values)
    torch.testing.assert_close(found[0], logits)
    torch.testing.assert_close(found[1].gather(1, mine.indices), weights.gather(1, order.indices))


def test_refuses_many_tokens(place32):
    args = made(place32, (MAX_TOKENS + 1, 16, 8))
    with pytest.raises(ValueError, match="at most"):
        route(*args, 2, groups=1, top_groups=1, normalise=True, scale=1.0)
