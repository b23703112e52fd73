"""What sparse attention over latents has to beat: torch's attention over them, and what transformers does.

* absorbed: one KV head, keys are the rows, values their beginning (DeepSeek-V2, section 2.1), by any backend that takes
  heads 576 wide.
* expanded: every step multiplies all latents with ``kv_b_proj`` and attends to what comes out, head by head.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from .operator_inputs import Shape
from .operator_timing import Time, captured

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
        ValueError: these heads are no known model's, or memory does not suffice.
    """
    if shape.q_heads not in HEADS:
        raise ValueError(f"the channels of {shape.q_heads} expanded heads are not known")
    nope, value = HEADS[shape.q_heads]
    rope, heads = shape.dim - shape.value_dim, shape.q_heads
    size = shape.batch * shape.length * heads * (2 * nope + rope + 2 * value) * shape.dtype.itemsize
    if size > MOST:
        raise ValueError(f"expanded keys and values of {shape.batch} x {shape.length} take {size / 1e9:.0f} GB")
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
