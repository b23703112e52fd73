"""Which layout of a block suits token-level reads: key and value of a token side by side, or all keys, then all values?

    python -m benchmarks.probes.kv_layout

Gathers the keys and values of random tokens, D = 128 bf16, from GPU memory and in place from pinned host memory.
Prints the median time of 20 launches and the rate of the useful bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

D, BLOCK = 128, 64


@triton.jit
def gather(src, dst, ids, n, TOGETHER: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    o_d = tl.arange(0, D)
    for i in range(tl.program_id(0) * BN, n, tl.num_programs(0) * BN):
        o_n = i + tl.arange(0, BN)
        m_n = (o_n < n)[:, None]
        b_id = tl.load(ids + o_n, mask=o_n < n, other=0).to(tl.int64)
        if TOGETHER:
            p_k = src + b_id * 2 * D
            p_v = p_k + D
        else:
            p_k = src + (b_id // BLOCK) * (2 * BLOCK * D) + (b_id % BLOCK) * D
            p_v = p_k + BLOCK * D
        b_k = tl.load(p_k[:, None] + o_d[None, :], mask=m_n)
        b_v = tl.load(p_v[:, None] + o_d[None, :], mask=m_n)
        p_out = dst + o_n[:, None] * 2 * D + o_d[None, :]
        tl.store(p_out, b_k, mask=m_n)
        tl.store(p_out + D, b_v, mask=m_n)


def median_us(run) -> float:
    times = []
    for _ in range(23):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[3:])[10]


def measure(where: str, src: torch.Tensor, n: int) -> None:
    ids = torch.randperm(src.numel() // (2 * D), device="cuda")[:n].sort().values.int()
    dst = torch.empty(n * 2 * D, dtype=torch.bfloat16, device="cuda")
    for together in (True, False):

        def launch(grid: int, together: bool = together) -> None:
            gather[(grid,)](src, dst, ids, n, together, BLOCK, D, 16, num_warps=4)

        best = min(median_us(lambda grid=grid: launch(grid)) for grid in (132, 264, 528, 1056))
        name = "side by side" if together else "keys, then values"
        print(f"{where:4} {n:8} tokens, {name:18}: {best:8.1f} us, {n * 2 * D * 2 / best / 1e3:7.1f} GB/s")


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    on_gpu = torch.randn((16 << 20) * 2 * D, dtype=torch.bfloat16, device="cuda")
    for n in (8 << 10, 64 << 10, 1 << 20):
        measure("GPU", on_gpu, n)
    on_host = torch.empty((4 << 20) * 2 * D, dtype=torch.bfloat16, pin_memory=True).fill_(1.0)
    for n in (8 << 10, 64 << 10):
        measure("host", on_host, n)


if __name__ == "__main__":
    main()
