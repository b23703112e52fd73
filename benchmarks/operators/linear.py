"""The linear layers of a decode step of an 8B model, for few rows: tiles of the kernel, and torch's product."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sparsekv.ops.layers.small_linear.triton import Tile, small_linear, tile

from ..report import Report
from .sweep import Variant, compare, tile_name

NAME = "linear"
CASE = "qwen3-8b"
ROWS = (1, 8, 16)
LAYERS = {  # rows of the weight, inputs, activation
    "qkv": (6144, 4096, None),
    "out": (4096, 4096, None),
    "gate_up": (24576, 4096, "silu"),
    "down": (4096, 12288, None),
    "head": (151936, 4096, None),
}
READ = 300e6  # bytes of weights, several sets of them: what is read comes from memory


TILES = tuple(  # of more than one row
    Tile(*one)
    for one in (
        *((32, 128, 8, 4), (32, 256, 4, 4), (32, 256, 5, 4), (32, 256, 6, 4), (32, 512, 3, 4), (32, 512, 4, 8)),
        *((64, 64, 8, 4), (64, 128, 5, 4), (64, 128, 6, 4), (64, 128, 4, 8), (64, 256, 3, 8), (128, 64, 6, 4)),
    )
)


def ways(weights: list[Tensor], xs: list[Tensor], activation: str | None) -> list[Variant]:
    """Today's kernel first."""
    out: list[Tensor] = [torch.empty(0)] * len(weights)

    def ours(i: int, config: Tile) -> None:
        out[i] = small_linear(xs[i], weights[i], None, activation, config)

    def by_torch(i: int) -> None:
        out[i] = F.linear(xs[i], weights[i])

    usual = tile(len(xs[0]), *weights[0].shape, activation is not None)
    found: list[Variant] = [("triton", partial(ours, config=usual), lambda: out[0])]
    if activation is None:
        found.append(("torch", by_torch, lambda: out[0]))
    if len(xs[0]) > 1:
        for one in TILES:
            found.append((tile_name(one), partial(ours, config=one), lambda: out[0]))
    return found


def measure(report: Report, name: str, weights: list[Tensor], xs: list[Tensor], activation: str | None) -> None:
    """All ways of one layer; each compared with the first."""
    compare(report, ways(weights, xs, activation), len(weights), len(xs[0]), NAME, name)


def sweep(report: Report, device: torch.device, rate: float) -> None:
    """All layers at 1, 8 and 16 rows, beside the bound by ``rate`` bytes a second."""
    report.case = CASE
    for name, (n, k, activation) in LAYERS.items():
        weights = [
            torch.randn(n, k, dtype=torch.bfloat16, device=device) / k**0.5 for _ in range(2 + int(READ / (2 * n * k)))
        ]
        for rows in ROWS:
            xs = [torch.randn(rows, k, dtype=torch.bfloat16, device=device) for _ in weights]
            with report.measuring(rows, 0, f"limit:{name}"):
                report.add(f"{name}_us", 1e6 * 2 * n * k / rate, "us")
            measure(report, name, weights, xs, activation)
        del weights
        torch.cuda.empty_cache()
