"""Lists of blocks drawn at random, for sparse prompts of a given density over random weights.

With random weights attention is flat, and no share of its mass says what a real model would choose. So everything that
chooses runs, and such lists take the place of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_sparsekv.attention import sparse_prompt
from hf_sparsekv.ops._prompts import BLOCK, TILE, blocks_of, tiles_of
from hf_sparsekv.ops.selection.prompt_choice import prompt_choice

KEPT = 8  # lists of a pass's pieces, which its layers share


def drawn_lists(heads: int, q: int, n: int, density: float, device: str | torch.device) -> tuple[Tensor, Tensor]:
    """Ids and counts of tiles that attend to about this share of the blocks that they see."""
    generator = torch.Generator(device).manual_seed(0)
    tiles, nb = tiles_of(q), blocks_of(n)
    begin = n - q + torch.arange(tiles, device=device) * TILE
    last, block = (begin + TILE).clamp_max(n) - 1, torch.arange(nb, device=device)
    common = torch.rand(heads, 1, nb, device=device, generator=generator) < density / 2
    own = torch.rand(heads, tiles, nb, device=device, generator=generator) < density / 2
    chosen = common | own | (block == 0) | (block >= begin[:, None] // BLOCK - 2)
    chosen &= block * BLOCK <= last[:, None]
    ids = torch.where(chosen, block, nb).sort(-1).values
    return ids.masked_fill(ids == nb, -1).int()[None], chosen.sum(-1, dtype=torch.int32)[None]


class Drawn:
    """Choices of a density in place of those that were made, the same in all layers: of one row without padding."""

    def __init__(self, density: float) -> None:
        self.density = density
        self.lists: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, pooled, exact, mass, past, rows, *args):
        covered = prompt_choice(pooled, exact, mass, past, rows, *args)[2]
        heads = pooled.shape[1]
        if (found := self.lists.pop((past, rows, heads), None)) is None:
            found = drawn_lists(heads, rows, past + rows, self.density, pooled.device)
        self.lists[past, rows, heads] = found
        if len(self.lists) > KEPT:
            del self.lists[next(iter(self.lists))]
        return *found, covered.fill_(float("nan"))


def draw(density: float | None) -> None:
    """Sparse prompts attend to drawn lists of this density from now on; None: to what they choose."""
    sparse_prompt.prompt_choice = prompt_choice if density is None else Drawn(density)
