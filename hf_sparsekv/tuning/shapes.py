"""Shapes of known models by name: configurations without weights, for the memory plan and the benchmarks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

LONGEST = 262144  # positions: more than most of these models were trained for; step times do not depend on it


def _like(kind, hidden: int, layers: int, heads: tuple[int, int, int], inner: int, vocab: int, tied=False, **others):
    """A configuration; ``heads``: query heads, KV heads, channels."""
    return kind(
        hidden_size=hidden,
        num_hidden_layers=layers,
        **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads)),
        intermediate_size=inner,
        vocab_size=vocab,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=tied,
        **others,
    )


_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
# Five layers of six slide: layer_types follows from sliding_window.
_GEMMA3 = {"vocab": 262208, "tied": True, "sliding_window": 1024, "rope_parameters": _ROPE}
_QWEN3_MOE: dict[str, Any] = {
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_GPT_OSS: dict[str, Any] = {"num_hidden_layers": 24, "num_local_experts": 32, "max_position_embeddings": LONGEST}
_QWEN2 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
SHAPES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-8b": lambda: _like(Qwen3Config, 4096, 36, (32, 8, 128), 12288, 151936),
    "qwen3-32b": lambda: _like(Qwen3Config, 5120, 64, (64, 8, 128), 25600, 151936),
    "qwen3-0.6b": lambda: _like(Qwen3Config, 1024, 28, (16, 8, 128), 3072, 151936, tied=True),
    # Seven query heads a KV head, biases in q, k and v.
    "qwen2.5-7b": lambda: _like(Qwen2Config, 3584, 28, (28, 4, 128), 18944, 152064, **_QWEN2),
    "llama-3.1-8b": lambda: _like(LlamaConfig, 4096, 32, (32, 8, 128), 14336, 128256),
    "llama-3.3-70b": lambda: _like(LlamaConfig, 8192, 80, (64, 8, 128), 28672, 128256),
    "llama-3.2-1b": lambda: _like(LlamaConfig, 2048, 16, (32, 8, 64), 8192, 128256, tied=True),
    # Llama-2-7B: as many KV heads as query heads.
    "mha-7b": lambda: _like(LlamaConfig, 4096, 32, (32, 32, 128), 11008, 32000),
    # Latents (MLA) and mixtures of experts; both are the sizes that transformers gives these classes by itself.
    "glm-4.7-flash": lambda: Glm4MoeLiteConfig(max_position_embeddings=LONGEST),
    "deepseek-v3": lambda: DeepseekV3Config(max_position_embeddings=LONGEST),  # on one GPU with --layers 5 at most
    # Mixtures of experts of heads: 8 of 128, and 4 of 32. Half of the layers of gpt-oss slide.
    "qwen3-30b-a3b": lambda: _like(Qwen3MoeConfig, 2048, 48, (32, 4, 128), 6144, 151936, **_QWEN3_MOE),
    "gpt-oss-20b": lambda: GptOssConfig(**_GPT_OSS),
    "gpt-oss-20b-mxfp4": lambda: GptOssConfig(**_GPT_OSS, quantization_config={"quant_method": "mxfp4"}),
    "gemma3-12b": lambda: _like(Gemma3TextConfig, 3840, 48, (16, 8, 256), 15360, query_pre_attn_scalar=256, **_GEMMA3),
    "gemma3-27b": lambda: _like(Gemma3TextConfig, 5376, 62, (32, 16, 128), 21504, query_pre_attn_scalar=168, **_GEMMA3),
}

# Where the weights of a shape are, on the Hugging Face hub.
HUB = {
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "mha-7b": "meta-llama/Llama-2-7b-hf",
    "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-20b-mxfp4": "openai/gpt-oss-20b",
    "gemma3-12b": "google/gemma-3-12b-it",
    "gemma3-27b": "google/gemma-3-27b-it",
}


def _letters(name: str) -> str:
    """A model's name without case, dividers, and suffixes for its training (``-instruct``)."""
    return re.sub(r"[-_ ]", "", re.sub(r"[-_](instruct|it|base|hf)$", "", name.lower()))


def known_shape(name: str) -> str | None:
    """The name in :data:`SHAPES` for any spelling of it: ``Qwen3-8B``, ``qwen3_8b``, ``Qwen/Qwen3-8B``.

    None for other models, and for copies by other publishers, which may differ.
    """
    if name in SHAPES:
        return name
    publisher, _, model = name.rpartition("/")
    for shape, hub in HUB.items():
        owner, _, there = hub.partition("/")
        if publisher.lower() in ("", owner.lower()) and _letters(model) in (_letters(shape), _letters(there)):
            return shape
    return None
