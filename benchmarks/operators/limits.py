"""The rate at which the device reads memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_sparsekv.tuning.timing import captured


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
