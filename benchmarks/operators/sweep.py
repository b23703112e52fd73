"""Tile sizes and the like of each operator's kernel, timed one by one: where their constants come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from hf_sparsekv.ops._cuda import why_not
from hf_sparsekv.ops.attention.sparse_decode.config import config as decode_config
from hf_sparsekv.ops.attention.sparse_decode.triton import sparse_decode
from hf_sparsekv.ops.selection.token_score.config import config as label_config
from hf_sparsekv.ops.selection.token_score.labels import score_all
from hf_sparsekv.ops.selection.token_score.triton import token_score
from hf_sparsekv.ops.selection.topk_select.config import Config as Select
from hf_sparsekv.ops.selection.topk_select.triton import block_select, token_select
from hf_sparsekv.tuning.layer_step import Layer

from .walk import WalkLayer

_PAIRS = {"latent_decode": "dense_decode", "latent_tokens": "sparse_decode", "latent_masses": "block_attend"}
LATENT = _PAIRS | {keys: latents for latents, keys in _PAIRS.items()}  # what measures the same over the other layout
Variant = tuple[str, Callable[[int], None], Callable[[], Tensor]]
Grid = Iterable[tuple[str, dict]]


def _grid(**values: tuple) -> Iterator[tuple[str, dict]]:
    """All combinations, each with its name."""
    for chosen in product(*values.values()):
        options = dict(zip(values, chosen))
        yield ",".join(f"{name}={value}" for name, value in options.items()), options


def _ways(grid: Grid, launch: Callable[..., None], result: Callable[[], Tensor]) -> Iterator[Variant]:
    """``launch(i, **options)`` for each entry of a grid."""
    for name, options in grid:
        yield name, partial(launch, **options), result


def _decodes(layers: list[Layer], granularity: str, grid: Grid) -> Iterator[Variant]:
    """Ways to attend. ``programs`` is what they aim for."""
    shape = layers[0].shape

    def launch(i: int, **options) -> None:
        t = layers[i]
        config = decode_config(t.q, t.kv, t.recent_kv, shape.values, granularity)
        options = {"config": replace(config, **options)}
        ids = t.tokens if granularity == "token" else None
        stored = (t.q, t.kv, t.rows, t.block_table, ids, t.recent_kv)
        about = {"value_dim": shape.values, "sinks": t.sinks, "scale": shape.dim**-0.5, "out": t.out}
        sparse_decode(*stored, granularity=granularity, scales=t.scales, **about, **options)

    grid = [(name, {"clusters": False, **options}) for name, options in grid]
    if _has_cuda_kernels(layers) and granularity == "token" and not shape.value_dim:
        grid += _grid(clusters=(1, 2, 4, 8))
    return _ways(grid, launch, lambda: layers[0].out)


def _latents(layers: list[Layer], granularity: str) -> Iterator[Variant]:
    """Ways to attend to latents. Not all of them fit a processor: what does not is reported and left out."""
    tiles = (16, 32, 64) if granularity == "token" else (32, 64, 128)
    heads = (32,) if layers[0].shape.q_heads <= 32 else (32, 64)
    grid = _grid(tile=tiles, heads=heads, warps=(4, 8), stages=(1, 2, 3, 4), programs=(132, 264))
    return _decodes(layers, granularity, grid)


def _scores(layers: list[Layer], every: bool) -> Iterator[Variant]:
    """Ways to score the tokens of the chosen blocks, or of ``every`` block, by their labels."""
    out = _all_scores(layers) if every else [t.token_scores for t in layers]

    def launch(i: int, matrix: bool = True, in_cuda: bool = False, **options) -> None:
        t = layers[i]
        ids, reduce = None if every else t.blocks, t.shape.config.token_reduce
        labels = t.q, t.codes, t.qparams, t.channels, t.rows, t.block_table
        if in_cuda:
            if not score_all(*labels, reduce, t.sinks, t.norms, out[i], True):
                raise RuntimeError("the kernel in CUDA C++ does not serve here")
            return
        n = (t.block_table if ids is None else ids).shape[-1]
        config = replace(label_config(t.q, t.codes, t.qparams, n, reduce == "mean", matrix), **options)
        token_score(*labels, ids, reduce, sinks=t.sinks, norms=t.norms, out=out[i], config=config)

    each = (2, 4, 8, 16, 32, 64) if every else (1, 2, 4, 8, 16)
    grid = [*_grid(matrix=(True,), blocks=each), *_grid(matrix=(False,))]
    if every and _has_cuda_kernels(layers):
        grid.append(("in CUDA C++", {"in_cuda": True}))
    return _ways(grid, launch, lambda: out[0])


def _has_cuda_kernels(layers: list[Layer]) -> bool:
    return layers[0].q.is_cuda and why_not(layers[0].q.get_device()) is None


def _all_scores(layers: list[Layer]) -> list[Tensor]:
    """Room for the scores of all blocks of each layer."""
    size = layers[0].shape.config.block_size
    return [t.token_scores.new_empty(*t.blocks.shape[:2], t.block_table.shape[1] * size) for t in layers]


def _selects(layers: list[Layer], every: bool) -> Iterator[Variant]:
    """Ways to select tokens of the chosen blocks, or of all. Ways that exceed a processor's memory are left out."""
    scores = _all_scores(layers) if every else [t.token_scores for t in layers]
    config = layers[0].shape.config
    grid = [*_grid(warps=(4, 8, 16))]
    if every:
        for layer, one in zip(layers, scores):
            layer.token_score(None, one)
        grid = [*_grid(chunk=(1024, 2048, 4096), warps=(4, 8), last_warps=(8, 16))]
        grid += _grid(chunk=(8192,), warps=(8, 16), last_warps=(8,))
        grid += _grid(chunk=(2048,), warps=(4,), sample=(1024, 4096), last_warps=(8,))
        if scores[0].shape[-1] <= 32768:
            grid += _grid(row=(32768,), warps=(16, 32))
    grid = [(name, {"clusters": False, **options}) for name, options in grid]
    if _has_cuda_kernels(layers):
        grid += _grid(clusters=(2, 4, 8))

    def launch(i: int, **options) -> None:
        t = layers[i]
        blocks, rows = (None, t.rows) if every else (t.blocks, None)
        how = {"rows": rows, "out": t.tokens, "config": Select(**options)}
        token_select(scores[i], blocks, config.budget, config.block_size, **how)

    return _ways(grid, launch, lambda: layers[0].tokens)


def _block_selects(layers: list[Layer]) -> Iterator[Variant]:
    def launch(i: int, **options) -> None:
        t = layers[i]
        how = {"rows": t.rows, "block_size": t.shape.config.block_size, "out": t.blocks}
        block_select(t.block_scores, t.blocks.shape[-1], **how, config=Select(clusters=False, **options))

    return _ways(_grid(warps=(2, 4, 8)), launch, lambda: layers[0].blocks)


def _masses(layers: list[Layer]) -> Iterator[Variant]:
    """Ways to select 2,048 tokens, or all if there are fewer, by their masses; chunk None: by clusters."""
    shape = layers[0].shape
    walks = [WalkLayer(layer, min(2048, shape.full_blocks * shape.config.block_size)) for layer in layers]

    def launch(i: int, chunk: int | None) -> None:
        walks[i].select(config=chunk)

    return _ways(_grid(chunk=(None, 1024, 4096)), launch, lambda: walks[0].found.ids)


# operator -> its ways
WAYS: dict[str, Callable[[list[Layer]], Iterator[Variant]]] = {
    "token_select": lambda x: _selects(x, False),
    "block_select": lambda x: _block_selects(x),
    "token_score": lambda x: _scores(x, False),
    "long_select": lambda x: _selects(x, True),
    "long_score": lambda x: _scores(x, True),
    "sparse_decode": lambda x: _decodes(
        x, "token", _grid(tile=(16, 32, 64), warps=(1, 2, 4), stages=(1, 2, 3, 4), programs=(528, 1056, 1584))
    ),
    "dense_decode": lambda x: _decodes(
        x, "all", _grid(tile=(32, 64, 128), warps=(4, 8), stages=(2, 3), programs=(264, 396, 528, 1056))
    ),
    "latent_tokens": lambda x: _latents(x, "token"),
    "latent_decode": lambda x: _latents(x, "all"),
    "mass_select": lambda x: _masses(x),
}
OPERATORS = tuple(WAYS)


def variants(layers: list[Layer], operator: str) -> Iterator[Variant]:
    """Name, launch and result of each way to run ``operator``; the inputs are those that a whole step has left."""
    if operator in LATENT and operator.startswith("latent_") != bool(layers[0].shape.value_dim):
        raise ValueError(f"{operator} does not fit this shape: {LATENT[operator]} does")
    return WAYS[operator](layers)


def differs(got: Tensor, first: Tensor) -> bool:
    """Whether a variant's result is not the first one's: other ids, or other numbers than rounding explains."""
    if not got.is_floating_point():
        return not torch.equal(got, first)
    got, first = got.float(), first.float()
    wild = first.isinf()
    if got.isnan().any() or not torch.equal(got.isinf(), wild):
        return True
    difference = (got - first).masked_fill(wild, 0.0).norm()
    return bool(difference > 1e-2 * first.masked_fill(wild, 0.0).norm())
