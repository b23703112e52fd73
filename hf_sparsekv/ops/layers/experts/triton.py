"""The routed experts of a mixture of experts: which kernels for how many tokens."""

from __future__ import annotations

import torch

from ..._dispatch import require_dense_rows
from .few import experts_few
from .mxfp4 import Mxfp4
from .prompts import experts_grouped, serves
from .tiles import CODES, COLUMNS, ROWS, kind_of
from .together import experts_together

# One H200, us at 8 / 16 tokens, each token alone and those of an expert together: Qwen3-30B-A3B 118 / 206 and
# 126 / 195, gpt-oss-20b 314 / 517 and 336 / 430.
FEW = 8  # tokens: above, those of an expert are multiplied together
# Pairs of an expert, on average, from which torch's grouped products are faster. Qwen3-30B-A3B, 16k tokens (1,024
# pairs): 2.70 ms together, 2.79 grouped; gpt-oss-20b, 128 / 512 / 4k tokens (16 / 64 / 512): .62 / .68 / 2.16 and
# .64 / .63 / 1.72, in MXFP4 .88 / 2.7 / 11 and 1.15 / 1.14 / 2.14.
GROUPED = {ROWS.value: 1024, COLUMNS.value: 24, CODES.value: 24}
CHUNK = 32768  # tokens at once: what stands between and after the products takes memory for each pair
WAYS = {"few": experts_few, "together": experts_together, "grouped": experts_grouped}


def experts(x, index, weights, gate_up, down, gate, gate_up_bias=None, down_bias=None, config=None):
    """As ``reference.experts``. The kernels read the weights where they are.

    Args:
        config: one of ``WAYS``; None: by the number of tokens.
    """
    require_dense_rows(x=x)
    for weight in (gate_up, down):
        if isinstance(weight, Mxfp4):
            weight.check()
    if config is None:
        if len(x) > CHUNK:
            parts = ((t[at : at + CHUNK] for t in (x, index, weights)) for at in range(0, len(x), CHUNK))
            return torch.cat([experts(*part, gate_up, down, gate, gate_up_bias, down_bias) for part in parts])
        if len(x) <= FEW:
            config = "few"
        else:
            many = index.numel() >= GROUPED[kind_of(gate_up)] * gate_up.shape[0]
            config = "grouped" if many and serves(x, gate_up, down) else "together"
    if not index.numel():
        return torch.zeros(len(index), down.shape[1], dtype=x.dtype, device=x.device)
    return WAYS[config](x, index, weights, gate_up, down, gate, gate_up_bias, down_bias)
