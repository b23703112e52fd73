"""Detects padding that a captured step would take for a token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.cache_state import CacheState


class MaskWatch:
    """Notices a padding token in the middle of an unpadded batch's answer without waiting for the GPU.

    A captured step of such a batch takes its new tokens as valid, which those of ``generate()`` are.
    """

    def __init__(self, mask: Tensor) -> None:
        self.holes = torch.zeros(mask.shape[0], dtype=torch.bool, device=mask.device)
        self.seen = torch.zeros_like(self.holes, device="cpu", pin_memory=mask.is_cuda)

    def look(self, mask: Tensor) -> None:
        """Start the copy of the mask's last column to the host."""
        torch.eq(mask[:, -1], 0, out=self.holes)
        self.seen.copy_(self.holes, non_blocking=True)

    def check(self, cache: CacheState) -> None:
        """Raise for padding in the columns that have arrived: those of all steps that the caller has waited for."""
        if self.seen.any():
            self.seen.fill_(False)
            for layer in cache.sparse_layers:
                layer.broken = "a padding token in the middle of an answer"
            raise ValueError(
                "attention_mask marked a padding token in the middle of the answer of a batch without padding, which a "
                "captured step takes for a valid one. Start again, and call unoptimize(model) first if you need this"
            )
