"""The chosen experts of a mixture in a decode step: tiles of both kernels, each by itself and both together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_sparsekv.ops.layers.experts.reference import experts as reference
from hf_sparsekv.ops.layers.experts.triton import DOWN, UP, Tile, experts_down, experts_up

from ..report import Report
from .sweep import Variant, compare, tile_name

NAME = "experts"
CASE, HIDDEN, INNER, EXPERTS, CHOSEN = "glm-4.7-flash", 2048, 1536, 64, 4
TOKENS = (1, 6, 16)
LAYERS = 2  # of weights, 1.2 GB each
SETS = 10  # of tokens and their experts, which take turns: what is read comes from memory
PARTS = ("up", "down", "both")

# Outputs, inputs at once, warps, registers. What one processor of sm_90 then has on its way is 64 to 192 KB.
UPS = tuple(
    Tile(*one)
    for one in (
        *((2, 2048, 8, 40), (2, 2048, 8, 32), (1, 2048, 8, 32), (4, 2048, 8, 64)),
        *((1, 2048, 4), (2, 2048, 4), (4, 2048, 4, 96), (1, 2048, 2), (2, 2048, 2), (1, 2048, 1)),
    )
)
DOWNS = tuple(
    Tile(*one)
    for one in (
        *((1, 6144, 2), (1, 6144, 2, 72), (1, 4096, 2), (1, 2048, 2), (2, 2048, 2)),
        *((1, 8192, 4), (1, 4096, 4), (2, 4096, 4), (1, 8192, 8), (2, 8192, 8), (1, 6144, 1)),
    )
)


@dataclass(frozen=True)
class Inputs:
    """``x [tokens, hidden]``, ``index`` and ``weights [tokens, k]``, the experts' weights and what ``down`` reads."""

    x: Tensor
    index: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    middle: Tensor

    def bytes_read(self, part: str) -> int:
        """Of weights, at least: each chosen expert once."""
        read = {"up": self.gate_up[0].nbytes, "down": self.down[0].nbytes}
        each = read["up"] + read["down"] if part == "both" else read[part]
        return each * self.index.unique().numel()


def layers(count: int, n: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> list:
    """``count`` times gate and up, and down projections of ``n`` experts."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device) / shape[-1] ** 0.5

    return [(randn(n, 2 * inner, hidden), randn(n, hidden, inner)) for _ in range(count)]


def draw(weights: list, tokens: int, k: int, count: int) -> list[Inputs]:
    """``count`` times tokens and their ``k`` experts. The first token's differ from those of all other sets."""
    gate_up, down = weights[0]
    n, device = len(gate_up), gate_up.device
    order, found = torch.randperm(n, device=device), []
    for i in range(count):
        index = torch.rand(tokens, n, device=device).topk(k).indices
        index[0] = order[i * k : (i + 1) * k]
        gate_up, down = weights[i % len(weights)]
        x = torch.randn(tokens, gate_up.shape[2], dtype=gate_up.dtype, device=device)
        share = torch.rand(tokens, k, device=device)
        found.append(Inputs(x, index, share, gate_up, down, experts_up(x, index, gate_up, "silu")))
    return found


def ways(sets: list[Inputs], part: str) -> Iterator[Variant]:
    """Of one of ``PARTS``: with the tiles of today first, then the others; of both together the definition first."""
    out: list[Tensor] = [torch.empty(0)] * len(sets)

    def up(i: int, tile: Tile = UP) -> None:
        t = sets[i]
        out[i] = experts_up(t.x, t.index, t.gate_up, "silu", tile)

    def down(i: int, tile: Tile = DOWN) -> None:
        t = sets[i]
        out[i] = experts_down(t.middle, t.index, t.weights, t.down, tile)

    def both(i: int, tile: Tile = DOWN) -> None:
        t = sets[i]
        middle = experts_up(t.x, t.index, t.gate_up, "silu")
        out[i] = experts_down(middle, t.index, t.weights, t.down, tile)

    def defined(i: int) -> None:
        t = sets[i]
        out[i] = reference(t.x, t.index, t.weights, t.gate_up, t.down, "silu")

    if part == "both":
        yield "torch", defined, lambda: out[0]
    run, usual, tiles = {"up": (up, UP, UPS), "down": (down, DOWN, DOWNS), "both": (both, DOWN, DOWNS)}[part]
    yield "triton", partial(run, tile=usual), lambda: out[0]
    for tile in tiles:
        yield tile_name(tile), partial(run, tile=tile), lambda: out[0]


def sweep(report: Report, device: torch.device, rate: float) -> None:
    """All ways at 1, 6 and 16 tokens beside the bound by ``rate`` bytes a second."""
    report.case = CASE
    weights = layers(LAYERS, EXPERTS, HIDDEN, INNER, torch.bfloat16, device)
    for tokens in TOKENS:
        with report.measuring(tokens, 0, NAME):
            sets = draw(weights, tokens, CHOSEN, SETS)
            for part in PARTS:
                measure(report, sets, part, rate)


def measure(report: Report, sets: list[Inputs], part: str, rate: float) -> None:
    """All ways of one part for these inputs; each compared with the first."""
    tokens = len(sets[0].x)
    with report.measuring(tokens, 0, f"limit:{part}"):
        read = sum(t.bytes_read(part) for t in sets) / len(sets)
        report.add(f"{part}_us", 1e6 * read / rate, "us")
    compare(report, ways(sets, part), len(sets), tokens, NAME, part)
