"""Whether the weights behind a step's attention, brought to the L2 cache beside it, make the step shorter.

    python -m benchmarks.probes.l2_prefetch

Attention is a chain of short kernels in which memory rests. A kernel behind the projection of queries, keys and values
asks for the first bytes of the output projection's weights, and then of the gate and up projection's, to be brought to
the L2 cache (``cp.async.bulk.prefetch.L2``, Hopper and later), and ends. Prints the captured step, median of its
replays in milliseconds, by the bytes asked for; no bytes is the step as it is. Predicted: the output projection of one
row 8.4 to some 5 us a layer, 0.1 ms a step of an 8B model.
"""

from __future__ import annotations

import statistics
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_sparsekv import OffloadedSparseCache, TwoLevelConfig, optimize, unoptimize
from hf_sparsekv.fusion.layers import FusedAttention
from hf_sparsekv.ops._overlap import launch, release, wait

from ..decoding import free, replay_ms
from ..rows import RowSteps, prefilled
from ..shapes import known_config, random_model

PIECE = 8192  # bytes of a request
LANES = 32
SHAPES = ((1, 32 << 10), (1, 128 << 10), (8, 32 << 10))
MEGABYTES = (0, 8, 16, 32, 40, 48)
ROWS = 16  # of a decode step, at most


@triton.jit
def prefetch_kernel(p, n, PIECE: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr):
    """Ask for ``n`` pieces from ``p`` on. Nothing before this kernel writes there, so it waits behind that only."""
    release(PDL)
    o = tl.minimum(tl.program_id(0) * LANES + tl.arange(0, LANES), n - 1).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [p.to(tl.int64) + o * PIECE, tl.full((LANES,), PIECE, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    wait(PDL)


def prefetch(weight: Tensor, nbytes: int) -> int:
    """Ask for the first ``nbytes`` of a weight, or all; gives how many."""
    n = min(nbytes, weight.nbytes) // PIECE
    if n:
        launch(prefetch_kernel, (triton.cdiv(n, LANES),), weight, weight, n, PIECE=PIECE, LANES=LANES, num_warps=1)
    return n * PIECE


def after_projection(nbytes: int, behind: dict):
    """``FusedAttention._projected`` that asks for ``nbytes`` of the weights that come next (``behind`` by module)."""
    original = FusedAttention._projected

    def projected(self, x: Tensor):
        out = original(self, x)
        if x.numel() // x.shape[-1] <= ROWS:
            left = nbytes
            for weight in behind[self]:
                left -= prefetch(weight, left)
        return out

    return original, projected


@torch.no_grad()
def main() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        sys.exit("this needs a Hopper GPU or a later one")
    model = random_model(known_config("qwen3-8b"), torch.bfloat16, torch.device("cuda"))
    model.set_attn_implementation("sparsekv")
    optimize(model)
    behind = {layer.self_attn: weights_behind(layer) for layer in model.model.layers}
    print(f"{'MB':>4}" + "".join(f"{f'{rows} x {n >> 10}k':>12}" for rows, n in SHAPES))
    for mb in MEGABYTES:
        original, FusedAttention._projected = after_projection(mb << 20, behind)
        try:
            found = [step_ms(model, rows, n) for rows, n in SHAPES]
        finally:
            FusedAttention._projected = original
        print(f"{mb:>4}" + "".join(f"{ms:>12.3f}" for ms in found), flush=True)
    unoptimize(model)


def weights_behind(layer: torch.nn.Module) -> list[Tensor]:
    """Of the output projection, and of the MLP's first product, in the order in which they are read."""
    return [layer.self_attn.o_proj.weight, layer.mlp.gate_proj.weight]


def step_ms(model: torch.nn.Module, rows: int, length: int) -> float:
    """Median of the captured step's replays."""
    cache = OffloadedSparseCache(TwoLevelConfig(dense_below=0), None)
    batch = cache.rows(rows, length + 2048)
    for seed in range(rows):
        batch.join(prefilled(model, batch, length, seed))
    step = RowSteps(model, batch)
    for _ in range(8):
        step()
    found = statistics.median(replay_ms(model, cache))
    del step, batch, cache
    free()
    return found


if __name__ == "__main__":
    main()
