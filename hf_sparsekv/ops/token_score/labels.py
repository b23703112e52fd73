"""Scores of all tokens from packed labels in CUDA C++: ``labels.cu`` says how."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product

import torch
from torch import Tensor

from .. import _cuda, _device
from .config import can_use_tensor_cores

THREADS = 128
WIDTHS, MOST_HEADS, LEAST_BLOCK = (16, 32), 16, 16  # bytes of a token's codes, heads of a group, tokens of a block


@dataclass(frozen=True)
class Form:
    """How the kernel goes about it; results are the same.

    Args:
        ahead: tiles of 64 tokens that a warp has on their way, beside the one that it scores.
        together: tokens whose codes share a row of a product: 1, 2 or 4.
        staged: tiles come to shared memory, not to registers.
        resident: blocks for which the compiler leaves registers on a processor, at least.
        even: as many warps as fit share a list, and have as many tiles, or one less; otherwise all have as many.
    """

    ahead: int = 1
    together: int = 1
    staged: bool = False
    resident: int = 1
    even: bool = False

    def macros(self) -> dict[str, int]:
        """What the kernel is compiled with."""
        return {name.upper(): int(value) for name, value in asdict(self).items() if name != "even"}

    def aligned(self, codes: Tensor) -> bool:
        """Whether the codes of a token that a thread loads at once lie where it can."""
        load = min(16, codes.shape[-1] * self.together // 4)
        return all(place % load == 0 for place in (codes.data_ptr(), *codes.stride()[:2]))


# To be timed (`python -m benchmarks operator --sweep long_score`). Tiles of the one left out exceed a block's 48 KB of
# static shared memory where labels are wide. More blocks on a processor where nothing spills then.
FORMS = tuple(Form(*form) for form in product((1, 2, 3), (1, 2, 4), (False, True)) if form != (3, 1, True))
FORMS += Form(1, 1, False, 7), Form(2, 1, False, 5), Form(1, 2, False, 7), Form(2, 2, False, 5)
FORMS += Form(2, 4, True, 5), Form(3, 4, True, 5)
FORMS += Form(even=True), Form(1, 2, False, 7, even=True), Form(2, 4, even=True), Form(3, 2, True, even=True)

USUAL = Form()  # the only one that was measured, before its instructions were fewer: see benchmarks/NOTES.md


def score_all(q, codes, qparams, channels, rows, block_table, reduce, sinks, out, fill, form=USUAL) -> bool:
    """Score, as ``triton.token_score`` does, where these labels and this GPU allow it: whether it has."""
    batch, heads, (size, width) = q.shape[0], codes.shape[1], codes.shape[2:]
    if reduce == "none" or qparams is None or not can_use_tensor_cores(q, codes, qparams, reduce == "mean"):
        return False
    group = q.shape[1] // heads
    if any(t.dtype != kind for t, kind in ((channels, torch.int32), (block_table, torch.int32), (out, torch.float32))):
        return False
    if not batch or width not in WIDTHS or group > MOST_HEADS or size < LEAST_BLOCK or size & (size - 1):
        return False
    if not form.aligned(codes) or max(codes.stride(0), 2 * qparams.stride(0)) >= 1 << 32:
        return False
    kernel = _kernel(q, size, width, group, reduce == "mean", form)
    if kernel is None:
        return False
    pairs = qparams.view(torch.int32)  # scale and zero point are read as one word
    lists, n = batch * heads, block_table.shape[1] * size
    # All at once: a second wave of a few blocks would take as long as the first.
    warps, tiles = THREADS // 32, -(-n // 64)
    blocks = max(1, kernel.resident(THREADS, q) * _device.gpu_of(q).processors // lists)
    if form.even:
        blocks = min(blocks, -(-tiles // warps))
        least, longer = divmod(tiles, warps * blocks)
    else:
        least, longer = -(-tiles // (warps * blocks)), 0
        blocks = -(-tiles // (warps * least))
    args = q, *q.stride(), codes, *codes.stride()[:2], pairs, *pairs.stride()[:2], channels, *channels.stride()[:2]
    args += block_table, block_table.stride(0), out, *out.stride()[:2], rows
    args += heads, n, 64 * least, longer, sinks, fill
    kernel.launch((blocks, lists), THREADS, 0, q, *args)
    return True


def _kernel(q: Tensor, size: int, width: int, group: int, mean: bool, form: Form) -> _cuda.Kernel | None:
    defined = {"THREADS": THREADS, "BLOCK": size, "WIDTH": width, "GROUP": group, "MEAN": int(mean)}
    defined["BFLOAT16"] = int(q.dtype == torch.bfloat16)
    defined |= form.macros()
    return _cuda.load(q, __package__, "labels.cu", "token_score_labels_kernel", **defined)
