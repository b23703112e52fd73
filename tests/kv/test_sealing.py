"""Which blocks of which rows a decode step seals."""

from __future__ import annotations

import pytest
import torch

from hf_sparsekv.kv.rows import Rows, Taken
from hf_sparsekv.kv.sealing import steps_due

SIZE = 16


@pytest.mark.parametrize(
    ("first", "last", "turns"),
    [
        ((3,), (4,), [(3,), (4,)]),
        ((3, 1, 2, 0), (5, 1, 3, 0), [(3, 1, 2, 0), (4, 1, 3, 0), (5, 1, 3, 0)]),
        ((0, 7), (3, 8), [(0, 7), (1, 8), (2, 8), (3, 8)]),
    ],
)
def test_rows_that_have_sealed_theirs_wait_for_others(first, last, turns):
    """Each turn seals at most a block of a row, and none before it is due."""
    before, after = (Rows(SIZE, 200, (150,) * len(first), sealed) for sealed in (first, last))
    found = [one[:, 1].tolist() for one in steps_due(Taken(before, before, after), torch.device("cpu"))]
    assert found == [[SIZE * n for n in sealed] for sealed in turns]
