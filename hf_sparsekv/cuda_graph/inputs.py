"""Inputs of a captured step: the tensors and settings of a call, as a graph takes them.

The check of a call, a first step and a steady replay all read a call this way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache_name import NAMES
from ..kv.rows import Rows
from ..layers.cache_state import CacheState

STATIC = ("input_ids", "position_ids", "attention_mask", *NAMES)
OF_DRAFTS = ("logits_to_keep", "use_cache", "return_dict")  # further arguments that a captured draft pass may have


def draft_width(tokens: int, most: int) -> int:
    """Tokens that a captured pass over drafts has room for: 4, 8, 16, 32 and so on, at most ``most``.

    It is not always ``most``, because fused layers have special kernels for up to 16 rows, and mixtures of experts read
    weights for each token.
    """
    return min(most, max(4, 1 << (tokens - 1).bit_length()))


def graph_inputs(given: dict, cache: CacheState, positions: Tensor) -> tuple[Tensor, Tensor, dict, object]:
    """Ids and positions as a graph takes them, the other arguments, and the number of logits asked for (0: all).

    With continuous batching these are the rows that the step runs. Drafts are padded with copies of the last one.
    """
    ids, rest = given["input_ids"], {name: value for name, value in given.items() if name not in STATIC}
    if cache.row_batch is not None:
        n = cache.row_batch.width
        ids, positions = ids[:n], positions[:n]
    if (new := ids.shape[1]) == 1:
        return ids, positions, rest, 0
    more = draft_width(new, cache.config.max_draft + 1) - new
    if more:
        ids, positions = (torch.cat((t, t[..., -1:].expand(*t.shape[:-1], more)), dim=-1) for t in (ids, positions))
    return ids, positions, rest, rest.pop("logits_to_keep", 0)


def valid_rows(cache: CacheState, rows: Rows, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Which rows get a token, bool ``[batch, 1]``; None: all."""
    if cache.row_batch is not None:
        return cache.row_batch.valid(device)
    if rows.valid is None or mask is None or cache.going_on:
        return None
    last = mask[:, -1:].bool()
    return None if bool(last.all()) else last


def all_tokens(mask: Tensor | None, new: int) -> bool:
    """Whether the last ``new`` columns have no padding."""
    return mask is None or bool(mask[:, -new:].all())
