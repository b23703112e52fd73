"""Calls of the operators of attention: shapes that their kernels have to get right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from operator_calls import Operator, column

from hf_sparsekv.ops.attention.prompt_attention.config import Config


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


@dataclass(frozen=True)
class Prompt:
    """``rows`` queries after ``past`` columns; ``hidden`` columns are no tokens, of each row."""

    rows: int
    past: int = 0
    batch: int = 1
    heads: int = 1
    group: int = 2
    dk: int = 32
    dv: int = 32
    hidden: tuple[tuple[slice, ...], ...] | None = None
    window: int | None = None
    chunk: int | None = None
    origin: tuple[int, ...] | None = None
    softcap: float | None = None
    sinks: bool = False


def prompt_attention(place, case):
    n, q_heads = case.past + case.rows, case.heads * case.group

    def made(tokens, heads, dim):  # transposed, as projections give them
        return place.randn(case.batch, tokens, heads, dim).transpose(1, 2)

    tensors = made(case.rows, q_heads, case.dk), made(n, case.heads, case.dk), made(n, case.heads, case.dv)
    columns = None
    if case.hidden is not None:
        columns = torch.ones(case.batch, n, dtype=torch.bool)
        for row, hidden in zip(columns, case.hidden):
            for part in hidden:
                row[part] = False
        columns = columns.to(place.device)
    origin = None if case.origin is None else column(place, *case.origin)
    sinks = 2 * place.randn(q_heads) if case.sinks else None
    return *tensors, 2 * case.dk**-0.5, columns, case.window, case.chunk, origin, case.softcap, sinks


LEFT = ((slice(0, 0),), (slice(0, 70),), (slice(0, 163),))  # the last row's last token alone
HOLES = ((slice(0, 30), slice(60, 75)), (slice(100, 140),), (slice(None),))
PROMPTS = {
    "one query": Prompt(1, past=40),
    "a square": Prompt(150, heads=2, group=1),
    "after a past": Prompt(70, past=133, batch=2, group=3),
    "padding in front": Prompt(164, batch=3, hidden=LEFT),
    "padding in front, a later piece": Prompt(61, past=103, batch=3, hidden=LEFT),
    "padding anywhere": Prompt(164, batch=3, hidden=HOLES),
    "padding anywhere, sinks, a cap": Prompt(90, past=74, batch=3, hidden=HOLES, sinks=True, softcap=1.5),
    "a window": Prompt(200, window=20),
    "a window of one": Prompt(40, past=3, window=1),
    "a window of a tile": Prompt(150, past=90, window=64),
    "a window as long as the prompt": Prompt(90, window=90),
    "a longer window": Prompt(90, past=20, window=200),
    "a window, padding": Prompt(164, batch=3, hidden=LEFT, window=33),
    "a window, padding anywhere": Prompt(164, batch=3, hidden=HOLES, window=50),
    "a window and sinks": Prompt(140, past=31, window=40, sinks=True, group=8),
    "chunks": Prompt(170, chunk=48),
    "chunks of a tile": Prompt(150, past=42, chunk=64),
    "chunks that began before": Prompt(100, past=47, batch=2, chunk=48, origin=(-30, 0)),
    "chunks after padding": Prompt(164, batch=3, hidden=LEFT, chunk=40, origin=(0, 70, 163)),
    "a cap": Prompt(100, past=60, softcap=0.7),
    "a cap and a window": Prompt(130, softcap=50.0, window=70),
    "sinks": Prompt(100, heads=2, sinks=True),
    "keys of 192": Prompt(80, dk=192, dv=128, group=1, heads=2),
    "heads of 48, values of 40": Prompt(70, past=64, dk=48, dv=40, window=30),
    "heads of 256": Prompt(90, dk=256, dv=256, window=64),
    "heads of 512": Prompt(70, past=20, dk=512, dv=512),
}


def _prompt_ways(given):
    """In float32 a thread of a GPU does not hold a large tile of wide heads."""
    small = [Config(16, 16, warps=4, stages=1), Config(32, 16, True, 4, 1)]
    wide = given["query"].dtype == torch.float32 and given["query"].is_cuda and given["query"].shape[3] > 64
    return small[:1] if wide else [None, *small]


OPERATORS = [
    Operator(
        "prompt_attention",
        prompt_attention,
        {name: (case,) for name, case in PROMPTS.items()},
        small=(Prompt(50, past=20, hidden=((slice(0, 9),),), window=30, heads=2, batch=2),),
        hows=_prompt_ways,
        views={"query": "inside", "key": "inside", "value": "inside", "columns": "inside"},
        far={"query": 2, "key": 2, "value": 2},
    ),
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
