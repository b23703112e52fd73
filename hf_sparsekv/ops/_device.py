"""Properties of a GPU that launch parameters depend on: SMs, caches and memory.

Kernels were tuned on an H200. On another GPU a launch aims for the same number of programs per SM (:func:`programs`),
and tiles are cut to the available shared memory (:func:`shared_memory`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ._cuda import why_not

# Bytes of shared memory that one program may use, by compute capability ("CUDA C++ Programming Guide", table of
# technical specifications per compute capability): A100, RTX 30, RTX 40 and L40S, H100 and H200, B200, RTX 50.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

MOST_BLOCKS = 8  # of a cluster: the most that every GPU with clusters runs
CLUSTERED = 132  # blocks per launch of clusters to aim for on an H200: one per SM
MOST_LISTS = 65535  # that clusters share, as many as a grid has room for


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU, or of a part of one (MIG).

    Args:
        processors: number of SMs.
        l2_bytes: size of the L2 cache.
        shared_bytes: shared memory that one program may use.
        bandwidth: peak memory bandwidth in bytes a second; None if the driver does not report it.
        cuda_kernels: whether CUDA C++ kernels that need clusters run on it (:mod:`._cuda`).
    """

    processors: int
    l2_bytes: int
    shared_bytes: int
    bandwidth: float | None
    cuda_kernels: bool = False


H200 = Gpu(
    processors=132, l2_bytes=50 << 20, shared_bytes=SHARED[90], bandwidth=4.8e12, cuda_kernels=True
)  # by its data sheet


def gpu(device: torch.device) -> Gpu:
    """Properties of a CUDA device, from the driver.

    Raises:
        ImportError: Triton, which queries the driver, is not installed.
    """
    return _told(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _told(device: int) -> Gpu:
    import triton

    told = triton.runtime.driver.active.utils.get_device_properties(device)
    clock, width = told.get("mem_clock_rate", 0), told.get("mem_bus_width", 0)  # kHz, bits
    return Gpu(
        processors=told["multiprocessor_count"],
        l2_bytes=torch.cuda.get_device_properties(device).L2_cache_size,
        shared_bytes=told["max_shared_mem"],
        bandwidth=2 * 1000 * clock * width / 8 or None,  # both edges of the clock
        cuda_kernels=why_not(device) is None,
    )


def gpu_of(t: Tensor) -> Gpu:
    """The GPU of ``t``; for tensors on a CPU an H200."""
    return _told(t.get_device()) if t.is_cuda else H200


def shared_memory(t: Tensor) -> int:
    """Bytes of shared memory that one program may use on the GPU of ``t``; without a GPU those of an H200."""
    return gpu_of(t).shared_bytes


def programs(on_h200: int, t: Tensor) -> int:
    """Programs to aim for on the GPU of ``t``: as many per SM as ``on_h200``, the best number on an H200."""
    return max(1, on_h200 * gpu_of(t).processors // H200.processors)


def cluster_blocks(lists: int, t: Tensor) -> int:
    """Blocks of a cluster that share one of ``lists`` lists, a power of two: as many as fill the GPU of ``t`` once."""
    each = max(1, programs(CLUSTERED, t) // lists)
    return min(MOST_BLOCKS, 1 << each.bit_length() - 1)
