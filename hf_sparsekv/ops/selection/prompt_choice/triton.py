"""Which blocks of keys a tile of a prompt's queries attends to: the kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._overlap import begin, launch
from ..._prompts import BLOCK, NEAR, SINKS, TILE


@triton.jit
def _shares(p_row, o_b, m_b):
    """Shares of blocks in a row's mass, by their log-sum-exps; zeros if there is none."""
    b_lse = tl.load(p_row + o_b, mask=m_b, other=float("-inf"))
    top = tl.max(b_lse, 0)
    b_p = tl.exp2(b_lse - tl.where(top == float("-inf"), 0.0, top))
    return b_p / tl.maximum(tl.sum(b_p, 0), 1e-20)


@triton.jit(do_not_specialize=["past", "rows", "nb", "dense_from"])
def prompt_choice_kernel(
    pooled,
    exact,
    mass,
    start,
    only,
    ids,
    counts,
    covered,
    past,
    rows,
    nb,
    dense_from,
    NB: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    NEAR: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The list of one tile and query head."""
    begin(PDL)
    i_row = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if only is not None:  # noqa: SIM102 (Triton would look at both)
        if tl.load(only + i_row) == 0:
            return
    tiles = tl.num_programs(0)
    i_tile = tl.program_id(0)
    i_list = i_row.to(tl.int64) * tiles + i_tile
    first = 0
    if start is not None:
        first = tl.load(start + tl.program_id(2))
    o_at = past + i_tile * BM
    last = past + tl.minimum(i_tile * BM + BM, rows) - 1
    o_b = tl.arange(0, NB)
    own = first // BN
    m_b = (o_b < nb) & (o_b >= own) & (o_b * BN <= last) & (last >= first)
    m_sure = m_b & ((o_b <= (first + SINKS - 1) // BN) | (o_b >= o_at // BN - NEAR))
    wanted = tl.load(mass + i_row)

    b_rows = tl.zeros([NB], tl.float32)
    b_true = tl.zeros([NB], tl.float32)
    back = (o_at // BM) % ROWS
    for i in tl.static_range(ROWS):
        at = o_at + i * STEP + STEP - 1
        m_row = m_b & (at < past + rows) & (at >= first)
        b_share = _shares(exact + (i_list * ROWS + i) * nb, o_b, m_row)  # [NB]
        b_rows += tl.where(i == back, 0.0, b_share)
        b_true += tl.where(i == back, b_share, 0.0)
    b_means = tl.load(pooled + i_list * nb + o_b, mask=m_b, other=0.0)
    b_means = b_means / tl.maximum(tl.sum(b_means, 0), 1e-20)
    b_rows = b_rows / tl.maximum(tl.sum(b_rows, 0), 1e-20)
    b_e = tl.maximum(b_means, b_rows)
    b_e = b_e / tl.maximum(tl.sum(b_e, 0), 1e-20)

    sure = tl.sum(tl.where(m_sure, b_e, 0.0), 0)
    b_free = tl.where(m_b & (m_sure == 0), b_e, 0.0)
    b_bits = b_free.to(tl.int32, bitcast=True)  # ascending as the numbers, which are not negative
    low = 0
    high = 0x3F800001  # above 1
    if (wanted < 1) & (last < dense_from):
        # The least number whose larger ones, with what is sure, do not reach what is wanted.
        for _ in range(31):
            middle = (low + high) // 2
            enough = sure + tl.sum(tl.where(b_bits > middle, b_free, 0.0), 0) >= wanted
            low = tl.where(enough, tl.minimum(middle + 1, high), low)
            high = tl.where(enough, high, middle)
        m_chosen = m_b & (m_sure | (b_bits >= high))
    else:
        m_chosen = m_b

    b_one = m_chosen.to(tl.int32)
    count = tl.sum(b_one, 0)
    p_ids = ids + i_list * nb
    tl.store(p_ids + tl.cumsum(b_one, 0) - 1, o_b, mask=m_chosen)
    tl.store(p_ids + o_b, -1, mask=(o_b >= count) & (o_b < nb))
    tl.store(counts + i_list, count)
    share = tl.sum(tl.where(m_chosen, b_true, 0.0), 0) / tl.sum(b_true, 0)  # 0 / 0: there is no such row
    everything = count == tl.sum(m_b.to(tl.int32), 0)
    tl.store(covered + i_list, tl.where(everything, float("nan"), share))


def prompt_choice(pooled, exact, mass, past, rows, dense_from, start=None, only=None, into=None):
    """As ``reference.prompt_choice``."""
    batch, q_heads, tiles, nb = pooled.shape
    if into is None:
        ids = torch.empty(batch, q_heads, tiles, nb, dtype=torch.int32, device=pooled.device)
        counts = torch.empty(batch, q_heads, tiles, dtype=torch.int32, device=pooled.device)
        into = ids, counts, torch.empty(batch, q_heads, tiles, dtype=torch.float32, device=pooled.device)
    wide, n_exact = triton.next_power_of_2(nb), exact.shape[2] // tiles
    launch(
        prompt_choice_kernel,
        (tiles, q_heads, batch),
        pooled,
        pooled.contiguous(),
        exact.contiguous(),
        mass.contiguous(),
        start,
        only if only is None else only.contiguous().view(torch.uint8),
        *into,
        past,
        rows,
        nb,
        min(dense_from, 2**31 - 1),
        NB=max(16, wide),
        BM=TILE,
        BN=BLOCK,
        ROWS=n_exact,
        STEP=TILE // n_exact,
        NEAR=NEAR,
        SINKS=SINKS,
        num_warps=4 if wide <= 1024 else 8 if wide <= 4096 else 16,
    )
    return into
