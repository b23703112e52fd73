"""Several tokens of some rows at once, which attend to everything: verification of drafts, and taking back the others.

Only exact mode uses it, through the rows' public methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..cache_name import over
from ..layers.cache_state import FullLayer
from ..layers.step import asked, plan_of
from ..tensors import sent
from .batch import RowBatch


def selects(cache: Any) -> bool:
    """Whether the next step attends to a selection: of the last layer, because the first ones may be dense.

    Called before each step: so it leaves alone what layers have not accounted for yet.
    """
    layer = next(layer for layer in reversed(cache.layers) if isinstance(layer, FullLayer))
    with layer.store.at(asked(layer.store, cache)):
        return not plan_of(layer.store, layer.policy).dense


@torch.no_grad()
def verify(rows: RowBatch, model: nn.Module, ids: Tensor, counts: Sequence[int]) -> Tensor:
    """Decode several tokens of some rows in one pass. Each attends to everything before it.

    Args:
        model: the model that read the prompts.
        ids: int64 ``[max_rows, n]``, from 2 to ``max_draft + 1`` tokens.
        counts: how many of its tokens each row gets, ``[max_rows]``. 0: none; the row is as if it did not exist.

    Returns:
        Logits ``[width, n, vocabulary]`` of the first rows, valid until the next pass. Logits of tokens that a row does
        not get are undefined.

    Raises:
        ValueError: no row gets a token, one that is not active does, or one would exceed ``max_length``.
    """
    lengths, most = rows.cache.joined_rows().lengths, ids.shape[1]
    given = [row for row, count in enumerate(counts) if count]
    if not given or not {*given} <= {*rows.active} or not 2 <= most <= rows.cache.config.max_draft + 1:
        raise ValueError(f"rows {given} cannot get up to {most} tokens: rows {list(rows.active)} are active")
    if full := [row for row in given if lengths[row] + counts[row] > rows.max_length]:
        raise ValueError(f"rows {full} would hold more than max_length={rows.max_length} tokens")
    at = [[(n + min(i, count - 1)) * (count > 0) for i in range(most)] for n, count in zip(lengths, counts)]
    where = sent(at, torch.long, ids.device)
    with rows.cache.row_table.exactness.exactly(tuple(counts)), rows.cache.drafts():
        out = model(input_ids=ids, position_ids=where, **over(model, rows.cache), use_cache=True)
    return out.logits[: rows.width]


def take_back(rows: RowBatch, lengths: Mapping[int, int]) -> None:
    """Keep the first tokens of some rows, ``{row: tokens}``, after drafts.

    As :meth:`.RowBatch.crop`, but a change of the table alone if no full block is taken back: no step has to be planned
    again.
    """
    table = rows.cache.row_table
    layers = [layer for layer in rows.cache.layers if isinstance(layer, FullLayer)]
    before = after = rows.cache.joined_rows()
    for row, length in lengths.items():
        after = after.with_row(row, length, table.cropped_row(row, length).sealed[row])
    if after.sealed == before.sealed and not any(layer.policy.follows_crops for layer in layers):
        table.rows = after
        return
    for row, length in lengths.items():
        rows.crop(row, length)
