"""A linear layer of a few rows: the definition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

MAX_ROWS = 16  # the kernel's limit: rows are padded to one tensor core tile


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, ``[..., out]``, for ``x`` ``[..., in]`` of at most ``MAX_ROWS`` rows.

    ``weight`` is ``[out, in]``, ``bias`` ``[out]``, all of one dtype; sums are taken in float32.
    """
    return F.linear(x, weight, bias)
