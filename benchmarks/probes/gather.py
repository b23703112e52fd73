"""A kernel that copies scattered rows, and the rate that it reaches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_sparsekv.tuning.timing import gbps


@triton.jit
def rows_kernel(src, dst, ids, n, FIRST: tl.constexpr, GAP: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    """Copy the two halves (``D`` values each) of row ``ids``; a block of ``GAP`` rows has its first halves in front.

    ``GAP == 1``: the halves lie side by side. ``FIRST``: values at once.
    """
    for i in range(tl.program_id(0) * BN, n, tl.num_programs(0) * BN):
        o_n = i + tl.arange(0, BN)
        m_n = (o_n < n)[:, None]
        b_id = tl.load(ids + o_n, mask=o_n < n, other=0).to(tl.int64)
        p_k = src + (b_id // GAP) * (2 * GAP * D) + (b_id % GAP) * D
        p_out = dst + o_n.to(tl.int64) * 2 * D
        for d in range(0, D, FIRST):
            o_d = d + tl.arange(0, FIRST)[None, :]
            b_k = tl.load(p_k[:, None] + o_d, mask=m_n)
            b_v = tl.load(p_k[:, None] + GAP * D + o_d, mask=m_n)
            tl.store(p_out[:, None] + o_d, b_k, mask=m_n)
            tl.store(p_out[:, None] + D + o_d, b_v, mask=m_n)


def best_gather(rows: torch.Tensor, n: int, gap: int = 1) -> float:
    """10^9 bytes a second of copying ``n`` random rows of ``rows [.., width]`` (bf16) to the GPU, the best grid's.

    Raises:
        RuntimeError: rows arrived wrong.
    """
    width = rows.shape[1]
    ids = torch.randperm(len(rows), device="cuda")[:n].sort().values.int()
    got = torch.empty(n, width, dtype=rows.dtype, device="cuda")
    half, at_once = width // 2, 16 if width <= 256 else 1

    def launch(grid: int) -> None:
        rows_kernel[(grid,)](rows, got, ids, n, min(half, 2048), gap, half, at_once, num_warps=4)

    best = max(sorted(gbps(got.nbytes, lambda g=grid: launch(g)))[3] for grid in (132, 264, 528, 1056))
    some = torch.randint(n, (64,))
    at = ids.cpu()[some].long()
    halves = rows.view(-1, 2, gap, half)
    wanted = torch.cat((halves[at // gap, 0, at % gap], halves[at // gap, 1, at % gap]), dim=1)
    if not torch.equal(got[some.to(got.device)].cpu(), wanted.cpu()):
        raise RuntimeError("rows arrived wrong")
    return best
