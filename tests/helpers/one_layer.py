"""Attention of a cache with one layer over keys and values that are made up, without a model."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig

from hf_sparsekv import SparseCache


def layer_of(heads: int, group: int, dim: int) -> torch.nn.Module:
    """What an attention module is to the attention function: Llama's."""
    sizes = {"num_attention_heads": heads * group, "num_key_value_heads": heads, "hidden_size": heads * group * dim}
    config = LlamaConfig(num_hidden_layers=1, head_dim=dim, attn_implementation="sparsekv", **sizes)
    module = torch.nn.Module()
    about = SimpleNamespace(num_key_value_groups=group, layer_idx=0, config=config, is_causal=True, sliding_window=None)
    module.__dict__.update(vars(about))
    return module


@torch.no_grad()
def last_step(cache: SparseCache, queries: Tensor, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Tensor:
    """The last token's ``[H, group, D]``, after a prompt and steps.

    Args:
        queries: of the prompt, ``[H, group, prompt, D]``, or one for all, with ``prompt`` = 1.
        q: of all steps, ``[H, group, D]``. k, v: ``[H, n, D]``.
        prompt: tokens that are read at once; the others come one by one.
    """
    (heads, group, dim), n = q.shape, k.shape[1]
    module, attend = layer_of(heads, group, dim), AttentionInterface()["sparsekv"]
    first, step = (x.flatten(0, 1)[None] for x in (queries, q[:, :, None]))
    k, v, result = k[None], v[None], None
    for begin, end in ((0, prompt), *((i, i + 1) for i in range(prompt, n))):
        states = cache.update(k[:, :, begin:end], v[:, :, begin:end], 0)
        query = (first if begin == 0 else step).expand(-1, -1, end - begin, -1).contiguous()
        result, _ = attend(module, query, *states, None, scaling=dim**-0.5, dropout=0.0)
    return result[0, -1].unflatten(0, (heads, group))
