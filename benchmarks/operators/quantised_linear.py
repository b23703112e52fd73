"""Linear layers of an 8B model with weights in 8 or 4 bits, for few rows: tiles of the kernel, and 16 bits beside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hf_sparsekv.ops.layers.quantised_linear import QuantisedWeight, dequantise, lookup, quantised_linear
from hf_sparsekv.ops.layers.quantised_linear.lookup import Form
from hf_sparsekv.ops.layers.quantised_linear.reference import FP8
from hf_sparsekv.ops.layers.quantised_linear.triton import Tile
from hf_sparsekv.ops.layers.quantised_linear.triton import quantised_linear as by_triton
from hf_sparsekv.ops.layers.small_linear import small_linear

from ..report import Report
from .sweep import Variant, compare, tile_name

NAME = "quantised_linear"
CASE = "qwen3-8b"
ROWS = (1, 8)
LAYERS = {"kv": (1024, 4096), "q_out": (4096, 4096), "gate_up": (12288, 4096), "down": (4096, 12288)}  # rows, inputs
READ = 300e6  # bytes of weights, several sets of them: what is read comes from memory
GROUP = 64  # inputs that share a scale, of 4 bits
BLOCK = 128  # rows and inputs, of 8-bit floats by blocks

TILES = tuple(
    Tile(*one)
    for one in (
        *((2, 4096, 1, 4), (4, 2048, 1, 4), (4, 2048, 1, 8), (4, 4096, 1, 8), (8, 2048, 1, 8), (8, 1024, 1, 4)),
        *((1, 4096, 1, 4), (4, 4096, 1, 8, 64)),
    )
)
# Of 4 bits: for one row of inputs, and for up to eight.
FORMS_ONE_ROW = (
    *(Form(8, 1, 4, 1, ahead) for ahead in (1, 2, 3)),
    *(Form(16, 1, 4, 1, 2, resident=1), Form(16, 2, 4, 1, 1, resident=1), Form(16, 1, 2, 2, 2, resident=1)),
    Form(8, 1, 2, 2, 2),
)
FORMS = (
    *(Form(16, 2, 1, parts, ahead, resident=1) for parts in (1, 2) for ahead in (1, 2)),
    *(Form(16, 1, 1, 2, 2, resident=1), Form(8, 2, 1, 2, 2), Form(8, 1, 1, 2, 3)),
)
# Of 8 bits.
FORMS_8_BITS = (
    *(Form(16, 2, 1, 1, ahead, resident=1) for ahead in (1, 2)),
    *(Form(16, 1, 1, 1, ahead, resident=1) for ahead in (2, 3)),
    *(Form(16, 1, 1, 2, 2, resident=1), Form(8, 2, 1, 1, 2), Form(8, 1, 1, 2, 2)),
)


def in_8_bits(n: int, k: int, dtype: torch.dtype, scales: tuple[int, int], device: torch.device) -> QuantisedWeight:
    """Random codes, all of them as likely as another, or as of a normal distribution."""
    if dtype == torch.int8:
        codes = torch.randint(-127, 128, (n, k), dtype=dtype, device=device)
    else:
        codes = (100 * torch.randn(n, k, device=device)).clamp(-448, 448).to(dtype)  # beyond, they are no numbers
    return QuantisedWeight(codes, (0.5 + torch.rand(scales, device=device)) / (100 * k**0.5))


def in_4_bits(n: int, k: int, device: torch.device) -> QuantisedWeight:
    """Random indices of a codebook of equal steps."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    scales = (0.5 + torch.rand(n, k // GROUP, device=device)) / k**0.5
    return QuantisedWeight(codes, scales, torch.linspace(-1, 1, 16, device=device))


# format -> a weight of these rows and inputs
FORMATS: dict[str, Callable[[int, int, torch.device], QuantisedWeight]] = {
    "4bit": in_4_bits,
    "int8": lambda n, k, device: in_8_bits(n, k, torch.int8, (n, 1), device),
    "fp8": lambda n, k, device: in_8_bits(n, k, FP8, (n, 1), device),
    "fp8_blocks": lambda n, k, device: in_8_bits(n, k, FP8, (n // BLOCK, k // BLOCK), device),
}


def tiles(rows: int, weight: QuantisedWeight) -> tuple[Tile, ...]:
    """Of Triton's kernel, for one row of 8 bits."""
    return TILES if rows == 1 and weight.codebook is None else ()


def forms(rows: int, weight: QuantisedWeight) -> tuple[Form, ...]:
    """Of the kernel that looks codes up."""
    if weight.codebook is None:
        return FORMS_8_BITS if rows > 1 else ()
    return FORMS if rows > 1 else FORMS_ONE_ROW


def ways(weights: list[QuantisedWeight], plain: list[Tensor], xs: list[Tensor]) -> list[Variant]:
    """Today's kernel first; ``small_linear`` over the same weights in 16 bits, ``plain``; other tiles and forms."""
    out = [torch.empty(len(x), w.out_features, dtype=x.dtype, device=x.device) for x, w in zip(xs, weights)]

    def usual(i: int) -> None:
        out[i] = quantised_linear(xs[i], weights[i])

    def in_16_bits(i: int) -> None:
        out[i] = small_linear(xs[i], plain[i])

    def tiled(i: int, config: Tile) -> None:
        out[i] = by_triton(xs[i], weights[i], None, config)

    def formed(i: int, config: Form) -> None:
        if not lookup.multiply(xs[i], weights[i], None, out[i], config):
            raise RuntimeError("it does not serve here")

    found: list[Variant] = [("usual", usual, lambda: out[0]), ("16 bits", in_16_bits, lambda: out[0])]
    for tile in tiles(len(xs[0]), weights[0]):
        found.append((tile_name(tile), partial(tiled, config=tile), lambda: out[0]))
    for form in forms(len(xs[0]), weights[0]):
        name = ",".join(f"{field}={value}" for field, value in form._asdict().items())
        found.append((name, partial(formed, config=form), lambda: out[0]))
    return found


def kept_bytes(weight: QuantisedWeight) -> int:
    """Of codes and scales."""
    return weight.codes.nbytes + weight.scales.nbytes


def measure(report: Report, name: str, weights: list[QuantisedWeight], xs: list[Tensor], rate: float) -> None:
    """All ways of one layer, each compared with the first, beside the bound by ``rate`` bytes a second."""
    plain = [dequantise(weight).to(xs[0].dtype) for weight in weights]
    with report.measuring(len(xs[0]), 0, f"limit:{name}"):
        report.add(f"{name}_us", 1e6 * kept_bytes(weights[0]) / rate, "us")
    compare(report, ways(weights, plain, xs), len(weights), len(xs[0]), NAME, name)


def sweep(report: Report, device: torch.device, rate: float) -> None:
    """All formats and layers at 1 and 8 rows."""
    report.case = CASE
    for form, make in FORMATS.items():
        for layer, (n, k) in LAYERS.items():
            first = make(n, k, device)
            weights = [first, *(make(n, k, device) for _ in range(1 + int(READ / kept_bytes(first))))]
            for rows in ROWS:
                xs = [torch.randn(rows, k, dtype=torch.bfloat16, device=device) for _ in weights]
                measure(report, f"{form}:{layer}", weights, xs, rate)
            del first, weights
            torch.cuda.empty_cache()
