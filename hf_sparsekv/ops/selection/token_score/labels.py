"""Scores of all tokens from packed labels in CUDA C++; ``labels.cu`` explains the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _cuda, _device
from ..._cuda import float_bits
from ..._operands import label_rows
from ..partial_sums import PARTS, PartialSums
from .config import has_whole_words

THREADS = 128
MOST_HEADS = {16: 16, 32: 16, 64: 20}  # bytes of a token's codes -> heads of a group; more would spill
LEAST_BLOCK = 16  # tokens
MOST_SUMMED, MOST_CHANNELS = 8, 256  # heads of a group, channels of a key: queries of sums are held in registers
LOAD = 16  # bytes of a token's codes at most; half of them where they are few


def score_all(q, codes, qparams, channels, rows, block_table, reduce, sinks, norms, out, fill, sums=None) -> bool:
    """Score as ``triton.token_score`` does, if these labels and this GPU allow it; returns whether it has."""
    batch, heads, (size, width) = q.shape[0], codes.shape[1], codes.shape[2:]
    if not has_whole_words(q, codes, qparams):
        return False
    group = q.shape[1] // heads
    if any(t.dtype != kind for t, kind in ((channels, torch.int32), (block_table, torch.int32), (out, torch.float32))):
        return False
    if not batch or group > MOST_HEADS.get(width, 0) or size < LEAST_BLOCK or size & (size - 1):
        return False
    # A load is of 8 or 16 bytes, and must be aligned. Triton's kernels read words.
    if any(place % min(width // 2, LOAD) for place in (codes.data_ptr(), *codes.stride()[:2])):
        return False
    if max(codes.stride(0), 2 * qparams.stride(0)) >= 1 << 32:
        return False
    if sums is not None and not _adds_up(q, group, reduce, sums):
        sums = None
    kernel = _kernel(q, size, width, group, reduce, sums is not None)
    if kernel is None:
        return False
    pairs = qparams.view(torch.int32)  # scale and zero point are read as one word
    lists, n = batch * heads, block_table.shape[1] * size
    # All at once: a second wave of a few blocks would take as long as the first.
    warps, tiles = THREADS // 32, -(-n // 64)
    blocks = max(1, kernel.resident(THREADS, q) * _device.gpu_of(q).processors // lists)
    each = -(-tiles // (warps * blocks))  # of a warp
    blocks = -(-tiles // (warps * each))
    own = label_rows(channels, norms)
    assert own is not None
    args = q, *q.stride(), codes, *codes.stride()[:2], pairs, *pairs.stride()[:2], *own
    args += block_table, block_table.stride(0), out, *out.stride()[:2], rows
    args += heads, n, 64 * each, sinks, fill
    if sums is not None:
        near = sums.recent_kv
        sums.parts = torch.empty(lists, blocks, group, PARTS, 2, dtype=torch.float32, device=q.device)
        args += sums.parts, near, *near.stride()[:3], sums.stored, near.shape[2] - sinks, float_bits(sums.scale)
    kernel.launch((blocks, lists), THREADS, 0, q, *args)
    return True


def _adds_up(q: Tensor, group: int, reduce: str, sums: PartialSums) -> bool:
    """Whether there is a kernel that makes these sums."""
    near = sums.recent_kv
    fits = group <= MOST_SUMMED and q.shape[-1] <= MOST_CHANNELS and sums.scale > 0 and reduce == "none"
    return fits and near.dtype == q.dtype and near.stride(3) == 1 and q.stride(2) == 1


def _kernel(q: Tensor, size: int, width: int, group: int, reduce: str, sums: bool) -> _cuda.Kernel | None:
    defined = {"THREADS": THREADS, "BLOCK": size, "WIDTH": width, "GROUP": group}
    defined |= {"MEAN": int(reduce == "mean"), "EACH_QUERY": int(reduce == "none")}
    defined |= {
        "BFLOAT16": int(q.dtype == torch.bfloat16),
        "RESIDENT": _resident(size, width, 1 if reduce == "mean" else group, (reduce == "none") + sums),
    }
    if sums:
        defined |= {"SUMS": 1, "DIM": q.shape[2]}
    return _cuda.load(q, __package__, "labels.cu", "token_score_labels_kernel", **defined)


def _resident(size: int, width: int, vectors: int, more: int) -> int:
    """Least number of thread blocks per SM that the compiler must leave registers for, such that none spill.

    7 are 1 to 3 % faster than the compiler's choice of 5 (H200, blocks of 64 tokens, four heads). With small blocks a
    thread holds more addresses, with wide codes or many ``vectors`` (queries) more numbers; the latter two are left to
    the compiler. ``more``: scores of each query take more addresses, and sums more numbers.
    """
    if width > 16 or vectors > 4:
        return 1
    return (7 if size >= 64 else 6) - more
