"""Inputs of a captured step: the tensors and settings of a call, as a graph takes them.

In a file of its own because the check of a call, a first step and a steady replay all read a call the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import SparseCache
from ..cache_name import NAMES
from ..kv.rows import Rows

STATIC = ("input_ids", "position_ids", "attention_mask", *NAMES)
OF_DRAFTS = ("logits_to_keep", "use_cache", "return_dict")  # what else a pass that is captured may be told


def draft_width(tokens: int, most: int) -> int:
    """Tokens that a captured pass over drafts has room for: 4, 8, 16, 32 and so on, at most ``most``.

    Not always ``most``: up to 16 rows the fused layers have kernels of their own, and mixtures of experts read weights
    for each token.
    """
    return min(most, max(4, 1 << (tokens - 1).bit_length()))


def graph_inputs(given: dict, cache: SparseCache, positions: Tensor) -> tuple[Tensor, Tensor, dict, object]:
    """Ids and positions as a graph takes them, what else was given, and how many logits are asked for (0: all).

    Of rows that come and go those that the step runs; of drafts the last one as often as there is room.
    """
    ids, rest = given["input_ids"], {name: value for name, value in given.items() if name not in STATIC}
    if cache.row_batch is not None:
        n = cache.row_batch.width
        return ids[:n], positions[:n], rest, 0
    if (new := ids.shape[1]) == 1:
        return ids, positions, rest, 0
    more = draft_width(new, cache.config.max_draft + 1) - new
    if more:
        ids, positions = (torch.cat((t, t[..., -1:].expand(*t.shape[:-1], more)), dim=-1) for t in (ids, positions))
    return ids, positions, rest, rest.pop("logits_to_keep", 0)


def valid_rows(cache: SparseCache, rows: Rows, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Which rows get a token, bool ``[batch, 1]``; None: all."""
    if cache.row_batch is not None:
        return cache.row_batch.valid(device)
    if rows.valid is None or mask is None or cache.going_on:
        return None
    last = mask[:, -1:].bool()
    return None if bool(last.all()) else last


def all_tokens(mask: Tensor | None, new: int) -> bool:
    """No padding among the last ``new`` columns."""
    return mask is None or bool(mask[:, -new:].all())
