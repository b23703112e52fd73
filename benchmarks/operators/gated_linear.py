"""Gate and up projection of a gated MLP with their product, for few rows: in one kernel, and in two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from hf_sparsekv.ops.layers.gated.triton import gated
from hf_sparsekv.ops.layers.small_linear.triton import Tile, small_linear
from hf_sparsekv.tuning.timing import captured

from ..report import Report
from .sweep import Variant, differs, tile_name

NAME = "gated_linear"
CASE, HIDDEN, INNER = "qwen3-8b", 4096, 12288
ROWS = (1, 8, 16)
SETS = 3  # of weights, 201 MB each: what is read comes from memory
SHARED = 227 << 10  # bytes that one program may have


@dataclass(frozen=True)
class Inputs:
    """``x [rows, hidden]``, gate and up projection ``[2 * inner, hidden]`` and the down projection behind them."""

    x: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def random(cls, rows: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device)

        return cls(randn(rows, hidden), randn(2 * inner, hidden) / hidden**0.5, randn(hidden, inner) / inner**0.5)

    def bytes_moved(self) -> int:
        """By gate and up projection and their product, at least."""
        n, k = self.gate_up.shape
        return (n * k + len(self.x) * (k + n // 2)) * self.x.element_size()


def tiles(rows: int) -> Iterator[Tile]:
    """What to try for so many rows of ``x``, as far as a processor holds it."""
    if rows == 1:
        for n, k, stages, warps in product((2, 4, 8), (1024, 2048, 4096), (1, 2), (4, 8)):
            each = n * k // (32 * warps)  # sums that a thread holds
            if each in (16, 32, 64):
                yield Tile(n, k, stages, warps)
                if each == 32:
                    yield Tile(n, k, stages, warps, 64)
    else:
        for n, k, stages, warps in product((32, 64, 128), (64, 128, 256, 512), (2, 3, 4), (4, 8)):
            # Below 32 KB on their way the memory waits for the program; eight warps are for the largest tiles.
            if 32 << 10 < stages * (n + 16) * k * 2 <= SHARED and (warps == 4 or n == 128):
                yield Tile(n, k, stages, warps)


def ways(sets: list[Inputs]) -> Iterator[Variant]:
    """The two kernels of today, then one with each tile; both with the down projection behind them, too."""
    out: list[Tensor] = [torch.empty(0)] * len(sets)

    def two(i: int) -> None:
        t = sets[i]
        out[i] = gated(*small_linear(t.x, t.gate_up).chunk(2, dim=-1), "silu")

    def one(i: int, config: Tile | None = None) -> None:
        out[i] = small_linear(sets[i].x, sets[i].gate_up, None, "silu", config)

    def with_down(i: int, first) -> None:
        first(i)
        out[i] = small_linear(out[i], sets[i].down)

    yield "two kernels", two, lambda: out[0]
    yield "one kernel", one, lambda: out[0]
    for tile in tiles(len(sets[0].x)):
        yield tile_name(tile), partial(one, config=tile), lambda: out[0]
    yield "two kernels, down", partial(with_down, first=two), lambda: out[0]
    yield "one kernel, down", partial(with_down, first=one), lambda: out[0]


def sweep(report: Report, device: torch.device, rate: float) -> None:
    """All ways at 1, 8 and 16 rows beside the bound by ``rate`` bytes a second; each compared with the two kernels."""
    report.case = CASE
    for rows in ROWS:
        with report.measuring(rows, 0, NAME):
            sets = [Inputs.random(rows, HIDDEN, INNER, torch.bfloat16, device) for _ in range(SETS)]
            measure(report, sets, rate)


def measure(report: Report, sets: list[Inputs], rate: float) -> None:
    """:func:`sweep` for these inputs."""
    rows, found, first = len(sets[0].x), {}, {}
    with report.measuring(rows, 0, "limit"):
        report.add(f"{NAME}_us", 1e6 * sets[0].bytes_moved() / rate, "us")
    for name, run, result in ways(sets):
        with report.measuring(rows, 0, f"{NAME}:{name}"):  # not all tiles fit every processor
            took = captured(run, len(sets))
            run(0)
            got = result().clone()
            width = got.shape[-1]
            if differs(got, first.setdefault(width, got)):
                raise RuntimeError(f"{NAME} {name}: another result than the two kernels'")
            report.add(f"{NAME}_us", took.samples, "us")
            if not name.endswith("down"):
                found[name] = took
    if found:
        best = min(found, key=lambda name: found[name].median)
        report.note(f"{NAME}, {rows} rows, quickest: {best}, {found[best].median:.2f} us")
