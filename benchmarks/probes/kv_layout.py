"""Which layout of a block suits token-level reads: key and value of a token side by side, or all keys, then all values?

    python -m benchmarks.probes.kv_layout

Gathers the keys and values of random tokens, D = 128 bf16, from GPU memory and in place from pinned host memory.
"""

from __future__ import annotations

import torch

from hf_sparsekv.results import versions

from .gather import best_gather

D, BLOCK = 128, 64


def main() -> None:
    print(torch.cuda.get_device_name(), versions())
    on_gpu = torch.randn(16 << 20, 2 * D, dtype=torch.bfloat16, device="cuda")
    on_host = torch.empty(4 << 20, 2 * D, dtype=torch.bfloat16, pin_memory=True).fill_(1.0)
    for where, rows, counts in (("GPU", on_gpu, (8 << 10, 64 << 10, 1 << 20)), ("host", on_host, (8 << 10, 64 << 10))):
        for n in counts:
            for name, gap in (("side by side", 1), ("keys, then values", BLOCK)):
                print(f"{where:4} {n:8} tokens, {name:18}: {best_gather(rows, n, gap):7.1f} GB/s")


if __name__ == "__main__":
    main()
