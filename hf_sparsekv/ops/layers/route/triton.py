"""Route tokens to experts: the kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._dispatch import require_dense_rows
from ..._operands import Table, operand, padded
from ..._overlap import begin, launch
from .reference import LOWEST as _LOWEST
from .reference import MAX_TOKENS, SCORES

LOWEST = tl.constexpr(_LOWEST)
EXPERTS, INPUTS, WARPS = 2, 2048, 8  # a program of the product, a step of its loop. Not measured yet.


@triton.jit
def route_logits_kernel(
    x,
    weight,
    p_bias,
    p_logits,
    experts,
    d,
    BE: tl.constexpr,
    BD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits of ``BE`` experts for one token."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    o_e, o_d = tl.program_id(1) * BE + tl.arange(0, BE), tl.arange(0, BD)
    p_row = weight.ptr + o_e.to(tl.int64)[:, None] * weight.row
    b_sum = tl.zeros([BE, BD], tl.float32)
    for d_0 in range(0, d, BD):
        m_d = d_0 + o_d < d
        b_w = tl.load(p_row + (d_0 + o_d)[None, :], mask=(o_e < experts)[:, None] & m_d[None, :], other=0.0)
        b_x = tl.load(x.ptr + token * x.row + d_0 + o_d, mask=m_d, other=0.0)  # [BD]
        b_sum += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
    b_logits = tl.sum(b_sum, 1)
    if p_bias is not None:
        b_logits += tl.load(p_bias + o_e, mask=o_e < experts, other=0.0).to(tl.float32)
    tl.store(p_logits + token * experts + o_e, b_logits.to(p_logits.dtype.element_ty), mask=o_e < experts)


@triton.jit
def route_choose_kernel(
    p_logits,
    p_bias,
    p_weights,
    p_index,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCORES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The experts of one token."""
    begin(PDL)
    BE: tl.constexpr = padded(E, 1)
    BK: tl.constexpr = padded(K, 1)
    token = tl.program_id(0).to(tl.int64)
    o_e, o_k = tl.arange(0, BE), tl.arange(0, BK)
    m_e = o_e < E
    b_score = tl.load(p_logits + token * E + o_e, mask=m_e, other=float("-inf")).to(tl.float32)  # [BE]
    b_choice = b_score
    if SCORES == "sigmoid":
        b_score = tl.sigmoid(b_score)
        b_choice = b_score
        if p_bias is not None:
            b_choice += tl.load(p_bias + o_e, mask=m_e, other=0.0).to(tl.float32)
    elif SCORES == "softmax":
        b_score = tl.exp(b_score - tl.max(b_score, 0))
        b_score = b_score / tl.sum(b_score, 0)
    b_choice = tl.where(m_e, tl.maximum(b_choice, LOWEST), float("-inf"))  # (NaN becomes LOWEST)
    if TOP_GROUPS < GROUPS:
        o_g = o_e // (E // GROUPS)  # the group of each expert
        b_best = tl.full([BE], float("-inf"), tl.float32)  # rank value of its group
        for g in tl.static_range(GROUPS):
            b_mine = tl.where(m_e & (o_g == g), b_choice, float("-inf"))
            first = tl.max(b_mine, 0)
            worth = first
            if E > GROUPS:
                at = tl.argmax(b_mine, 0)
                worth = first + tl.max(tl.where(o_e == at, float("-inf"), b_mine), 0)
            b_best = tl.where(m_e & (o_g == g), worth, b_best)
        b_kept = o_e < 0
        for _ in tl.static_range(TOP_GROUPS):
            at = tl.argmax(b_best, 0)  # the first expert of the best group that is left
            b_now = o_g == at // (E // GROUPS)
            b_kept = b_kept | b_now
            b_best = tl.where(b_now, float("-inf"), b_best)
        b_choice = tl.where(b_kept, b_choice, float("-inf"))
    b_index = tl.zeros([BK], tl.int32)
    b_weight = tl.zeros([BK], tl.float32)
    for i in tl.static_range(K):
        at = tl.argmax(b_choice, 0)
        b_index = tl.where(o_k == i, at, b_index)
        b_weight = tl.where(o_k == i, tl.sum(tl.where(o_e == at, b_score, 0.0), 0), b_weight)
        b_choice = tl.where(o_e == at, float("-inf"), b_choice)
    if SCORES == "softmax_chosen":
        b_shifted = tl.where(o_k < K, b_weight, float("-inf"))
        b_weight = tl.exp(b_shifted - tl.max(b_shifted, 0))
        b_weight = b_weight / tl.sum(b_weight, 0)
    if NORMALISE:
        b_weight = b_weight / (tl.sum(b_weight, 0) + 1e-20)
    tl.store(p_weights + token * K + o_k, (b_weight * scale).to(p_weights.dtype.element_ty), mask=o_k < K)
    tl.store(p_index + token * K + o_k, b_index.to(tl.int64), mask=o_k < K)


def route(x, weight, bias, top_k, *, groups=1, top_groups=1, normalise=False, scale=1.0, scores="sigmoid"):
    """As ``reference.route``, of at most ``MAX_TOKENS`` tokens."""
    tokens, d = x.shape
    experts = weight.shape[0]
    if tokens > MAX_TOKENS:
        raise ValueError(f"at most {MAX_TOKENS} tokens, got {tokens}")
    if scores not in SCORES:
        raise ValueError(f"scores must be one of {SCORES}, got {scores!r}")
    require_dense_rows(x=x, weight=weight, bias=bias)
    dtype = torch.float32 if scores == "sigmoid" else x.dtype
    logits = torch.empty(tokens, experts, dtype=dtype, device=x.device)
    weights = torch.empty(tokens, top_k, dtype=dtype, device=x.device)
    index = torch.empty(tokens, top_k, dtype=torch.int64, device=x.device)
    if not tokens:
        return logits, weights, index
    grid, args = (tokens, triton.cdiv(experts, EXPERTS)), (operand(Table, x), operand(Table, weight))
    width = min(INPUTS, triton.next_power_of_2(d))
    added, chosen_by = (None, bias) if scores == "sigmoid" else (bias, None)
    launch(route_logits_kernel, grid, x, *args, added, logits, experts, d, BE=EXPERTS, BD=width, num_warps=WARPS)
    fixed = {"E": experts, "K": top_k, "GROUPS": groups, "TOP_GROUPS": top_groups, "NORMALISE": normalise}
    fixed["SCORES"] = scores
    warps = 1 if experts <= 128 else 4
    launch(route_choose_kernel, (tokens,), x, logits, chosen_by, weights, index, float(scale), **fixed, num_warps=warps)
    return logits, weights, index
