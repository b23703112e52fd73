"""Chunked prefill by cuDNN's kernels: attention of a chunk over its past and over itself, merged exactly.

torch uses cuDNN's kernels for whole prompts only. For a chunk with a past it uses the flash kernels, which reach 60 %
of cuDNN's throughput on a Hopper GPU. Split into past and chunk, both parts have shapes that cuDNN supports. Their
log-sum-exps give the weights of the merge.

cuDNN makes a plan for each new shape and its strides, which takes 55 to 75 ms of host time on an H200. That is as long
as 8k tokens take in all layers of an 8B model, and every thread makes its own plans (benchmarks/NOTES.md). So parts are
padded to a few lengths. A length gets its plan when the flash kernels, which need none, have lost as much time on it as
the plan takes. The flash kernels also take the rest of a past that ends between two lengths.

Keys and values of very long prompts do not stay in the L2 cache between one head's queries. So these are taken in
pieces of as many tokens as stay there, each a chunk with a past.

FlashAttention 4, where it is in use (:mod:`.flash_4`), takes everything at once: it is faster, also than in pieces.

Where torch's flash kernels are FlashAttention 3's (:func:`has_quick_flash`), they are faster than cuDNN's, need no plan
and take a chunk with its past: they get everything.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.attention
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from . import flash_4

LEAST = 512  # least queries over a past; with fewer, several launches and a merge cost more than they save
SHORT = 1024  # most tokens of a prompt for the flash kernels: 500 take 0.05 ms, padded for cuDNN 0.22 ms
LONG = 1 << 28  # pairs with the past; above, the rest that flash takes would cost all layers more than a plan
# Products of queries and keys (all heads and channels) on which the flash kernels lose the 60 ms of a plan: they reach
# 370 TFLOP/s instead of 590. If one layer has a 32nd of these products, its forward pass has nearly all.
PLAN = 1.3e13
LAYERS = 32
# Bytes of a head's keys and values that a launch reads: an H200's L2 cache of 50 MB keeps them for the next queries. A
# prompt of 128k tokens and 128 channels takes 236 ms a layer like this, 248 at once.
PIECE = 1 << 25
MERGED = 1 << 26  # bytes of each float32 copy while two parts are merged: a merge takes 1 % of the time of its parts
GRID = 1024  # tokens: lengths are rounded to this, shorter ones to an eighth of the power of two that they reach
_FINEST = 128

Attend = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]


class _Work(threading.local):
    """Products of each shape that this thread has computed without a plan for it."""

    def __init__(self) -> None:
        self.of: defaultdict[tuple, float] = defaultdict(float)


_work = _Work()


def planned(query: Tensor, key: Tensor, q: int, n: int, causal: bool) -> bool:
    """Whether ``q`` queries over ``n`` keys, lengths on the grid, use a plan in this thread from here on.

    Args:
        query, key: ``[batch, heads, ..., D]``, of the layer.
    """
    work = query.shape[0] * query.shape[1] * query.shape[3] * q * n / (2 if causal else 1)
    kind = query.device, query.dtype, query.shape[:2], key.shape[1], query.shape[3], q, n, causal
    _work.of[kind] += PLAN if work >= PLAN / LAYERS else work
    return _work.of[kind] >= PLAN


def grid(tokens: int) -> int:
    """The multiple to which a length of so many tokens is rounded."""
    return min(GRID, max(_FINEST, (1 << (tokens - 1).bit_length()) // 8))


def piece(key: Tensor, value: Tensor) -> int:
    """Tokens whose keys and values are ``PIECE`` bytes a head, on the grid."""
    return max(1, PIECE // ((key.shape[3] + value.shape[3]) * key.element_size()) // GRID) * GRID


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over two sets of keys from the attention over each.

    Args:
        out, other: ``[batch, Hq, q, Dv]``; ``out`` is overwritten.
        lse, other_lse: float32 ``[batch, Hq, q]``, natural log of the sum of exponentials of the logits.

    Returns:
        ``out``.
    """
    weight = torch.sigmoid(lse - other_lse)[..., None]  # weight of `out`
    rows = max(1, MERGED // (4 * out[:, :, :1].numel()))
    for mine, its, share in zip(out.split(rows, 2), other.split(rows, 2), weight.split(rows, 2), strict=True):
        mine.copy_(torch.lerp(its.float(), mine.float(), share))
    return out


def has_quick_flash() -> bool:
    """Torch's flash kernels are FlashAttention 3's: ``torch.nn.attention.activate_flash_attention_impl("FA3")``."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # from torch 2.11 on
    return current is not None and current() == "FA3"


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether :func:`chunk_attention` is possible for the last ``q`` of ``n`` columns, and faster."""
    past = key.shape[2] - query.shape[2]
    if not query.is_cuda or query.shape[2] < 2 or (past and min(past, query.shape[2]) < LEAST):
        return False
    if torch.cuda.get_device_capability(query.device)[0] < 9 or (torch.is_grad_enabled() and query.requires_grad):
        return False
    grouped = query.shape[1] != key.shape[1]
    parts = [(key, value, True)]
    if past:
        parts = [(key[:, :, past:], value[:, :, past:], True), (key[:, :, :past], value[:, :, :past], False)]
    return all(can_use_cudnn_attention(SDPAParams(query, k, v, None, 0.0, causal, grouped)) for k, v, causal in parts)


def lengths(longest: int) -> list[int]:
    """The lengths of prompts that have plans, up to the one that takes ``longest`` tokens."""
    found, n = [], SHORT
    while n < longest:
        step = grid(n + 1)
        n = -(-(n + 1) // step) * step
        found.append(n)
    return found


def make_plans(query: Tensor, key: Tensor, value: Tensor, longest: int) -> int:
    """Have this thread make the plans of prompts of up to ``longest`` tokens: some 60 ms each on the host.

    Args:
        query, key, value: ``[1, heads, 1, D]`` of the heads, dtype and device of a layer.

    Returns:
        How many were made: none where :func:`chunk_attention` does not serve, or uses none.
    """
    made = 0
    longest = min(longest, piece(key, value) * 3 // 2)
    without = has_quick_flash() or flash_4.serves(query, value)
    for n in [] if without else lengths(longest):
        parts = [t.new_empty(1, n, t.shape[1], t.shape[3]).transpose(1, 2) for t in (query, key, value)]
        if not serves(*parts):
            break
        _cudnn(*parts, True, 1.0)
        kind = query.device, query.dtype, query.shape[:2], key.shape[1], query.shape[3], n, n, True
        _work.of[kind] += PLAN
        made += 1
    return made


def _cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(query.shape[:3])


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Likewise, without a plan. These kernels know one width for keys and values, so narrower ones get zeros."""
    width = max(query.shape[3], value.shape[3])
    wide = [
        t if t.shape[3] == width else torch.nn.functional.pad(t, (0, width - t.shape[3])) for t in (query, key, value)
    ]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*wide, 0.0, causal, False, scale=scale)
    return out if width == value.shape[3] else out[..., : value.shape[3]], lse


def without_plan(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of a prompt to itself, where :func:`serves`, by kernels that need no plan."""
    return _flash(query, key, value, True, scale)[0]


def _padded(t: Tensor, tokens: int) -> Tensor:
    """``t [batch, heads, n, D]`` padded with zeros to ``tokens``; its strides depend on ``tokens`` only."""
    batch, heads, n, dim = t.shape
    strides = (
        tokens * heads * dim,
        dim,
        heads * dim,
        1,
    )  # the layout of projections: no copy where no padding is needed
    if n == tokens and t.stride() == strides:
        return t
    out = t.new_empty(batch, tokens, heads, dim).transpose(1, 2)
    out[:, :, :n], out[:, :, n:] = t, 0
    return out


def chunk_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, attend: Attend = _cudnn, rest: Attend = _flash
) -> Tensor:
    """Causal attention of the last ``q`` columns over all ``n``.

    Args:
        query: ``[batch, Hq, q, D]``, of columns ``n - q .. n - 1``.
        key: ``[batch, H, n, D]``.
        value: ``[batch, H, n, Dv]``.
        attend: ``(query, key, value, causal, scale)`` to output and log-sum-exp, of lengths on the grid.
        rest: likewise, of any lengths; ``causal`` means up to the last key for the last query.

    Returns:
        ``[batch, Hq, q, Dv]``.
    """
    q, n = query.shape[2], key.shape[2]
    past, size = n - q, -(-q // grid(q)) * grid(q)
    if flash_4.serves(query, value):
        return flash_4.causal_attention(query, key, value, scale)
    if (not past and q <= SHORT) or has_quick_flash():
        return rest(query, key, value, True, scale)[0]
    most = piece(key, value)
    if q > most * 3 // 2:
        out = query.new_empty(query.shape[0], q, query.shape[1], value.shape[3]).transpose(1, 2)
        for lo in range(0, q, most):
            hi = min(lo + most, q)
            seen = key[:, :, : past + hi], value[:, :, : past + hi]
            out[:, :, lo:hi] = chunk_attention(query[:, :, lo:hi], *seen, scale, attend, rest)
        return out
    before = past if not past or q * past > LONG else past // grid(past) * grid(past)
    if before and not planned(query, key, size, before, False):
        before = 0
    own = planned(query, key, size, size, True)
    if past and not before:  # one launch instead of two and a merge, which are more than a plan for the rest saves
        return rest(query, key, value, True, scale)[0]
    padded = _padded(query, size) if own or before else query
    found = None
    for first, last, by_plan in ((past, n, own), (0, before, True), (before, past, False)):
        if first == last:
            continue
        part, causal = (key[:, :, first:last], value[:, :, first:last]), first == past
        if by_plan:
            # Padding keys come after the last key, so causality hides them from all queries that count.
            out, lse = attend(padded, *(_padded(t, size if causal else before) for t in part), causal, scale)
            out, lse = out[:, :, :q], lse[:, :, :q]
        else:
            out, lse = rest(query, *part, causal, scale)
        found = (out, lse) if found is None else (merge(out, lse, *found), torch.logaddexp(lse, found[1]))
    return found[0]
