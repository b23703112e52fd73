"""A benchmarked step against the references, operator by operator, each on what the kernel before it has written."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_sparsekv.ops.attention.sparse_decode.reference import sparse_decode
from hf_sparsekv.ops.selection.block_score.reference import block_score
from hf_sparsekv.ops.selection.token_score.reference import token_score
from hf_sparsekv.ops.selection.topk_select.reference import block_select, token_select
from hf_sparsekv.tuning.layer_step import Layer

# Largest RMS of the difference over the RMS of the reference, as in the tests of the operators.
RATIO = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def _ratio(got: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of the reference; infinite if the infinities differ or there is NaN."""
    got, expected = got.float(), expected.float()
    wild = expected.isinf()
    if not torch.equal(got.isinf(), wild) or got.isnan().any():
        return float("inf")
    got, expected = got.masked_fill(wild, 0.0), expected.masked_fill(wild, 0.0)
    return float((got - expected).norm() / expected.norm())


def near_enough(layer: Layer, what: str, got: Tensor, expected: Tensor) -> None:
    """Raise an AssertionError if ``got`` differs from ``expected`` by more than roundings."""
    found, limit = _ratio(got, expected), RATIO[layer.shape.dtype]
    if not found <= limit:
        raise AssertionError(f"{what}: RMS ratio {found:.2e}, allowed {limit:.0e}")


def same(what: str, got: Tensor, expected: Tensor) -> None:
    """Raise an AssertionError if ids differ."""
    if not torch.equal(got, expected):
        raise AssertionError(f"{what}: {int((got != expected).sum())} of {got.numel()} ids differ")


def attention(layer: Layer, ids: Tensor | None, granularity: str, rows: int) -> Tensor:
    """The reference's attention of the first ``rows`` rows: over everything it takes much memory."""
    return sparse_decode(
        layer.q[:rows],
        layer.kv,
        layer.rows[:rows],
        layer.block_table[:rows],
        None if ids is None else ids[:rows],
        layer.recent_kv[:rows],
        granularity=granularity,
        value_dim=layer.shape.values,
        sinks=layer.sinks,
        scale=layer.shape.dim**-0.5,
    )


def _check_appended(layer: Layer) -> None:
    expected = torch.cat((layer.k, layer.v), dim=-1)[:, :, 0]
    if not torch.equal(layer.recent_kv[:, :, layer.newest], expected):
        raise AssertionError("append: the new token is not in the near buffer")


def poison(layer: Layer) -> None:
    """Fill every output with values that no operator writes."""
    for t in (layer.block_scores, layer.token_scores, layer.out, layer.recent_kv[:, :, layer.newest]):
        t.fill_(float("nan"))
    for t in (layer.blocks, layer.tokens, layer.few_blocks):
        t.fill_(-7)


def _check_fine(layer: Layer, blocks: Tensor) -> None:
    config = layer.shape.config
    labels = (layer.codes, layer.qparams, layer.channels, layer.rows)
    named = {"sinks": layer.sinks, "norms": layer.norms}
    expected = token_score(layer.q, *labels, layer.block_table, blocks, config.token_reduce, **named)
    near_enough(layer, "token_score", layer.token_scores, expected)
    expected = token_select(layer.token_scores, blocks, config.budget, config.block_size)
    same("token_select", layer.tokens, expected)
    near_enough(layer, "sparse_decode", layer.out, attention(layer, layer.tokens, "token", layer.shape.batch))


def _check_coarse(layer: Layer) -> None:
    config = layer.shape.config
    live = {"tokens": config.block_size, "sinks": layer.sinks}
    expected = block_score(layer.q, layer.bounds, layer.rows, layer.block_table, config.token_reduce, **live)
    near_enough(layer, "block_score", layer.block_scores, expected)
    same("block_select", layer.blocks, block_select(layer.block_scores, layer.blocks.shape[-1]))


def check(layer: Layer, side: torch.cuda.Stream | None = None) -> None:
    """Raise an AssertionError that names the first operator whose result differs."""
    poison(layer)
    layer.step()
    _check_appended(layer)
    _check_coarse(layer)
    _check_fine(layer, layer.blocks)

    poison(layer)
    layer.lagged_step(side)
    _check_appended(layer)
    _check_fine(layer, layer.previous)
    _check_coarse(layer)

    poison(layer)
    layer.block_step()
    same("block_select of few", layer.few_blocks, block_select(layer.block_scores, layer.few_blocks.shape[-1]))
    expected = attention(layer, layer.few_blocks, "block", layer.shape.batch)
    near_enough(layer, "sparse_decode of blocks", layer.out, expected)

    poison(layer)
    layer.dense_step()
    near_enough(layer, "dense decode", layer.out[:1], attention(layer, None, "all", 1))
