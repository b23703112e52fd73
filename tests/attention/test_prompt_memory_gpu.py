"""Exact prompts on a GPU: no tensor of queries times columns, whatever hides columns; and the definition's values."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from hf_sparsekv.attention.exact import exact_attention
from hf_sparsekv.attention.masks import sparsekv_mask
from hf_sparsekv.ops.attention.prompt_attention.reference import prompt_attention
from hf_sparsekv.types import AttentionParams

pytestmark = pytest.mark.gpu

N = 16384
ROOM = 96 << 20  # bytes beside the result; a mask of bytes takes 256 MB a row, scores of one head four times that
# query heads, KV heads, channels of keys and values, and what hides columns
KINDS = {
    "plain": (8, 2, 128, 128, {}),
    "a window": (8, 2, 256, 256, {"window": 1024}),
    "a short window, sinks": (16, 2, 64, 64, {"window": 128, "sinks": True}),
    "sinks": (16, 2, 64, 64, {"sinks": True}),
    "a cap": (4, 2, 256, 256, {"softcap": 50.0}),
    "a cap and a window": (4, 2, 256, 256, {"softcap": 50.0, "window": 4096}),
    "padding in front": (8, 2, 128, 128, {"pads": (9000, 0)}),
    "padding in front, sinks": (8, 2, 64, 64, {"pads": (9000, 0), "sinks": True}),
    "padding anywhere": (8, 2, 128, 128, {"pads": (9000, 10), "holes": True}),
    "a window, padding": (8, 2, 128, 128, {"pads": (9000, 0), "window": 512}),
    "chunks": (8, 2, 128, 128, {"chunk": 2048}),
    "chunks, padding": (8, 2, 128, 128, {"chunk": 2048, "pads": (9000, 7)}),
    "keys of 192": (8, 8, 192, 128, {}),
    "keys of 192, padding": (8, 8, 192, 128, {"pads": (9000, 0)}),
    "heads of 512": (4, 1, 512, 512, {}),
    "float32": (4, 2, 64, 64, {"window": 700, "dtype": torch.float32}),
    "wide float32": (4, 2, 128, 128, {"window": 700, "dtype": torch.float32}),
}


def columns_of(pads: tuple[int, ...] | None, n: int, holes: bool) -> torch.Tensor | None:
    if pads is None:
        return None
    columns = torch.arange(n, device="cuda")[None] >= torch.tensor(pads, device="cuda")[:, None]
    return columns & (torch.arange(n, device="cuda") % 1000 > 30) if holes else columns


@pytest.mark.parametrize("q", [N, 4000], ids=["whole", "piece"])
@pytest.mark.parametrize("name", KINDS)
def test_no_mask_and_no_scores(name, q):
    q_heads, heads, dk, dv, kind = KINDS[name]
    kind = dict(kind)
    dtype, pads = kind.pop("dtype", torch.bfloat16), kind.pop("pads", None)
    columns, batch = columns_of(pads, N, kind.pop("holes", False)), len(pads or (0,))
    sinks = torch.randn(q_heads, device="cuda") if kind.pop("sinks", False) else None
    window, chunk = kind.get("window"), kind.get("chunk")
    torch.manual_seed(0)

    def made(tokens: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(batch, tokens, heads, dim, dtype=dtype, device="cuda").transpose(1, 2)

    query, key, value = made(q, q_heads, dk), made(N, heads, dk), made(N, heads, dv)
    params = AttentionParams(dk**-0.5, kind.get("softcap"), sinks)
    about = {"batch_size": batch, "q_length": q, "kv_length": N, "q_offset": N - q, "device": torch.device("cuda")}
    origin = torch.tensor(pads or (0,), dtype=torch.int64, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    given: dict = {"columns": columns}
    if window is not None or chunk is not None:
        function = chunked_causal_mask_function(chunk, origin) if chunk else sliding_window_causal_mask_function(window)
        made_mask = sparsekv_mask(**about, mask_function=function, attention_mask=columns, local_size=chunk or window)
        given = {"mask": made_mask}
    out = exact_attention(query, key, value, params, **given)
    taken = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    copies = 3 * query.numel() * query.element_size() // batch if pads or dk != dv else 0  # padded to cuDNN's grid
    assert taken <= ROOM + copies, f"{taken / 2**20:.0f} MB"
    last = 300
    expected = prompt_attention(
        query[:, :, -last:], key, value, params.scale, columns, window, chunk, origin.int(), params.softcap, sinks
    )
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    difference = (out[:, :, -last:].float() - expected.float()).square().mean().sqrt()
    assert difference <= limit * expected.float().square().mean().sqrt()
    if q == N:
        seen = slice(0, 400)
        columns = columns if columns is None else columns[:, seen]
        expected = prompt_attention(
            query[:, :, seen], key[:, :, seen], value[:, :, seen], params.scale, columns, window, chunk, origin.int(),
            params.softcap, sinks,
        )  # fmt: skip
        torch.testing.assert_close(out[:, :, seen].float(), expected.float(), atol=3e-2, rtol=3e-2)
