"""Calls of the operators of attention: shapes that their kernels have to get right."""

from __future__ import annotations

from operator_calls import Operator


def angles(place, batch, tokens, width):
    angle = (6.3 * place.rand(batch, tokens, width // 2)).repeat(1, 1, 2)
    return angle.cos().to(place.dtype), angle.sin().to(place.dtype)


def qk_rope(place, batch, tokens, heads, k_heads, dim, width, cos_batch, has_norm, offset):
    cos, sin = angles(place, cos_batch, tokens, width)
    q, k = place.randn(batch, tokens, heads, dim), place.randn(batch, tokens, k_heads, dim)
    weights = (place.randn(dim), place.randn(dim)) if has_norm else (None, None)
    return q, k, cos, sin, *weights, 1e-6, 1e-5, offset


def latent_rope(place, batch, tokens, heads, nope, rope, rank, interleaved):
    cos, sin = angles(place, batch, tokens, rope)
    q, compressed = place.randn(batch, tokens, heads, nope + rope), place.randn(batch, tokens, rank + rope)
    return q, compressed, cos, sin, 1 + 0.2 * place.randn(rank), 1e-6, interleaved


OPERATORS = [
    Operator(
        "qk_rope",
        qk_rope,
        # batch, tokens, query heads, key heads, head dim, rotary width, batch of cos, norm, Gemma's offset
        {
            "rope": (2, 3, 8, 2, 64, 64, 2, False, False),
            "norm": (1, 1, 8, 2, 128, 128, 1, True, False),
            "norm with offset, one position for all rows": (3, 2, 4, 1, 64, 64, 1, True, True),
            "part of the dimensions": (2, 3, 3, 3, 96, 48, 2, False, False),
            "part of the dimensions, norm": (1, 2, 5, 5, 80, 32, 1, True, False),
            "head dim 256": (1, 1, 2, 1, 256, 256, 1, True, True),
            "no token": (1, 0, 2, 1, 64, 64, 1, False, False),
        },
        small=(1, 2, 6, 5, 64, 64, 1, True, False),
        views={"q": "inside", "k": "inside"},
        far={"q": 2, "k": 2},
    ),
    Operator(
        "latent_rope",
        latent_rope,
        # batch, tokens, heads, dn, dr, r
        {"GLM": (1, 1, 20, 192, 64, 512), "odd": (3, 2, 5, 33, 6, 40), "none": (0, 1, 4, 12, 8, 16)},
        options=((True, False),),  # interleaved
        small=(1, 2, 6, 32, 16, 64, False),
        views={"compressed": "rows"},
        far={"q": 2},
    ),
]
