"""A captured step of as many rows as an engine has, without the engine: what its steps are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_sparsekv import OffloadConfig, OffloadedSparseCache, SparseConfig, optimize, unoptimize

from ..decoding import LEFT_OUT, replay_ms
from ..rows import RowSteps, prefilled

WARM_UP_STEPS = 8


def step_alone_ms(
    model: torch.nn.Module,
    max_length: int,
    lengths: Sequence[int],
    config: SparseConfig,
    offload: OffloadConfig | None,
) -> list[float]:
    """Captured steps of rows of these lengths, those of the engine's halfway through; keys and values are random.

    As many as a block has tokens: each row seals one, as in the engine, where it is some row's turn in every other
    step if there are many.
    """
    model.set_attn_implementation("sparsekv")
    optimize(model)
    try:
        cache = OffloadedSparseCache(config, offload)
        batch = cache.rows(len(lengths), max_length)
        for seed, length in enumerate(lengths):
            batch.join(prefilled(model, batch, length, seed))
        step = RowSteps(model, batch)
        for _ in range(WARM_UP_STEPS):
            step()
        began = cache.joined_rows()
        for _ in range(config.block_size + LEFT_OUT):
            step()
        return replay_ms(model, cache, began)
    finally:
        unoptimize(model)
