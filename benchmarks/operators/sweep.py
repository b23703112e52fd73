"""Tile sizes and the like of each operator's kernel, timed one by one: where their constants come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from hf_sparsekv.ops.block_rank.triton import Config as RankConfig
from hf_sparsekv.ops.block_rank.triton import block_rank
from hf_sparsekv.ops.sparse_decode.config import config as decode_config
from hf_sparsekv.ops.sparse_decode.triton import sparse_decode
from hf_sparsekv.ops.token_score.config import config as label_config
from hf_sparsekv.ops.token_score.triton import token_score
from hf_sparsekv.ops.topk_select.config import Config as Select
from hf_sparsekv.ops.topk_select.triton import block_select, token_select
from hf_sparsekv.tuning.layer_step import Layer

from .walk import WalkLayer

OPERATORS = (
    "token_select",
    "block_select",
    "token_score",
    "long_select",
    "long_score",
    "sparse_decode",
    "dense_decode",
    "block_rank",
    "block_attend",
    "latent_decode",
    "latent_tokens",
    "latent_masses",
    "expect",
    "verify",
    "verify_long",
)
FIRST = "begin"  # name of a variant that does only what the others have to do before; its time is subtracted
Variant = tuple[str, Callable[[int], None], Callable[[], Tensor]]


def _grid(**values: tuple) -> Iterator[tuple[str, dict]]:
    """All combinations, each with its name."""
    for chosen in product(*values.values()):
        how = dict(zip(values, chosen))
        yield ",".join(f"{name}={value}" for name, value in how.items()), how


def _decode(layer: Layer, ids: Tensor | None, granularity: str, how: dict[str, int]) -> None:
    """Attention by the configuration for these shapes, but for ``how``."""
    config = decode_config(layer.q, layer.kv, layer.near_kv, layer.shape.values, granularity)
    sparse_decode(
        layer.q,
        layer.kv,
        layer.flags,
        layer.slots,
        ids,
        layer.near_kv,
        layer.near_valid,
        granularity=granularity,
        value_dim=layer.shape.values,
        sinks=layer.sinks,
        scale=layer.shape.dim**-0.5,
        out=layer.out,
        config=replace(config, **how),
    )


def _decodes(layers: list[Layer], granularity: str, grid: Iterator[tuple[str, dict]]) -> Iterator[Variant]:
    """Ways to attend. Of latents not all fit a processor: what does not is reported and left out."""
    shape = layers[0].shape
    for name, how in grid:
        rows = shape.batch * shape.heads * (-(-shape.q_heads // how["heads"]) if "heads" in how else 1)
        how = dict(how, parts=max(1, how.pop("programs") // rows))

        def run(i: int, how=how) -> None:
            _decode(layers[i], layers[i].tokens if granularity == "token" else None, granularity, how)

        yield name, run, lambda: layers[0].out


def _long_selects(layers: list[Layer]) -> Iterator[Variant]:
    """Ways to select from all stored tokens, as a predictive step does. What a processor cannot hold is left out."""
    config, scores = layers[0].shape.config, _all_scores(layers)
    for layer, one in zip(layers, scores):
        layer.token_score(None, one)
    hows = [*_grid(split=(False,), chunk=(4096, 8192), warps=(8,))]
    hows += _grid(split=(True,), chunk=(1024, 2048, 4096), warps=(4, 8), last_warps=(8, 16))
    hows += _grid(split=(True,), chunk=(8192,), warps=(8, 16), last_warps=(8,))
    hows += _grid(split=(True,), chunk=(2048,), warps=(4,), sample=(1024, 4096), last_warps=(8,))
    if scores[0].shape[-1] <= 32768:
        hows += _grid(row=(32768,), warps=(16, 32))
    for name, how in hows:

        def run(i: int, how=how) -> None:
            token_select(
                scores[i], None, config.token_budget, config.block_size, out=layers[i].tokens, config=Select(**how)
            )

        yield name, run, lambda: layers[0].tokens


def _scores(layers: list[Layer], ids: list[Tensor | None], scores: list[Tensor], blocks: tuple[int, ...]):
    """Ways to score tokens by their labels."""
    reduce = layers[0].shape.config.token_reduce
    for name, how in [*_grid(matrix=(True,), blocks=blocks), *_grid(matrix=(False,))]:

        def run(i: int, how=how) -> None:
            t, listed = layers[i], ids[i]
            n = (t.slots if listed is None else listed).shape[-1]
            config = label_config(t.q, t.codes, t.qparams, n, reduce == "mean", how["matrix"])
            config = replace(config, blocks=how.get("blocks", config.blocks))
            labels = t.codes, t.qparams, t.channels, t.flags, t.slots, listed
            token_score(t.q, *labels, reduce, out=scores[i], config=config)

        yield name, run, lambda: scores[0]


def _all_scores(layers: list[Layer]) -> list[Tensor]:
    """Room for the scores of all blocks of each layer."""
    size = layers[0].shape.config.block_size
    return [t.token_scores.new_empty(*t.blocks.shape[:2], t.slots.shape[1] * size) for t in layers]


def _verifiers(layers: list[Layer], blocks: int) -> Iterator[Variant]:
    """Ways to walk over ``blocks`` blocks: how many at a time, one to four of them a thread."""
    walks = [WalkLayer(layer, blocks) for layer in layers]

    def result() -> Tensor:
        state = walks[0].state
        return torch.cat([state.limits.flatten().float(), state.used.flatten().float(), state.mass.flatten()])

    for walk in walks:
        walk.attend()
        walk.begin()
        walk.verify()
    yield FIRST, lambda i: walks[i].begin(), result
    for name, how in _grid(ahead=(32, 64, 128, 256, 512, 1024), warps=(1, 2, 4, 8, 16)):
        if 1 <= how["ahead"] // (32 * how["warps"]) <= 4:

            def run(i: int, how=how) -> None:
                walks[i].begin()
                walks[i].verify(**how)

            yield name, run, result


def variants(layers: list[Layer], operator: str) -> Iterator[Variant]:
    """Name, launch and result of each way to run ``operator``; the inputs are those that a whole step has left."""
    config = layers[0].shape.config
    if operator.startswith("latent_") and not layers[0].shape.value_dim:
        raise ValueError(f"{operator} takes latents: give --model or --value-dim")
    if operator == "token_select":
        for name, how in _grid(warps=(4, 8, 16)):

            def run(i: int, how=how) -> None:
                t = layers[i]
                token_select(
                    t.token_scores, t.blocks, config.token_budget, config.block_size, out=t.tokens, config=Select(**how)
                )

            yield name, run, lambda: layers[0].tokens
    elif operator == "block_select":
        for name, how in _grid(warps=(2, 4, 8)):

            def run(i: int, how=how) -> None:
                t = layers[i]
                block_select(t.block_scores, t.blocks.shape[-1], out=t.blocks, config=Select(**how))

            yield name, run, lambda: layers[0].blocks
    elif operator == "token_score":
        ids, scores = [t.blocks for t in layers], [t.token_scores for t in layers]
        yield from _scores(layers, ids, scores, (1, 2, 4, 8, 16))
    elif operator == "long_select":
        yield from _long_selects(layers)
    elif operator == "long_score":
        yield from _scores(layers, [None] * len(layers), _all_scores(layers), (2, 4, 8, 16, 32, 64))
    elif operator == "sparse_decode":
        tiles = {"tile": (16, 32, 64), "warps": (1, 2, 4), "stages": (1, 2, 3, 4)}
        yield from _decodes(layers, "token", _grid(**tiles, programs=(528, 1056, 1584)))
    elif operator == "dense_decode":
        tiles = {"tile": (32, 64, 128), "warps": (4, 8), "stages": (2, 3)}
        yield from _decodes(layers, "all", _grid(**tiles, programs=(264, 396, 528, 1056)))
    elif operator == "block_rank":
        for name, how in _grid(tile=(8, 16, 32), others=(256, 512, 1024)):

            def run(i: int, how=how) -> None:
                t = layers[i]
                t.ranked = block_rank(t.block_scores, t.fill, t.slots, config=RankConfig(**how))[0]

            yield name, run, lambda: layers[0].ranked
    elif operator in ("latent_decode", "latent_tokens"):
        tokens = operator == "latent_tokens"
        grid = {"tile": (16, 32, 64) if tokens else (32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3, 4)}
        heads = (32,) if layers[0].shape.q_heads <= 32 else (32, 64)
        yield from _decodes(layers, "token" if tokens else "all", _grid(**grid, heads=heads, programs=(132, 264)))
    elif operator in ("block_attend", "latent_masses"):
        walks = [WalkLayer(layer, min(64, layer.shape.sealed)) for layer in layers]
        for walk in walks:
            walk.made.lse.zero_()  # all of it is compared
        grid = {"tile": (16, 32, 64), "warps": (1, 2, 4), "programs": (528, 1056, 2112)}
        if operator == "latent_masses":
            grid = {"tile": (16, 32, 64), "warps": (4, 8), "programs": (132, 264, 528)}
        for name, how in _grid(**grid):
            yield name, lambda i, how=how: walks[i].attend(**how), lambda: walks[0].made.lse
    elif operator == "expect":
        walks = [WalkLayer(layer, min(64, layer.shape.sealed)) for layer in layers]
        for name, how in _grid(warps=(4, 8, 16), masses=(1024, 4096)):
            yield name, lambda i, how=how: walks[i].expect(**how), lambda: walks[0].made.behind
    elif operator in ("verify", "verify_long"):
        sealed = layers[0].shape.sealed
        # Recorded walks read two fifths of the blocks (benchmarks/NOTES.md).
        yield from _verifiers(layers, sealed * 2 // 5 if operator == "verify_long" else min(64, sealed))
    else:
        raise ValueError(f"no operator {operator!r}: choose from {', '.join(OPERATORS)}")


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
