"""8-bit codes of keys and values: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._codes import encode, scale_of, store_norms
from ..._operands import padded
from ..._overlap import begin, launch

ENTRIES = 4096  # of a tile. Not tuned yet.


@triton.jit
def quantise_kernel(
    p_kv,
    p_codes,
    p_scales,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of ``SIZE`` tokens, ``BT`` at a time."""
    begin(PDL)
    BW: tl.constexpr = padded(WIDTH)
    i_block = tl.program_id(0).to(tl.int64)
    o_w = tl.arange(0, BW)
    m_key, m_value = o_w < SPLIT, (o_w >= SPLIT) & (o_w < WIDTH)
    p_kv += i_block * SIZE * WIDTH
    p_codes += i_block * SIZE * WIDTH
    p_scales += i_block * (2 * SPLIT + SIZE)
    b_centre, b_step = store_norms(p_kv, WIDTH, p_scales, o_w, m_key, SPLIT, SIZE, BT)
    for i in range(0, SIZE, BT):
        o_t = i + tl.arange(0, BT)
        m_t = o_t < SIZE
        m = m_t[:, None] & (o_w < WIDTH)[None, :]
        b_x = tl.load(p_kv + o_t[:, None] * WIDTH + o_w[None, :], mask=m, other=0.0).to(tl.float32)
        b_scale = scale_of(b_x, m_value[None, :], b_x, m_key[None, :])  # [BT]
        b_by = tl.where(m_key[None, :], b_step[None, :], b_scale[:, None])
        b_code = encode(b_x - b_centre.to(tl.float32)[None, :], b_by)
        tl.store(p_codes + o_t[:, None] * WIDTH + o_w[None, :], b_code, mask=m)
        tl.store(p_scales + 2 * SPLIT + o_t, b_scale, mask=m_t)


def quantise(kv, split, *, config=None):
    """As ``reference.quantise``; ``config`` replaces the entries of a tile."""
    kv, (size, width) = kv.contiguous(), kv.shape[-2:]
    codes = torch.empty(kv.shape, dtype=torch.int8, device=kv.device)
    scales = torch.empty(*kv.shape[:-2], 2 * split + size, dtype=torch.float16, device=kv.device)
    at_once = max(1, (config or ENTRIES) // triton.next_power_of_2(width))
    fixed = {"SIZE": size, "WIDTH": width, "SPLIT": split, "BT": min(at_once, triton.next_power_of_2(size))}
    if kv.numel():
        launch(quantise_kernel, (kv.numel() // (size * width),), kv, kv, codes, scales, **fixed)
    return codes, scales
