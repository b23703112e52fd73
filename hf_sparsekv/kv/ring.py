"""Where recent tokens and sinks are in a layer's ``recent_kv [batch, H, sinks + ring, Dk + Dv]``.

This is arithmetic on positions, without a tensor or state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_sparsekv_config.sparse import SparseConfig


def ring_tokens(config: SparseConfig) -> int:
    """Tokens that the ring of recent tokens holds: window and drafts, and a block that fills up after them.

    And once more drafts: those of a pass are all written before the first of them attends.
    """
    recent = config.window + config.max_draft
    return (-(-(recent + config.max_draft) // config.block_size) + 1) * config.block_size


class Ring(NamedTuple):
    """Copies of the first tokens, then a ring: token ``i`` is at ``sinks + i % tokens``.

    Args:
        sinks: entries before the ring.
        tokens: entries of the ring.
    """

    sinks: int
    tokens: int

    def positions(self, start: int, end: int, device: torch.device) -> Tensor:
        """Positions of tokens ``start .. end - 1``, int64."""
        return self.sinks + torch.arange(start, end, device=device) % self.tokens

    def read(self, recent_kv: Tensor, start: int, end: int, out: Tensor) -> None:
        """Copy tokens ``start .. end - 1`` to where ``out [rows, H, n, Dk + Dv]`` has them, at their own numbers."""
        while start < end:  # the ring begins again once at most
            begun = start % self.tokens
            until = min(end, start + self.tokens - begun)
            out[:, :, start:until] = recent_kv[:, :, self.sinks + begun : self.sinks + begun + until - start]
            start = until

    def put_sinks(self, recent_kv: Tensor, first: int, kv: Tensor) -> None:
        """Copy the sinks among tokens ``first ..`` of one row, ``kv [H, n, Dk + Dv]``, to ``recent_kv`` of that row."""
        n = min(kv.shape[1], self.sinks - first)
        recent_kv[:, first : first + n] = kv[:, :n]
