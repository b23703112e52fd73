"""Which programs and warps of the block copy fill the link, and what they cost a step that runs beside them.

``python -m benchmarks offload prefetch`` measures the cost with a model's whole step, in minutes; here a chain of
linear layers stands for the step, because those take most of its time, and a GPU is measured in seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.block_copy.config import Config
from ..ops.block_copy.triton import block_copy
from ..ops.small_linear import small_linear
from .timing import captured, gbps
from .transfer import Point, near_best

HEADS, BLOCK, DIM = 8, 64, 128  # of the blocks that are copied: Qwen3-8B's
PROGRAMS = (4, 8, 16, 32, 64, 128)
WARPS = (2, 4, 8)
TOKENS = {False: BLOCK, True: 8}  # of a block, by `small`: 32 KB and 4 KB
POOL, FRAMES = 512 << 20, 256 << 20  # bytes in host memory and on the device
SIZE = 64 << 20  # bytes that a rate is measured with
LAYERS = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))  # in and out: products of one layer of Qwen3-8B
CHAIN_MS = 2.5
LASTS = 2  # times as long as the chain takes what runs beside it
WARM_UP, REPEATS = 2, 7


@dataclass(frozen=True)
class Measured:
    """What was found on a GPU and its link; rates in 10^9 bytes a second.

    Args:
        points: of both sizes; slow-downs of those near the best rate of their size and warps.
        limit: one large copy.
    """

    points: list[Point]
    limit: float


class Blocks:
    """Blocks of one size, anywhere in host memory, listed for frames anywhere.

    Args:
        host: uint8, pinned.
        slab: uint8 on the device.
        tokens: of a block.
    """

    def __init__(self, host: Tensor, slab: Tensor, tokens: int) -> None:
        width = 2 * DIM * 2  # bytes of a token: keys and values, bf16
        self.kv, self.frames = host.view(-1, HEADS, tokens, width), slab.view(-1, tokens, width)
        generator = torch.Generator().manual_seed(0)
        sources = torch.randperm(len(self.kv) * HEADS, generator=generator)[: len(self.frames)]
        frames = torch.randperm(len(self.frames), generator=generator)
        self.copies = torch.stack((sources, frames), dim=1).int().to(slab.device)
        self.number = torch.zeros(1, dtype=torch.int32, device=slab.device)

    def take(self, size: int) -> int:
        """Copy about so many bytes from now on; returns how many they are."""
        n = min(max(1, size // self.frames[0].nbytes), len(self.frames))
        self.number.fill_(n)
        return n * self.frames[0].nbytes

    def copy(self, programs: int, warps: int) -> None:
        """The kernel."""
        block_copy(self.kv, self.frames, self.copies, self.number, config=Config(programs, warps))


class Chain:
    """Linear layers of one row, as captured decode steps run them, of about :data:`CHAIN_MS` or ``most_ms``."""

    def __init__(self, device: torch.device, most_ms: float) -> None:
        made = {"dtype": torch.bfloat16, "device": device}
        self._x = torch.randn(1, LAYERS[0][0], **made)
        self._weights = [torch.empty(n, k, **made).normal_(std=k**-0.5) for k, n in LAYERS]
        # As a captured step has them: what looks ahead takes the processors that the step itself leaves.
        self._main, self._side = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
        layer_ms = captured(lambda _: self._layer(), 1, repetitions=4, replays=5).median / 1e3
        layers = max(1, round(min(CHAIN_MS, most_ms) / layer_ms))
        self.expected_ms = layers * layer_ms
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._main):
            for _ in range(layers):
                self._layer()

    def _layer(self) -> Tensor:
        x = self._x
        for weight in self._weights:
            # One after the other; a small kernel between two products.
            x = small_linear(F.rms_norm(x[:, : weight.shape[1]], weight.shape[1:]), weight)
        return x

    def ms(self, beside: Callable[[], object] | None = None) -> float:
        """How long the chain takes, while what ``beside()`` launches runs on another stream."""
        found = []
        for _ in range(WARM_UP + REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            if beside is not None:
                with torch.cuda.stream(self._side):
                    beside()
            with torch.cuda.stream(self._main):
                start.record()
                self._graph.replay()
                end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end))
        return statistics.median(found[WARM_UP:])


def measure(device: torch.device, progress: Callable[[str], object] = lambda text: None) -> Measured:
    """Rates of all programs and warps, then slow-downs of those that may be chosen.

    Raises:
        torch.OutOfMemoryError: there is no room for 0.7 GB on the device.
        RuntimeError: 512 MB of host memory cannot be pinned.
    """
    progress("measuring the link")
    host = torch.empty(POOL, dtype=torch.uint8, pin_memory=True)
    slab = torch.empty(FRAMES, dtype=torch.uint8, device=device)
    limit = statistics.median(gbps(SIZE, lambda: slab[:SIZE].copy_(host[:SIZE], non_blocking=True)))
    blocks = {small: Blocks(host, slab, tokens) for small, tokens in TOKENS.items()}
    points = []
    for small, programs, warps in product(blocks, PROGRAMS, WARPS):
        one = blocks[small]
        found = gbps(one.take(SIZE), lambda one=one, shape=(programs, warps): one.copy(*shape), 5)
        points.append(Point(small, programs, warps, statistics.median(found)))
    progress("measuring a chain of kernels beside block copies")
    best = max(point.gbps for point in points)
    chain = Chain(device, FRAMES / LASTS / best / 1e6)
    found = []
    for small, warps in product(blocks, WARPS):
        group = [p for p in points if (p.small, p.warps) == (small, warps)]
        near = near_best(group)
        found += [replace(p, slowdown=_slowdown(chain, blocks[small], p)) if p in near else p for p in group]
    return Measured(found, limit)


def _slowdown(chain: Chain, blocks: Blocks, point: Point) -> float:
    """By which share the chain takes longer. The chain alone is timed each time, since clocks change."""
    blocks.take(int(LASTS * chain.expected_ms * point.gbps * 1e6))
    alone = chain.ms()
    return chain.ms(lambda: blocks.copy(point.programs, point.warps)) / alone - 1
