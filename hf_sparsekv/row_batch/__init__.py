"""Rows that come and go: one batch that decodes, prompts beside it that join when they are read.

    rows = cache.rows(max_rows=8, max_length=131072)
    first = rows.prefill(model, ids)  # [1, n]; other rows may decode meanwhile
    row = rows.join(first)
    logits = rows.step(model, tokens)  # tokens [max_rows]: of each row its next one
    rows.leave(row)

A row has its own length, position and blocks; rows that are held or empty get no token. All share the block pools, and
a step is one captured graph, whatever the rows hold (:func:`..optimize`): of the first rows, as many as it takes.
"""

from .batch import RowBatch
from .model import no_positions, positions
from .places import width
from .protocol import Batch, Prefilled
from .slots import WorkingSets

__all__ = ["Batch", "Prefilled", "RowBatch", "WorkingSets", "no_positions", "positions", "width"]
