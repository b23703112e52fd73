"""8-bit codes of keys and values: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._codes import encode, scale_of
from ..._operands import padded
from ..._overlap import begin, launch

ENTRIES = 4096  # of a tile. Not tuned yet.


@triton.jit(do_not_specialize=["n"])
def quantise_kernel(
    p_kv, p_codes, p_scales, n, WIDTH: tl.constexpr, SPLIT: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr
):
    """``BT`` of ``n`` tokens."""
    begin(PDL)
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_w = tl.arange(0, padded(WIDTH))
    m_t = o_t < n
    m = m_t[:, None] & (o_w < WIDTH)[None, :]
    at = o_t[:, None] * WIDTH + o_w[None, :]
    b_x = tl.load(p_kv + at, mask=m, other=0.0)  # [BT, BW]
    is_first = (o_w < SPLIT)[None, :]
    b_first, b_second = scale_of(b_x, is_first), scale_of(b_x, o_w[None, :] >= SPLIT)
    tl.store(p_codes + at, encode(b_x, tl.where(is_first, b_first[:, None], b_second[:, None])), mask=m)
    tl.store(p_scales + 2 * o_t, b_first, mask=m_t)
    tl.store(p_scales + 2 * o_t + 1, b_second, mask=m_t)


def quantise(kv, split, *, config=None):
    """As ``reference.quantise``; ``config`` replaces the entries of a tile."""
    kv, width = kv.contiguous(), kv.shape[-1]
    codes = torch.empty(kv.shape, dtype=torch.int8, device=kv.device)
    scales = torch.empty(*kv.shape[:-1], 2, dtype=torch.float16, device=kv.device)
    n = scales.numel() // 2
    tile = max(1, (config or ENTRIES) // triton.next_power_of_2(width))
    if n:
        launch(quantise_kernel, (triton.cdiv(n, tile),), kv, kv, codes, scales, n, WIDTH=width, SPLIT=split, BT=tile)
    return codes, scales
