"""Tiny models of each kind of layer: by what their layers keep, beside some that attend to everything."""

from __future__ import annotations

from functools import cache

import model_list
import torch

from hf_sparsekv import QueryTap

STATES = (
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear"),  # (gated) delta rule
    *("nemotron_h", "bamba", "granitemoehybrid"),  # Mamba 2
    *("jamba", "lfm2", "lfm2_moe"),  # Mamba; short convolutions
)
CHUNKS = ("llama4_text",)
WINDOWS = ("gemma3_text", "gpt_oss", "cohere2", "olmo3", "exaone4", "mimo_v2_flash")
TELLING = ("qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2", "llama4_text", "gemma3_text", "gpt_oss")
FULL = {"block_size": 16, "window": 16, "max_draft": 4, "token_budget": 4096, "dense_layers": 0}
TIGHT = {**FULL, "token_budget": 32, "tail": None}


def new_model(kind: str, attn: str | None = None) -> torch.nn.Module:
    """A new one; ``attn`` None: with attention of transformers' own."""
    model = model_list.build(kind)
    if attn is not None:
        model.set_attn_implementation(attn)
    return model


@cache
def plain(kind: str) -> torch.nn.Module:
    """With attention and caches of transformers' own."""
    return new_model(kind)


@cache
def eager(kind: str) -> torch.nn.Module:
    """With our attention, not optimised."""
    model = new_model(kind, "sparsekv")
    QueryTap(model).install()
    return model
