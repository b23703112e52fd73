"""A linear layer for a few rows whose weights are bytes for a lookup table, in CUDA C++; ``lookup.cu`` explains it."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _cuda, _device
from .reference import FP8, MAX_ROWS, QuantisedWeight

AMPERE = 8  # least compute capability with the products and copies that the kernel needs
SCALE = 64  # least inputs per scale: with fewer, one product would span several scales
LONGEST = 31  # log2 of the inputs per scale if a whole row shares one
SHARED = 256 * 64 * 4  # bytes: 256 entries for each of 32 banks, and as much between them for sums
CODEBOOK, INT8, E4M3 = range(3)  # kinds of bytes
NAME = "lookup_linear_kernel"


class Form(NamedTuple):
    """Launch parameters of the kernel.

    Args:
        warps: most warps of a block, which share the inputs; fewer are used if they need no more turns.
        tiles: tiles of 16 rows of the weight that a block has at once.
        split: scales side by side in a product's columns, 1, 2 or 4 (see lookup.cu), for 8, 4 or 2 rows of x.
        parts: consecutive loads of a row that a thread has in flight at once.
        ahead: multiple of that which is prefetched.
        resident: thread blocks per SM for which the compiler leaves registers.
    """

    warps: int
    tiles: int
    split: int
    parts: int
    ahead: int
    resident: int = 2


# By the most rows of x, for 4 and for 8 bits. With 128 registers a thread, 512 threads of an SM have 32 to 64 KB in
# flight. The table takes 64 KB of shared memory, with room for the sums, below the 99 KB of compute 8.6, 8.9 and 12.0.
# 4 bits were measured on an H200 with an 8B model's layers (benchmarks/NOTES.md): all seven take 53 us
# with one row, 63 us with 8 rows. More warps, tiles or prefetched loads, and clusters, take up to half more.
FORMS_4_BITS = {
    4: Form(8, 1, 2, 2, 2),
    8: Form(16, 2, 1, 2, 1, resident=1),
    16: Form(16, 2, 1, 1, 2, resident=1),
}
FORMS_8_BITS = {
    8: Form(16, 2, 1, 1, 2, resident=1),
    16: Form(16, 1, 1, 1, 2, resident=1),
}


def serves(x: Tensor, weight: QuantisedWeight) -> bool:
    """Whether the kernel supports ``weight`` and ``x [..., in]``, once ``x`` is :func:`aligned`."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    if not 0 < rows <= MAX_ROWS or not _is_laid_out(weight) or _scales_of(weight) is None:
        return False
    return _device_serves(x.get_device()) and _prepared(x, rows, weight, None) is not None


def multiply(x: Tensor, weight: QuantisedWeight, bias: Tensor | None, out: Tensor, config: Form | None = None) -> bool:
    """Write ``x @ W.T + bias`` to ``out`` if these tensors and this GPU allow it; returns whether it has.

    Args:
        x: ``[rows, in]``, bfloat16 or float16.
        out: ``[rows, out]`` of the same dtype.
        config: replaces the form for this number of rows, and must allow as many rows.
    """
    codes, scales, codebook = weight
    rows, inputs = x.shape
    outputs = weight.out_features
    if not outputs or not 0 < rows <= MAX_ROWS:
        return False
    shared_by = _scales_of(weight)
    if shared_by is None:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or out.dtype != x.dtype or out.shape != (rows, outputs):
        return False
    if inputs != weight.in_features or not _loads_16_bytes(x) or not _is_laid_out(weight) or out.stride(1) != 1:
        return False
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (outputs,) or bias.stride(0) != 1):
        return False
    prepared = _prepared(x, rows, weight, config)
    if prepared is None:
        return False
    kernel, form = prepared
    threads, groups = 32 * form.warps, -(-outputs // (16 * form.tiles))
    # All blocks at once, and each of them with equally many rows of the weight.
    room = max(1, kernel.resident(threads, x, SHARED) * _device.gpu_of(x).processors)
    blocks = -(-groups // -(-groups // room))
    args = x, x.stride(0), codes, codes.stride(0), scales, scales.stride(0) if scales.shape[0] > 1 else 0, *shared_by
    kernel.launch(
        (blocks, 1), threads, SHARED, x, *args, codebook, bias, out, out.stride(0), rows, outputs, inputs, blocks
    )
    return True


def _prepared(x: Tensor, rows: int, weight: QuantisedWeight, config: Form | None) -> tuple[_cuda.Kernel, Form] | None:
    """The kernel for so many rows of ``x``'s dtype and its form, where it can run."""
    kind = _kind(weight)
    form = config or form_of(rows, weight.out_features, kind, _device.gpu_of(x))
    if form.split > 1 and rows > 8 // form.split:
        return None
    units = -(-weight.in_features // (SCALE * form.split * form.parts))
    form = form._replace(warps=_warps(units, form.warps))
    kernel = _kernel(x, rows, kind, form, units <= form.warps)
    return None if kernel is None or kernel.shared_bytes < SHARED else (kernel, form)


def aligned(x: Tensor) -> Tensor:
    """``x [rows, in]``, or a copy that the kernel can load."""
    return x if _loads_16_bytes(x) else x.clone(memory_format=torch.contiguous_format)


def _scales_of(weight: QuantisedWeight) -> tuple[int, int] | None:
    """log2 of the rows and of the inputs that share a scale; ``None`` if the kernel cannot read the scales."""
    inputs = weight.in_features
    if inputs % SCALE or not inputs:
        return None
    found = []
    for blocks, each, least in zip(weight.scales.shape, weight.block, (1, SCALE)):
        if blocks > 1 and (each < least or each & (each - 1)):
            return None
        found.append(LONGEST if blocks == 1 else each.bit_length() - 1)
    return found[0], found[1]


def _kind(weight: QuantisedWeight) -> int:
    """Kind of the bytes: see lookup.cu."""
    if weight.codebook is not None:
        return CODEBOOK
    return E4M3 if weight.codes.dtype == FP8 else INT8


def _is_laid_out(weight: QuantisedWeight) -> bool:
    """Whether the kernel can load these tensors."""
    codes, scales, codebook = weight
    if not _loads_16_bytes(codes) or not (codebook is None or codebook.is_contiguous()):
        return False
    if scales.shape[1] > 1 and scales.stride(1) != 1:
        return False
    return max(codes.shape[0] * codes.stride(0), scales.shape[0] * scales.stride(0)) < 1 << 32


def _loads_16_bytes(t: Tensor) -> bool:
    """Whether each row is contiguous and begins at a multiple of 16 bytes."""
    return t.stride(1) == 1 and t.data_ptr() % 16 == 0 and (t.shape[0] == 1 or t.stride(0) * t.element_size() % 16 == 0)


@cache
def _device_serves(device: int) -> bool:
    return _cuda.why_not(device, AMPERE) is None


def form_of(rows: int, outputs: int, kind: int, gpu: _device.Gpu) -> Form:
    """Launch parameters for these numbers of rows of x and of the weight."""
    forms = FORMS_4_BITS if kind == CODEBOOK else FORMS_8_BITS
    form = next(form for most, form in forms.items() if rows <= most)
    # Rather more blocks than fewer instructions for each byte, where half of the places would be empty.
    few = 2 * outputs < 16 * form.tiles * form.resident * gpu.processors
    return form._replace(tiles=1, ahead=2) if few else form


def _columns(rows: int) -> int:
    """Products of eight columns."""
    return -(-rows // 8)


def _warps(units: int, most: int) -> int:
    """Warps that share ``units`` units: the fewest that need no more turns than ``most``."""
    turns = -(-units // most)
    return -(-units // turns)


def macros(dtype: torch.dtype, rows: int, kind: int, form: Form, hold: bool) -> dict[str, int]:
    """Macros of the kernel for ``rows`` rows of x. ``hold``: each warp has inputs of one unit, and holds them."""
    defined = {"THREADS": 32 * form.warps, "TILES": form.tiles, "PARTS": form.parts, "AHEAD": form.ahead}
    defined |= {"SPLIT": form.split, "COLUMNS": _columns(rows), "RESIDENT": form.resident}
    return defined | {"KIND": kind, "HOLD": int(hold), "BFLOAT16": int(dtype == torch.bfloat16)}


def _kernel(x: Tensor, rows: int, kind: int, form: Form, hold: bool) -> _cuda.Kernel | None:
    return _cuda.load(x, __package__, "lookup.cu", NAME, least=AMPERE, **macros(x.dtype, rows, kind, form, hold))
