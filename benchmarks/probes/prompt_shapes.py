"""What the first attention of a new length costs the host: cuDNN's plans.

    python -m benchmarks.probes.prompt_shapes

One layer of an 8B model, bfloat16: milliseconds of the first and of the third call of each length, by torch alone and
by ``exact_attention``; at the end a length that is known, in a new thread.
"""

from __future__ import annotations

import threading
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.types import AttentionParams

HEADS, KV_HEADS, DIM = 32, 8, 128
LENGTHS = [  # queries, columns
    *((8192, 8192), (8001, 8001), (8003, 8003), (7777, 7777), (7778, 7778), (500, 500), (333, 333), (334, 334)),
    *((2048, 6144), (2048, 8192), (2000, 9000), (2001, 9123), (16384, 32768), (16000, 32000), (16128, 32256)),
]


def times(q: int, n: int, run) -> list[float]:
    """Milliseconds of three calls."""
    query = torch.randn(1, q, HEADS, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key, value = torch.randn(2, 1, n, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(query, key, value)
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return found


def ours(query, key, value) -> None:
    exact_attention(query, key, value, AttentionParams(DIM**-0.5))


def torchs(query, key, value) -> None:
    scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@torch.no_grad()
def main() -> None:
    print(f"{'queries':>8} {'columns':>8}   torch first   third    ours first   third  (ms)")
    for q, n in LENGTHS:
        theirs = times(q, n, torchs) if q == n else [float("nan")] * 3
        mine = times(q, n, ours)
        print(f"{q:8} {n:8} {theirs[0]:13.2f} {theirs[2]:7.2f} {mine[0]:13.2f} {mine[2]:7.2f}", flush=True)

    def again() -> None:
        with torch.no_grad():
            print("8192 in a new thread: {0:.2f}, then {2:.2f}".format(*times(8192, 8192, ours)))

    other = threading.Thread(target=again)
    other.start()
    other.join()


if __name__ == "__main__":
    main()
