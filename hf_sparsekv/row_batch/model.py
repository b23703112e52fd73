"""Requirements of continuous batching on a model: positions per row, and layers that keep each row apart.

The model is checked before there are any rows.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from ..layers.cache_state import CacheState
from ..layers.joining import open_rows
from ..layers.kinds import face


def check_new(cache: CacheState, max_rows: int, max_length: int) -> None:
    """Raise ValueError unless the cache is empty and can have such rows."""
    if not cache.shared.rows_join:
        raise ValueError(
            f"rows() serves methods that choose for each step by itself; {cache.config} chooses ahead: leave lag, "
            "predictor='assembled', or the second device out"
        )
    for name, value in (("max_rows", max_rows), ("max_length", max_length)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    if cache.row_batch is not None:
        raise ValueError("this cache has rows already: use them, or reset() it")
    if cache.get_seq_length():
        raise ValueError(f"rows() needs an empty cache, this one holds {cache.get_seq_length()} tokens: reset() it")
    check_kinds(cache)


def check_kinds(cache: CacheState) -> None:
    """Raise ValueError unless all layers of the cache keep each row apart."""
    for layer in cache.layers:
        if (why := face(layer).why_no_rows()) is not None:
            raise ValueError(why)
    if cache.layers and not cache.sparse_layers:
        raise ValueError("rows that come and go need layers that attend to their whole past: this model has none")


def check_layers(cache: CacheState) -> None:
    """Raise ValueError unless all layers keep each row apart, and those that select hold the prompt."""
    check_kinds(cache)
    if cache.model_config is None:
        raise ValueError(
            "rows that come and go need a model that attends by attn_implementation='sparsekv': this one reads the "
            "keys and values itself"
        )
    empty = [layer.index for layer in cache.sparse_layers if layer.store is None]
    if empty:
        total = len(cache.layers)
        raise ValueError(
            f"the model's configuration names {total} layers, and its decoder has stored keys in "
            f"{total - len(empty)}: layers {empty} hold nothing. Set num_hidden_layers to what the decoder has"
        )


def open_layers(cache: CacheState, like: CacheState, rows: int) -> bool:
    """Create missing stores of the cache's layers for so many rows, like those of ``like``. False: none was missing."""
    if not cache.layers:
        cache.bind(like.model_config)
    new = [(layer, other) for layer, other in zip(cache.sparse_layers, like.sparse_layers) if layer.store is None]
    for layer, other in new:
        open_rows(layer, rows, other)
    return bool(new)


def positions(start: int, end: int, device: torch.device) -> Tensor:
    """Positions of a row's tokens ``start`` to ``end - 1``, int64 ``[1, n]``.

    Every pass gets them, because a model's own positions may begin elsewhere (RoBERTa's after its padding index).
    """
    return torch.arange(start, end, device=device)[None]


def no_positions(model: nn.Module) -> str | None:
    """Why rows of ``model`` cannot have positions of their own; None: its forward takes ``position_ids``."""
    generating = next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)
    given = inspect.signature(type(generating).forward).parameters
    if "position_ids" in given or not isinstance(generating, GenerationMixin):
        return None
    return (
        "the model's forward takes no position_ids: it counts positions by itself, the same for all rows of a batch, "
        "which have different lengths. Use generate()"
    )
