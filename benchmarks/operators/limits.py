"""What sparse attention has to beat: the rate at which the device reads memory, and dense attention of torch.

Over latents that is torch's attention over them, and what transformers does:

* absorbed: one KV head, keys are the rows, values their beginning (DeepSeek-V2, section 2.1), by any backend that takes
  heads 576 wide.
* expanded: every step multiplies all latents with ``kv_b_proj`` and attends to what comes out, head by head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from hf_sparsekv.tuning.layer_step import Shape
from hf_sparsekv.tuning.timing import Time, captured

from ..baselines import NotRun

HEADS = {20: (192, 256), 128: (128, 128)}  # GLM-4.7-Flash, DeepSeek-V3: key channels without position, value channels
MOST = 24 << 30  # bytes that the expanded keys and values may take


def _rows(shape: Shape, device: torch.device, sets: int) -> list[torch.Tensor]:
    return [torch.randn(shape.batch, 1, shape.length, shape.dim, dtype=shape.dtype, device=device) for _ in range(sets)]


def absorbed(shape: Shape, device: torch.device) -> dict[str, Time]:
    """Times by backend; what does not run is left out."""
    rows = _rows(shape, device, 3)
    query = torch.randn(shape.batch, 1, shape.q_heads, shape.dim, dtype=shape.dtype, device=device)
    scale, found = shape.dim**-0.5, {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        for width in (shape.value_dim, shape.dim):  # values that are wider than need be, where widths must be equal

            def run(i: int, width=width) -> None:
                # Without a mask the heads of one KV head may go as its queries.
                scaled_dot_product_attention(query, rows[i], rows[i][..., :width], scale=scale)

            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    found[f"{name.split('_')[0].lower()}{'' if width == shape.value_dim else ':wide'}"] = captured(
                        run, len(rows), repetitions=4
                    )
                break
            except RuntimeError:
                torch.cuda.synchronize()
    return found


def expanded(shape: Shape, device: torch.device) -> Time:
    """The product with ``kv_b_proj`` and attention over expanded keys and values.

    Raises:
        NotRun: these heads are no known model's, or memory does not suffice.
    """
    if shape.q_heads not in HEADS:
        raise NotRun(f"the channels of {shape.q_heads} expanded heads are not known")
    nope, value = HEADS[shape.q_heads]
    rope, heads = shape.dim - shape.value_dim, shape.q_heads
    size = shape.batch * shape.length * heads * (2 * nope + rope + 2 * value) * shape.dtype.itemsize
    if size > MOST:
        raise NotRun(f"expanded keys and values of {shape.batch} x {shape.length} take {size / 1e9:.0f} GB")
    rows = _rows(shape, device, 2)
    weight = (
        torch.randn(heads * (nope + value), shape.value_dim, dtype=shape.dtype, device=device) / shape.value_dim**0.5
    )
    query = torch.randn(shape.batch, heads, 1, nope + rope, dtype=shape.dtype, device=device)

    def run(i: int) -> None:
        # As transformers' expand_kv does.
        both = linear(rows[i][:, 0, :, : shape.value_dim], weight).view(shape.batch, -1, heads, nope + value)
        k, v = both.transpose(1, 2).split([nope, value], dim=-1)
        k = torch.cat((k, rows[i][..., shape.value_dim :].expand(*k.shape[:-1], -1)), dim=-1)
        scaled_dot_product_attention(query, k, v)

    return captured(run, len(rows), repetitions=2, replays=10)


@triton.jit
def _read_kernel(p_in, p_out, size, BN: tl.constexpr):
    """Read everything once and keep what the compiler cannot leave out."""
    b_sum = tl.zeros([BN], tl.int32)
    for i in range(tl.program_id(0) * BN, size, tl.num_programs(0) * BN):
        b_sum ^= tl.load(p_in + i.to(tl.int64) + tl.arange(0, BN))  # [BN]
    tl.store(p_out + tl.program_id(0) * BN + tl.arange(0, BN), b_sum)


def read_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second of a kernel that only reads, ``size`` int32 of them: far more than the caches hold."""
    buffer = torch.randint(1 << 30, (size,), dtype=torch.int32, device=device)
    best = 0.0
    for tile, programs, warps in ((4096, 528, 8), (4096, 1056, 8), (8192, 528, 16), (8192, 1056, 8)):
        out = torch.empty(programs * tile, dtype=torch.int32, device=device)

        def run(_: int, tile=tile, programs=programs, warps=warps, out=out) -> None:
            _read_kernel[(programs,)](buffer, out, size, BN=tile, num_warps=warps)

        best = max(best, 4e6 * size / captured(run, 1, repetitions=2, replays=10).median)
    return best


def dense_torch(shape: Shape, device: torch.device) -> dict[str, Time]:
    """Dense decode attention of torch over contiguous keys and values, by backend; what does not run is left out."""
    sets = 3 if shape.batch * shape.heads * shape.length * shape.dim < 1 << 28 else 2
    query = torch.randn(shape.batch, shape.q_heads, 1, shape.dim, dtype=shape.dtype, device=device)
    kv = [
        torch.randn(2, shape.batch, shape.heads, shape.length, shape.dim, dtype=shape.dtype, device=device)
        for _ in range(sets)
    ]
    # One query without a mask attends to everything, so the group may also go as that many queries of one head.
    rows = query.view(shape.batch, shape.heads, -1, shape.dim)
    found = {}
    for name, backend, q in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION, query),
        ("flash", SDPBackend.FLASH_ATTENTION, query),
        ("flash-rows", SDPBackend.FLASH_ATTENTION, rows),
    ):

        def run(i: int, q=q) -> None:
            scaled_dot_product_attention(q, kv[i][0], kv[i][1], enable_gqa=q.shape[1] != shape.heads)

        try:
            with sdpa_kernel(backend):
                found[name] = captured(run, sets, repetitions=4)
        except RuntimeError:
            torch.cuda.synchronize()
    return found
