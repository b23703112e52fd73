"""Times of captured GPU work, the rate at which the device reads memory, and the best dense attention of torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .operator_inputs import Shape

REPETITIONS = 20  # in one graph
REPLAYS = 25
WARM_UP = 3  # replays that are not counted


@dataclass(frozen=True)
class Time:
    """Median and quartiles in microseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Time:
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)

    def __sub__(self, other: Time) -> Time:
        """What is left without work whose time is ``other``."""
        return Time(*(mine - other.median for mine in (self.median, self.low, self.high)))


def captured(run: Callable[[int], None], sets: int, repetitions: int = REPETITIONS, replays: int = REPLAYS) -> Time:
    """Time of one ``run(i)``: ``repetitions`` of them in one graph, ``i`` going round ``sets`` sets of inputs."""
    stream = torch.cuda.Stream(priority=-1)  # as a captured step has it
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(sets):
            run(i)  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(repetitions):
            run(i % sets)
    for _ in range(WARM_UP):
        graph.replay()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return Time.of([1e3 * start.elapsed_time(end) / repetitions for start, end in pairs])


@triton.jit
def _read_kernel(p_in, p_out, size, BN: tl.constexpr):
    """Read everything once and keep what the compiler cannot leave out."""
    b_sum = tl.zeros([BN], tl.int32)
    for i in range(tl.program_id(0) * BN, size, tl.num_programs(0) * BN):
        b_sum ^= tl.load(p_in + i.to(tl.int64) + tl.arange(0, BN))  # [BN]
    tl.store(p_out + tl.program_id(0) * BN + tl.arange(0, BN), b_sum)


def read_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second of a kernel that only reads, ``size`` int32 of them: far more than the caches hold."""
    buffer = torch.randint(1 << 30, (size,), dtype=torch.int32, device=device)
    best = 0.0
    for tile, programs, warps in ((4096, 528, 8), (4096, 1056, 8), (8192, 528, 16), (8192, 1056, 8)):
        out = torch.empty(programs * tile, dtype=torch.int32, device=device)

        def run(_: int, tile=tile, programs=programs, warps=warps, out=out) -> None:
            _read_kernel[(programs,)](buffer, out, size, BN=tile, num_warps=warps)

        best = max(best, 4e6 * size / captured(run, 1, repetitions=2, replays=10).median)
    return best


def dense_torch(shape: Shape, device: torch.device) -> dict[str, Time]:
    """Dense decode attention of torch over contiguous keys and values, by backend; what does not run is left out."""
    sets = 3 if shape.batch * shape.heads * shape.length * shape.dim < 1 << 28 else 2
    query = torch.randn(shape.batch, shape.q_heads, 1, shape.dim, dtype=shape.dtype, device=device)
    kv = [
        torch.randn(2, shape.batch, shape.heads, shape.length, shape.dim, dtype=shape.dtype, device=device)
        for _ in range(sets)
    ]
    # One query without a mask attends to everything, so the group may also go as that many queries of one head.
    rows = query.view(shape.batch, shape.heads, -1, shape.dim)
    found = {}
    for name, backend, q in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION, query),
        ("flash", SDPBackend.FLASH_ATTENTION, query),
        ("flash-rows", SDPBackend.FLASH_ATTENTION, rows),
    ):

        def run(i: int, q=q) -> None:
            scaled_dot_product_attention(q, kv[i][0], kv[i][1], enable_gqa=q.shape[1] != shape.heads)

        try:
            with sdpa_kernel(backend):
                found[name] = captured(run, sets, repetitions=4)
        except RuntimeError:
            torch.cuda.synchronize()
    return found
