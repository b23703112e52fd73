"""Tiles, warps and stages of the estimates of a prompt's mass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Config:
    """Launch parameters.

    Args:
        means: means of keys at once.
        blocks: blocks of keys that a program of exact rows takes.
        warps: of a program. stages: pieces of keys in flight.
    """

    means: int = 64
    blocks: int = 8
    warps: int = 8
    stages: int = 3


def config(query: Tensor, dk: int) -> Config:
    """Launch parameters for keys of ``dk`` channels. Not tuned yet."""
    if query.dtype == torch.float32 or dk > 128:
        return Config(stages=1 if query.dtype == torch.float32 else 2)
    return Config()
