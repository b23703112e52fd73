"""A linear layer of a few rows whose weights are indices of a codebook, in CUDA C++: ``codebook.cu`` says how.

Nothing here has been measured yet: forms are those for which registers and counts of instructions look best.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _cuda, _device
from .reference import MAX_ROWS, QuantisedWeight

AMPERE = 8  # compute capability from which on there are the products and copies that the kernel needs
SCALE = 64  # inputs: of fewer, none of a product's inputs would have one scale
LONGEST = 31  # log2 of inputs that share a scale, where all of a row do
TABLE = 256  # pairs of the codebook
NAME = "codebook_linear_kernel"


class Form(NamedTuple):
    """How the kernel is cut.

    Args:
        warps: of a block, which share the inputs: at most, and as few as need no more turns than these.
        tiles: of 16 rows of the weight, that a block has at once.
        split: scales side by side in a product's columns, 1, 2 or 4 (see codebook.cu): of 8, 4 or 2 rows of x.
        parts: loads of a row, one after the other, that a thread has on their way at once.
        ahead: how many times as much is on its way.
        step: words from a line of the table to the next, 32 or 64. 64 take one instruction less for each byte.
        resident: blocks for which the compiler leaves registers on a processor.
        cluster: blocks that share the inputs, too, where there are clusters.
    """

    warps: int
    tiles: int
    split: int
    parts: int
    ahead: int
    step: int = 64
    resident: int = 2
    cluster: int = 1


# By the most rows of x. With 128 registers a thread, 512 threads of a processor have 32 to 64 KB on their way. Shared
# memory is the table's 64 KB, in which the sums have room, and up to 4 KB of a cluster: below the 99 KB of compute
# 8.6, 8.9 and 12.0.
FORMS = {
    2: Form(16, 1, 4, 1, 2, resident=1),
    4: Form(16, 1, 2, 2, 2, resident=1),
    8: Form(16, 2, 1, 2, 2, resident=1),
    16: Form(16, 2, 1, 1, 2, resident=1),
}


def serves(x: Tensor, weight: QuantisedWeight) -> bool:
    """Whether the kernel may take ``x [..., in]`` and ``weight``, as far as can be said before their layout is seen."""
    if weight.codebook is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    return 0 < rows <= MAX_ROWS and _scale_of(weight) is not None and _device_serves(x.get_device())


def multiply(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, out: Tensor, config: Form | None = None) -> bool:
    """``x @ W.T + bias`` to ``out``, where these tensors and this GPU allow it: whether it has been done.

    Args:
        x: ``[rows, in]``, bfloat16 or float16.
        out: ``[rows, out]`` of the same dtype.
        config: replaces the form for so many rows, of which it must have as many.
    """
    codes, scales, codebook = weight
    rows, inputs = x.shape
    outputs = weight.out_features
    if codebook is None or not outputs or not 0 < rows <= MAX_ROWS:
        return False
    scale = _scale_of(weight)
    if scale is None:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or out.dtype != x.dtype or out.shape != (rows, outputs):
        return False
    if inputs != weight.in_features or not all(map(_loads_16_bytes, (x, codes))) or out.stride(1) != 1:
        return False
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (outputs,) or bias.stride(0) != 1):
        return False
    if (scales.shape[1] > 1 and scales.stride(1) != 1) or not codebook.is_contiguous():
        return False
    gpu = _device.gpu_of(x)
    form = config or form_of(rows, outputs, gpu)
    if form.split > 1 and rows > 8 // form.split:
        return False
    if not gpu.cuda_kernels:  # they need clusters
        form = form._replace(cluster=1)
    units = -(-inputs // (SCALE * form.split * form.parts))
    units = -(-units // form.cluster)
    form = form._replace(warps=_warps(units, form.warps))
    kernel = _kernel(x, rows, form, units <= form.warps)
    shared = shared_bytes(rows, form)
    if kernel is None or shared > kernel.shared_bytes:
        return False
    if max(outputs * codes.stride(0), outputs * scales.stride(0)) >= 1 << 32:
        return False
    threads, groups = 32 * form.warps, -(-outputs // (16 * form.tiles))
    # All blocks at once, and each of them with equally many rows of the weight.
    room = max(1, kernel.resident(threads, x, shared) * gpu.processors // form.cluster)
    blocks = -(-groups // -(-groups // room)) * form.cluster
    args = x, x.stride(0), codes, codes.stride(0), scales, scales.stride(0) if scales.shape[0] > 1 else 0, scale
    kernel.launch(
        (blocks, 1), threads, shared, x, *args, codebook, bias, out, out.stride(0), rows, outputs, inputs, blocks
    )
    return True


def shared_bytes(rows: int, form: Form) -> int:
    """Of shared memory: the table, and sums where there is no room for them between its lines."""
    added = 0 if form.step == 64 else 2 * form.warps * (_columns(rows) * 8 // form.split) * 16 * form.tiles
    return 4 * (TABLE * form.step + added)


def _scale_of(weight: QuantisedWeight) -> int | None:
    """log2 of the inputs that share a scale; ``None`` for what the kernel has no way to read."""
    rows, columns = weight.scales.shape
    inputs = weight.in_features
    if rows not in (1, weight.out_features) or inputs % SCALE or not inputs:
        return None
    if columns == 1:
        return LONGEST
    each = -(-inputs // columns)
    return None if each < SCALE or each & (each - 1) else each.bit_length() - 1


def _loads_16_bytes(t: Tensor) -> bool:
    """Whether each row lies in one piece, at a multiple of 16 bytes."""
    return t.stride(1) == 1 and t.data_ptr() % 16 == 0 and (t.shape[0] == 1 or t.stride(0) * t.element_size() % 16 == 0)


@cache
def _device_serves(device: int) -> bool:
    return _cuda.why_not(device, AMPERE) is None


def form_of(rows: int, outputs: int, gpu: _device.Gpu) -> Form:
    """For so many rows of x and of the weight."""
    form = next(form for most, form in FORMS.items() if rows <= most)
    # Rather more blocks than fewer instructions for each byte, where half of the places would be empty.
    few = 2 * outputs < 16 * form.tiles * form.resident * gpu.processors
    return form._replace(tiles=1) if few else form


def _columns(rows: int) -> int:
    """Products of eight columns."""
    return -(-rows // 8)


def _warps(units: int, most: int) -> int:
    """That share so many units: as few as need no more turns than ``most``."""
    turns = -(-units // most)
    return -(-units // turns)


def macros(dtype: torch.dtype, rows: int, form: Form, hold: bool) -> dict[str, int]:
    """Of the kernel for so many rows of x. ``hold``: each warp has inputs of one unit, and holds them."""
    defined = {"THREADS": 32 * form.warps, "TILES": form.tiles, "PARTS": form.parts, "AHEAD": form.ahead}
    defined |= {"SPLIT": form.split, "COLUMNS": _columns(rows), "STEP": form.step, "RESIDENT": form.resident}
    return defined | {"CLUSTER": form.cluster, "HOLD": int(hold), "BFLOAT16": int(dtype == torch.bfloat16)}


def _kernel(x: Tensor, rows: int, form: Form, hold: bool) -> _cuda.Kernel | None:
    return _cuda.load(x, __package__, "codebook.cu", NAME, least=AMPERE, **macros(x.dtype, rows, form, hold))
