"""What a kernel's tiles depend on beside shapes and dtypes: the shared memory that one program may use."""

from __future__ import annotations

from functools import cache

from torch import Tensor

# Bytes of shared memory that one program may use, by compute capability ("CUDA C++ Programming Guide", table of
# technical specifications per compute capability): A100, RTX 30, RTX 40 and L40S, H100 and H200, B200, RTX 50.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@cache
def _of_device(device: int) -> int:
    import triton

    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def shared_memory(t: Tensor) -> int:
    """Bytes of shared memory that one program may use where ``t`` is; without a GPU as many as on an H200."""
    return _of_device(t.get_device()) if t.is_cuda else SHARED[90]
