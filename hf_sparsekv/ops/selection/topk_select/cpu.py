"""The k best tokens of each row on a CPU: the k-th best score by selection, and the entries that reach it, unsorted."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from . import reference


def token_select(
    scores: Tensor,
    block_ids: Tensor | None,
    k: int,
    block_size: int,
    *,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """See :func:`.reference.token_select`.

    The reference runs if the number of entries that reach the ``k``-th best score is not exactly ``k``: equal scores
    at the border, fewer than ``k`` to choose from, or NaN.
    """
    reference.require_all_blocks(rows, block_ids, scores.shape[0])
    n = scores.shape[-1]
    whole = rows is None or min(sealed for _, sealed in rows.tolist()) >= n
    if block_ids is None and out is None and whole and 0 < k <= n:
        of = scores.detach().numpy()
        border = np.partition(of, n - k, axis=-1)[..., n - k, None]
        at, lists = np.flatnonzero(of >= border), scores.shape[:-1].numel()
        # In the order of the lists: each has k if its first and its last entry are where they then are.
        if at.shape[0] == k * lists and min(border.ravel().tolist()) > -math.inf:
            at = at.reshape(lists, k)
            if all(i == one // n == other // n for i, (one, other) in enumerate(at[:, (0, -1)].tolist())):
                return torch.from_numpy((at % n).astype(np.int32)).view(*scores.shape[:-1], k)
    return reference.token_select(scores, block_ids, k, block_size, rows=rows, out=out, scratch=scratch)
