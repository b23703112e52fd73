"""Continuous batching: rows join the decoding batch after their prefill, and leave it when they end.

    rows = cache.rows(max_rows=8, max_length=131072)
    first = rows.prefill(model, ids)  # [1, n]; other rows may decode meanwhile
    row = rows.join(first)
    logits = rows.step(model, tokens)  # tokens [max_rows]: of each row its next one
    rows.leave(row)

Each row has its own length, position and blocks. Rows that are held or empty get no token. All rows share the block
pools. A step replays one captured graph, whatever the rows hold (:func:`..optimize`). It runs the first rows of the
batch, up to the last active one.
"""

from .batch import RowBatch
from .model import no_positions, positions
from .places import width
from .prefilled import Prefilled
from .slots import WorkingSets

__all__ = ["Prefilled", "RowBatch", "WorkingSets", "no_positions", "positions", "width"]
