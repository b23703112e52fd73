"""Codes of keys with a large bias: attention over them is as near as without one.

A bias is the same for all tokens, so that softmax ignores it, or rotary embedding turns it from token to token. With
one scale per token over all channels it takes the steps of all others.
"""

from __future__ import annotations

import math

import pytest
import torch
from caches import INT8
from one_layer import last_step

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, TokenConfig
from hf_sparsekv.ops.storage.quantise.reference import dequantise, quantise

BLOCK = 64
BIASES = (5, 20, 100, 400)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def made_up(dim: int, heads: int = 2, group: int = 4, n: int = 2048) -> tuple[torch.Tensor, ...]:
    """Queries ``[H, group, D]``, keys and values ``[H, n, D]`` whose channels differ in size; and the smallest two."""
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    size = (1.0 / torch.arange(1, dim + 1))[torch.randperm(dim, generator=generator)]
    size *= dim**0.5 / size.norm()
    return randn(heads, group, dim) * size, randn(heads, n, dim) * size, randn(heads, n, dim), size.argsort()[:2]


def attention(q, k, v) -> torch.Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).mean().item()


def error(q, k, v, dtype) -> float:
    """Attention over codes of keys and values, which are in ``dtype``."""
    kv, dim = torch.cat((k, v), -1).to(dtype), k.shape[-1]
    found = dequantise(*quantise(kv.unflatten(1, (-1, BLOCK)), dim), dim, dtype).flatten(1, 2)
    return distance(*(attention(q, *x.split(dim, -1)) for x in (found, kv)))


@pytest.mark.few
@DTYPES
@pytest.mark.parametrize("dim", [64, 128])
def test_constants_take_no_steps(dim, dtype):
    q, k, v, smallest = made_up(dim)
    without = error(q, k, v, dtype)
    assert without < 0.015
    for bias in BIASES:
        for channels, times in ((smallest, 1.1), (torch.arange(2), 1.1), (torch.arange(dim), 2.5)):
            biased = k.clone()
            biased[..., channels] += bias * (-1) ** torch.arange(len(channels))
            # Centres have 11 bits: where all channels have such a bias, the smallest are a little coarser.
            assert error(q, biased, v, dtype) < times * without


@DTYPES
@pytest.mark.parametrize("period, times", [(1e6, 1.1), (1e4, 1.2), (300, 1.6), (30, 3)])
def test_a_bias_that_rotary_embedding_turns(period, times, dtype):
    """In slow pairs it costs nothing; in fast ones, whose keys are large, no other channel pays."""
    q, k, v, (one, other) = made_up(64)
    without, angle = error(q, k, v, dtype), torch.arange(k.shape[1]) * (2 * math.pi / period)
    k[..., one] += 400 * angle.cos()
    k[..., other] += 400 * angle.sin()
    assert error(q, k, v, dtype) < times * without


def test_an_outlier_makes_its_block_coarser_and_no_other():
    q, k, v, (one, _) = made_up(64)
    without = error(q, k, v, torch.float32)
    k[:, 100, one] = 400
    assert error(q, k, v, torch.float32) < 1.1 * without


def step_of(offload: OffloadConfig, q, k, v, dtype, prompt: int) -> torch.Tensor:
    """Attention of the last token over all of a cache: a prompt, and then steps that seal blocks."""
    n = k.shape[1]
    cache = OffloadedSparseCache(TokenConfig(token_budget=n, window=64, dense_layers=0, dense_below=None), offload)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    result = last_step(cache, q[:, :, None], q, k, v, prompt)
    assert cache.sparse_layers[0].store.full_blocks > (n - 200) // BLOCK
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_a_cache(dtype):
    """Blocks of a prompt and of steps, read by a step."""
    q, k, v, smallest = made_up(64, n=400)
    errors = []
    for bias in (0, 400):
        biased = k.clone()
        biased[..., smallest] += bias
        coded, plain = (step_of(offload, q, biased, v, dtype, 320) for offload in (INT8, OffloadConfig()))
        errors.append(distance(coded, plain.double()))
    assert errors[0] < 0.015 and errors[1] < 1.1 * errors[0]
