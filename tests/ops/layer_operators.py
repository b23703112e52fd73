"""Calls of the operators of layers: shapes that their kernels have to get right."""

from __future__ import annotations

import torch
from operator_calls import Operator, shuffled

from hf_sparsekv.ops.layers.experts import Gate
from hf_sparsekv.ops.layers.quantised_linear.reference import FP8, QuantisedWeight


def add_norm(place, shape, has_residual=True, has_post=False, how="llama"):
    n, residual = shape[-1], place.randn(*shape) if has_residual else None
    post = place.randn(n) if has_post else None
    return 3 * place.randn(*shape), residual, place.randn(n), 1e-6, how == "gemma", post, 1e-5, how == "gpt-oss"


def gated(place, shape, activation="silu"):
    return 3 * place.randn(*shape), place.randn(*shape), activation


def experts(place, tokens, count, k, d, inner, activation="silu"):
    index = shuffled(place, tokens, count, k) if tokens else place.randperm(0).view(0, k)
    gate_up, down = place.randn(count, 2 * inner, d) / d**0.5, place.randn(count, d, inner) / inner**0.5
    return 2 * place.randn(tokens, d), index.long(), place.rand(tokens, k), gate_up, down, Gate(activation)


def gated_delta_step(place, batch, key_heads, r, dk, dv, kernel, some=False):
    heads, channels = key_heads * r, 2 * key_heads * dk + key_heads * r * dv
    projected = [place.randn(batch, key_heads, n) for n in (dk, dk, r * dv, r * dv, r, r)]
    states = place.randn(batch, channels, kernel), place.randn(channels, kernel) / kernel**0.5
    states += (place.randn(batch, heads, dk, dv).float(),)
    weights = place.rand(heads), place.randn(heads), 1 + 0.1 * place.randn(dv)
    valid = place.randint(0, 2, batch).bool() if some else None
    return *projected, *states, *weights, 1e-6, 2.0 if r == 1 else 1.0, valid


def mamba2_step(place, batch, heads, groups, p, n, kernel, norm_groups=1, some=False, bias=False):
    channels = heads * p + 2 * groups * n
    projected = [place.randn(batch, size) for size in (channels, heads * p, heads)]
    conv = place.randn(batch, channels, kernel), place.randn(channels, kernel) / kernel**0.5
    conv += (place.randn(channels) if bias else None,)
    weights = place.rand(heads), place.randn(heads), place.randn(heads), 1 + 0.1 * place.randn(heads * p)
    valid = place.randint(0, 2, batch).bool() if some else None
    return *projected, *conv, place.randn(batch, heads, p, n).float(), *weights, 1e-6, norm_groups, valid


def quantised_linear(place, shape, n, scales, has_bias=False, kind="int8"):
    """``scales``: blocks of rows, and of inputs."""
    k = shape[-1]
    codes = place.randint(-127, 128, n, k).to(torch.int8) if kind == "int8" else (60 * place.randn(n, k)).to(FP8)
    weight = QuantisedWeight(codes, (0.5 + place.rand(*scales)) / (64 * k**0.5))
    # Tensor cores would round float32.
    x = place.randn(1, shape[-1]) if place.dtype == torch.float32 else place.randn(*shape)
    return x, weight, place.randn(n) if has_bias else None


def route(place, tokens, d, count, k, groups, top_groups, normalise):
    x, weight, bias = place.randn(tokens, d), place.randn(count, d) / d**0.5, place.rand(count) - 0.5
    return x, weight, bias, k, groups, top_groups, normalise, 1.8


def shares(place, tokens, d, count, k, normalise, scores):
    """Routers by softmax. In 16 bits a rounded logit may be another expert's, so these are far apart."""
    x, weight = place.randn(tokens, d), place.randn(count, d) / d**0.5
    bias = 4 * place.randperm(count).to(place.dtype) if scores == "softmax_chosen" else None
    return x, weight, bias, k, 1, 1, normalise, 1.0, scores


OPERATORS = [
    Operator(
        "add_norm",
        add_norm,
        {
            "norm alone": ((3, 1, 64), False),
            "norm alone, offset": ((2, 3, 96), False, False, "gemma"),
            "sum": ((2, 1, 4096),),
            "sum, odd width": ((2, 3, 100),),
            "norm, sum, norm": ((2, 2, 160), True, True, "gemma"),
            "sum, rounded once": ((2, 1, 88), True, False, "gpt-oss"),
            "norm, sum, norm without offset": ((5, 72), True, True),
            "a wide row": ((1, 1, 12288),),
            "no row": ((0, 1, 64),),
        },
        small=((2, 3, 64),),
        views={"x": "rows"},
    ),
    Operator(
        "gated",
        gated,
        {"long": ((2, 1, 3000),), "odd": ((7, 33),), "none": ((0, 1, 64),)},
        options=(("silu", "gelu_tanh"),),
        small=((2, 3, 300), "silu"),
        views={"gate": "rows", "up": "rows"},
    ),
    Operator(
        "experts",
        experts,
        # tokens, experts, of a token, D, I
        {
            "one token": (1, 8, 4, 256, 96),
            "three": (3, 5, 2, 100, 33),
            "six": (6, 4, 1, 64, 128),
            "six of eight": (2, 8, 6, 65, 600),
            "eight": (1, 9, 8, 40, 520),
            "odd": (2, 3, 3, 33, 7),
            "none": (0, 4, 2, 64, 64),
        },
        options=(("silu", "gelu_tanh"),),
        small=(2, 4, 3, 32, 24, "silu"),
        views={"x": "rows", "index": "turned", "weights": "turned"},
        far={"gate_up": 0, "down": 0},
    ),
    Operator(
        "gated_delta_step",
        gated_delta_step,
        # rows, key heads, value heads of each, Dk, Dv, inputs of the convolution; some rows have no token
        {
            "one row": (1, 2, 2, 16, 16, 4),
            "three rows, some without a token": (3, 2, 1, 32, 16, 4, True),
            "nothing even": (2, 3, 3, 12, 20, 3),
            "a short convolution": (2, 1, 2, 16, 8, 2),
            "wide heads": (1, 1, 1, 128, 128, 4),
            "none": (0, 2, 2, 16, 16, 4),
        },
        small=(2, 2, 2, 16, 16, 4),
        writes=("conv_state", "state"),
        views=dict.fromkeys("qkvzab", "rows"),
        far={"state": 0},
    ),
    Operator(
        "mamba2_step",
        mamba2_step,
        # rows, heads, groups of them, P, N, inputs of the convolution, groups of the norm; some without a token; bias
        {
            "one row": (1, 4, 1, 16, 16, 4),
            "three rows, some without a token": (3, 4, 2, 32, 16, 4, 2, True, True),
            "nothing even": (2, 6, 3, 12, 20, 3, 3),
            "wide heads": (1, 2, 1, 64, 128, 4, 1, False, True),
            "none": (0, 2, 2, 16, 16, 4),
        },
        small=(2, 4, 2, 16, 16, 4),
        writes=("conv_state", "state"),
        views={"mixed": "rows", "gate": "rows", "dt": "rows"},
        far={"state": 0},
    ),
    Operator(
        "quantised_linear",
        quantised_linear,
        # shape of x, rows of the weight, scales, bias; more rows: test_lookup_linear.py
        {
            "one row": ((1, 1, 4096), 64, (64, 1)),
            "one row, one scale, bias, nothing even": ((1, 700), 45, (1, 1), True),
            "one row, blocks": ((1, 1, 4352), 96, (3, 34)),
            "one row, blocks, bias, nothing even": ((1, 286), 100, (4, 3), True),
            "one row of the weight": ((1, 24), 1, (1, 1)),
            "no row": ((0, 1, 64), 32, (32, 1)),
        },
        options=(("int8", "fp8"),),
        small=((2, 96), 64, (64, 1), True, "int8"),
        views={"x": "rows"},
    ),
    Operator(
        "route",
        route,
        # tokens, D, experts, of a token, groups, of a token
        {
            "one token": (1, 256, 64, 4, 1, 1),
            "groups": (3, 100, 48, 6, 8, 4),
            "as many as there are": (2, 64, 32, 8, 8, 3),
            "all experts": (4, 33, 7, 7, 1, 1),
            "small groups": (2, 16, 4, 2, 4, 3),
        },
        options=((True, False),),  # normalised
        ratio=lambda place, *_: 2e-6,  # products of rounded inputs are the same, in float32
    ),
    Operator(
        "route.route.shares",
        shares,
        # tokens, D, experts, of a token, normalised, scores
        {
            "Qwen3": (1, 256, 16, 4, True, "softmax"),
            "softmax": (3, 100, 7, 7, False, "softmax"),
            "gpt-oss": (2, 96, 32, 4, False, "softmax_chosen"),
            "one": (2, 33, 5, 1, False, "softmax_chosen"),
        },
    ),
]
